# Every target finds or makes its environment; see egs/common/environment.py.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-all tutorial test-oldest lint docs release same-loss fuzz mini bench

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Hundreds of short commands are started: they read compiled modules.
unexport PYTHONDONTWRITEBYTECODE
with_python := export GOMP_SPINCOUNT=2000 && python=$$(python3 egs/common/environment.py test) && "$$python"

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make .venv with requirements, this package and development tools (TORCH=cpu: without CUDA)
	@python3 egs/common/environment.py make $(if $(TORCH),--torch $(TORCH))

# Four processes also on fewer cores, because many tests wait for commands. The tests of a file share
# what they trained, so they stay in one process. Without reordering, the longest tests do not come
# last. A process that dies is not replaced: pytest-xdist would wait for ever.
in_parallel := -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: ## run the tests (minutes)
	@$(with_python) -m pytest $(in_parallel) -m "not slow and not gpu and not lint"

test-all: ## run all tests that need no GPU, also the slow ones and the linters
	@$(with_python) -m pytest $(in_parallel) -m "not gpu"

tutorial: ## run the tutorial, as a page and as a notebook (four minutes)
	@$(with_python) -m pytest tests/docs/test_tutorial.py::test_the_page_and_then_the_notebook_run

test-oldest: ## install the wheel with the oldest supported versions (PYTHON=python3.10), use and test it
	@$(with_python) tests/oldest.py $(if $(PYTHON),--python $(PYTHON))

lint: ## run ruff, basedpyright, shellcheck, shfmt and the import rules
	@$(with_python) -m pytest tests/contracts/test_house.py tests/contracts/test_shell.py tests/contracts/test_layering.py

docs: ## build the documentation site in site/; a broken link, anchor or reference is an error
	@export NO_MKDOCS_2_WARNING=1 && $(with_python) -m mkdocs build --strict

release: ## build wheel and sdist, check them in an empty environment, upload nothing (ARGS=--rehearsal)
	@$(with_python) tests/release.py $(ARGS)

same-loss: ## compare 20 training steps bit for bit with BASE=COMMIT (DATA=DIR: data directories of mini)
	@$(with_python) tests/same_loss.py $(BASE) $(if $(DATA),--data $(DATA)) $(ARGS)

fuzz: ## read N=1000000 damaged files with every parser (options: ARGS="--help")
	@$(with_python) tests/safety/fuzz.py $(if $(N),--inputs $(N)) $(ARGS)

mini: ## run the recipe that needs no corpus
	@bash egs/mini/run.sh

bench: ## benchmark, also PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" (options: ARGS="--help")
	@$(with_python) benchmarks/suite.py $(if $(PEERS),--peers $(PEERS)) $(ARGS)
