# Every target finds or makes its own environment; see egs/common/env.sh.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-all lint same-loss mini bench

find := export GOMP_SPINCOUNT=2000 && source egs/common/env.sh && find_python test
for_tests := $(find) && "$$python" -m

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make .venv with everything, whatever environment is active
	@source egs/common/env.sh && make_venv test

# A process a core, up to four; a file stays in one, since its tests share what they trained. In the
# order of the folders: the longest tests, which are in files of few, must not come last.
in_parallel := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: ## the tests that take minutes
	@$(for_tests) pytest $(in_parallel) -m "not slow and not gpu"

test-all: ## all tests that need no GPU
	@$(for_tests) pytest $(in_parallel) -m "not gpu"

lint: ## ruff, basedpyright, shellcheck, shfmt, the import rules
	@$(for_tests) pytest tests/contracts/test_house.py tests/contracts/test_shell.py tests/contracts/test_layering.py

same-loss: ## 20 steps of mini, bit for bit: the working tree against BASE=COMMIT (DATA=DIR: mini's)
	@$(find) && "$$python" tests/same_loss.py $(BASE) $(if $(DATA),--data $(DATA)) $(ARGS)

mini: ## the recipe that needs no corpus
	@bash egs/mini/run.sh

bench: ## speed of every part; PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" beside them; ARGS="--help"
	@$(find) && "$$python" benchmarks/suite.py $(if $(PEERS),--peers $(PEERS)) $(ARGS)
