# `make` prints the targets. On a fresh machine `make demo` and `make test` are enough: both make .venv first.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.complete
BIN := $(VENV)/bin
WORKERS ?= 2
# One thread a worker: the workers share the cores. A file stays with one worker, which starts its processes once.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Options of the benchmark: make bench BENCH="workload=gpt2 rounds=3 layers=12"; --help lists them.
BENCH ?= workload=all method=all
BUDGET ?= 4

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow bench bench-tiny bench-growth bench-loop bench-full-size bench-page figure-throughput \
	figure-runtime_breakdown pretrain sweep-cifar-mini sweep-sst2-mini sweep-e2e-mini sweep-samsum-mini sweep-samsum-pipeline-mini lint format types clean

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9_-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

bench: $(STAMP) ## speed and memory, ours and Opacus's, against non-private: all workloads, hours
	$(BIN)/python -m benchmarks.throughput $(BENCH)

bench-tiny: $(STAMP) ## the same at the smallest sizes, to see that all of it runs: minutes
	$(BIN)/python -m benchmarks.throughput tiny=true rounds=1 steps=1 out=results/runs/bench-tiny

bench-growth: $(STAMP) ## time and memory as batch, length, width and depth double: minutes
	$(BIN)/python -m benchmarks.growth

bench-loop: $(STAMP) ## the loop of run.py around the bare step, on the demo: a minute
	$(BIN)/python -m benchmarks.loop

bench-full-size: $(STAMP) ## one whole update of RoBERTa-base, GPT-2 and GPT-2-xl (LoRA) at full size: minutes, 5 GiB
	$(BIN)/python -m benchmarks.full_size

bench-page: $(STAMP) ## the tables of docs/benchmarks.md, from the measured rows
	$(BIN)/python -m groupwise.analysis.benchmark_tables

figure-throughput: $(STAMP) ## the paper's Figure 1, from the measured rows (BUDGET: GiB of its second panel)
	$(BIN)/python -m groupwise.analysis.throughput_figure throughput --budget $(BUDGET)

figure-runtime_breakdown: $(STAMP) ## the same on another machine configuration (the paper's appendix)
	$(BIN)/python -m groupwise.analysis.throughput_figure runtime_breakdown --budget $(BUDGET)

pretrain: $(STAMP) ## the mini RoBERTa and GPT-2 on the public text in $$GROUPWISE_DATA/corpus, into pretrained/: an hour on two cores
	$(BIN)/python run.py task=pretrain_masked clip=none scale=mini export=pretrained/roberta_mini
	$(BIN)/python run.py task=pretrain_causal clip=none scale=mini export=pretrained/gpt2_mini

sweep-cifar-mini: $(STAMP) ## real CIFAR-10 at scale=mini, every mode, then its rows into results/measured
	$(BIN)/python run.py -m +sweep=cifar_mini
	$(BIN)/python -m groupwise.analysis.collect results/measured/cifar_mini.csv task=cifar scale=mini

sweep-sst2-mini: $(STAMP) ## real SST-2 on the mini RoBERTa: 36 runs, half an hour on two cores, then its rows into results/measured
	$(BIN)/python run.py -m +sweep=sst2_mini
	$(BIN)/python -m groupwise.analysis.collect results/measured/sst2_mini.csv task=sst2 scale=mini

sweep-e2e-mini: $(STAMP) ## real E2E on the mini GPT-2: 3 runs, then its rows into results/measured
	$(BIN)/python run.py -m +sweep=e2e_mini
	$(BIN)/python -m groupwise.analysis.collect results/measured/e2e_mini.csv task=e2e scale=mini

sweep-samsum-mini: $(STAMP) ## real SAMSum with LoRA on the mini GPT-2: 3 runs, then its rows into results/measured
	$(BIN)/python run.py -m +sweep=samsum_mini
	$(BIN)/python -m groupwise.analysis.collect results/measured/samsum_mini.csv task=samsum scale=mini

# Fewer steps than the sweep above, so that its runs and these stay apart.
sweep-samsum-pipeline-mini: $(STAMP) ## real SAMSum on four stages, per device, and flat and per layer in one process, at three budgets: 10 runs
	$(BIN)/python run.py -m +sweep=samsum_pipeline_mini
	$(BIN)/python run.py -m +sweep=samsum_pipeline_mini clip=none privacy.epsilon=inf
	$(BIN)/python run.py -m +sweep=samsum_epsilon_mini
	$(BIN)/python run.py -m +sweep=samsum_epsilon_mini clip=none privacy.epsilon=inf
	$(BIN)/python -m groupwise.analysis.collect results/measured/samsum_pipeline_mini.csv task=samsum scale=mini train.epochs=0.15

lint: $(STAMP) ## ruff: style and likely mistakes
	$(BIN)/ruff check .

format: $(STAMP) ## ruff: mend what it can
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy
	$(BIN)/mypy

clean: ## remove caches and .venv; results stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
