# One command here and in CI. Everything installs itself into .venv from pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 'torch>=2.6,<2.14'

.PHONY: help demo test test-all lint docs bench clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# torch first and bounded: a plain `torch` may bring gigabytes of CUDA packages. One that is there already stays.
$(VENV)/.base:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "EdgeFL needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## the main job on real data: broker, coordinator, four devices, six stages, the bill
	@$(BIN)/edgefl run demo

lint: $(VENV)/.dev  ## ruff, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.dev lint  ## everything CI runs on each change
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow'

test-all: $(VENV)/.dev lint  ## test, and the slow ones (nightly)
	$(BIN)/python -m pytest

docs: $(VENV)/.dev  ## regenerate the configuration and command references
	$(BIN)/python docs/generate.py

bench: $(VENV)/.dev  ## the figures of the README, side by side in one run
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.har_prototypes

clean:  ## forget the environment and all runs
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
