# Every target finds or makes its environment; see egs/common/env.sh.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-oldest lint same-loss fuzz mini bench

find := export GOMP_SPINCOUNT=2000 && source egs/common/env.sh && find_python test
for_tests := $(find) && "$$python" -m

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make .venv with the requirements, this package and the development tools
	@source egs/common/env.sh && make_venv test

# One process per core, up to four. The tests of a file share what they trained, so they stay in one
# process. Without reordering, the longest tests do not come last.
in_parallel := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: ## run the tests (minutes)
	@$(for_tests) pytest $(in_parallel) -m "not slow and not gpu"

test-all: ## run all tests that need no GPU, also the slow ones
	@$(for_tests) pytest $(in_parallel) -m "not gpu"

test-oldest: ## install the wheel with the oldest supported versions (PYTHON=python3.10), use and test it
	@$(find) && "$$python" tests/oldest.py $(if $(PYTHON),--python $(PYTHON))

lint: ## run ruff, basedpyright, shellcheck, shfmt and the import rules
	@$(for_tests) pytest tests/contracts/test_house.py tests/contracts/test_shell.py tests/contracts/test_layering.py

same-loss: ## compare 20 training steps bit for bit with BASE=COMMIT (DATA=DIR: data directories of mini)
	@$(find) && "$$python" tests/same_loss.py $(BASE) $(if $(DATA),--data $(DATA)) $(ARGS)

fuzz: ## read N=1000000 damaged files with every parser (options: ARGS="--help")
	@$(find) && "$$python" tests/safety/fuzz.py $(if $(N),--inputs $(N)) $(ARGS)

mini: ## run the recipe that needs no corpus
	@bash egs/mini/run.sh

bench: ## benchmark, also PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" (options: ARGS="--help")
	@$(find) && "$$python" benchmarks/suite.py $(if $(PEERS),--peers $(PEERS)) $(ARGS)
