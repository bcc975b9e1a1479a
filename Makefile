# etpi's commands. Everything they make lies in .venv, .dagster_home, data and etpi.duckdb; `make clean` removes the last three.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup bubblewrap demo demo-all results run status ui test lint bench clean

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

demo: setup  ## a strong and a weak teacher's student, from tasks to the leaderboard, on a CPU
	@$(CLI) demo

demo-all: setup  ## every experiment on the embedded world, once
	@$(CLI) demo-all

results: setup  ## the same over three seeds, into docs/results.md
	@$(CLI) results

run: setup  ## EXPERIMENT=name: what is missing or stale of it, and all it rests on
	@[ -n "$(EXPERIMENT)" ] || { echo "usage: make run EXPERIMENT=name"; $(CLI) status; exit 1; }
	@$(CLI) run $(EXPERIMENT)

status: setup  ## [EXPERIMENT=name]: what is missing, stale or blocked, through the whole chain
	@$(CLI) status $(EXPERIMENT)

ui: setup  ## Dagster's web page on http://localhost:3000 (PORT=…)
	@$(BIN)/dagster dev --port $(or $(PORT),3000)

test: setup lint  ## lint, types, SQL lint, tests
	@$(BIN)/python -m pytest

lint: setup  ## ruff, pyright, sqlfluff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/pyright
	@$(BIN)/sqlfluff lint sql

bench: setup  ## what the parts cost: figures for docs
	@for script in bench/*.py; do echo "-- $$script"; $(BIN)/python $$script; done

clean:  ## remove data, the catalog and Dagster's history
	@rm -rf data etpi.duckdb etpi.duckdb.wal .dagster_home .env
