# `make` prints the targets. On a fresh machine `make demo` and `make test` are enough: both make .venv first.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.complete
BIN := $(VENV)/bin
WORKERS ?= 2
# One thread a worker: the workers share the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow sweep-cifar-mini lint format types clean

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv from requirements.txt (again whenever that file changes)

# The stamp is written last, so an interrupted installation starts over.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || \
		{ echo "error: Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is none of them;" \
			"name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

demo: $(STAMP) ## train one private model on embedded data: about a minute, no network
	$(BIN)/python run.py task=cifar clip=adaptive_layer scale=demo

test: $(STAMP) ## the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(STAMP) ## all tests, the slow ones too
	$(PYTEST)

sweep-cifar-mini: $(STAMP) ## real CIFAR-10 at scale=mini, every mode, then its rows into results/measured
	$(BIN)/python run.py -m +sweep=cifar_mini
	$(BIN)/python -m groupwise.analysis.collect results/measured/cifar_mini.csv task=cifar scale=mini

lint: $(STAMP) ## ruff: style and likely mistakes
	$(BIN)/ruff check .

format: $(STAMP) ## ruff: mend what it can
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy
	$(BIN)/mypy

clean: ## remove caches and .venv; results stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
