# Every path is relative to this folder, so that `make -C path/to/turbogr train` works from anywhere.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test lint bench npu-plugin npu-kernels npu-cpu-twin clean

PYTHON ?=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.turbogr-setup
KERNELS := $(VENV)/.turbogr-kernels
DATA := data/movielens-100k
RECIPE := recipes/movielens-100k/hstu.yaml

help:
	@echo "make setup   create .venv and install everything (PYTHON=path/to/python3.11 to choose the interpreter)"
	@echo "make train   train HSTU on MovieLens-100K, then test the best checkpoint"
	@echo "make test    run all tests"
	@echo "make lint    ruff and mypy"
	@echo "make bench   run every benchmark"
	@echo "make npu-plugin   compile the plugin for Ascend NPUs (needs no CANN; make npu-kernels does, docs/npu.md)"
	@echo "make clean   remove build output and caches (.venv, data/ and runs/ stay)"

setup: $(STAMP) $(KERNELS)

# The stamp is written last: an interrupted installation is taken up again by the next `make`.
$(STAMP): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

# All kernels at once, instead of one after the other in the first step. Without a compiler it says so and goes on.
$(KERNELS): $(STAMP) $(wildcard kernels/cpu/*)
	$(PY) -m turbogr doctor --compile
	@touch $@

train: $(DATA)/manifest.json $(KERNELS)
	@bash scripts/compiler_note.sh
	$(PY) -m turbogr fit -c $(RECIPE) --overwrite
	$(PY) -m turbogr test -c $(RECIPE)

$(DATA)/manifest.json: | $(STAMP)
	$(PY) -m turbogr data fetch movielens-100k --out data/raw/movielens-100k
	$(PY) -m turbogr data prepare movielens data/raw/movielens-100k --out $(DATA)

test: $(STAMP) $(KERNELS)
	@bash scripts/compiler_note.sh
	@# By file: what a file's tests share, such as ranks, is started once.
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The training step is measured on real sequences where `make train` has left some.
bench: $(STAMP) $(KERNELS)
	@failed=; for script in benchmarks/[!_]*.py; do \
	  options=; if [ $$script = benchmarks/train_step.py ] && [ -f $(DATA)/manifest.json ]; then options="--data-short $(DATA)"; fi; \
	  echo "== $$script $$options"; $(PY) "$$script" $$options || failed="$$failed $$script"; done; \
	if [ -n "$$failed" ]; then echo "promises not kept:$$failed" >&2; exit 1; fi

# docs/npu.md. The first needs no CANN and no NPU; torch-npu's wheel is downloaded and unpacked, never installed.
npu-plugin: $(STAMP)
	$(PY) -m turbogr.npu_build

npu-kernels: $(STAMP)
	$(PY) -m turbogr.npu_build --kernels

npu-cpu-twin: $(STAMP)
	$(PY) -m turbogr.npu_build --cpu-twin

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis turbogr.egg-info
	find turbogr tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
