# One command here and in CI. Everything installs itself into .venv, the only environment there is, from pyproject.toml.
PYTHON ?= python3
# `make demo VENVFLAGS=--system-site-packages` lets .venv use a torch that is there already, such as a Jetson's own.
VENVFLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := 'torch>=2.8,<2.14'

LEDGER_TESTS := $(addprefix tests/,coordinator/test_ledger.py coordinator/test_coordinator_runner.py cli/test_cli_read.py \
  coordinator/test_backup.py cli/test_prune.py \
  fleets/test_fleet.py fleets/test_fleet_kept.py)

.PHONY: help wheel images wheels demo test quick test-all test-lowest test-gpu test-postgresql test-kserve test-runtimes own-data lint docs site bench fuzz mutants clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# torch first: the largest download is kept when a later step fails, and what follows finds it and leaves it alone.
# PyPI's torch for x86-64 brings gigabytes of CUDA packages. On a machine without such a card, go without them by
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
$(VENV)/.base:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)'. Name a Python from 3.10 on: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "EdgeFL needs Python 3.10 or newer, not %d.%d. Name one: make PYTHON=python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENVFLAGS) $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(PIP) install --editable '.[demo]'
	@touch $@

# uv finds and unpacks in half a minute what takes pip three. It reads none of pip's settings (an index of one's own), so
# pip is asked where uv fails, and where .venv shares the system's packages, which uv does not count as installed.
$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(if $(VENVFLAGS),,$(PIP) install uv && VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --editable '.[dev]' ||) \
		$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.demo

# In an environment of its own: building needs neither torch nor .venv.
wheel:  ## dist/edgefl_toolkit-*.whl, to install on devices and servers (the project is on no package index)
	$(PYTHON) -m venv build/wheel-environment
	build/wheel-environment/bin/python -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir dist .
	@ls dist/*.whl

BUILDER ?= docker
images:  ## edgefl-agent, edgefl-coordinator and edgefl-serve as container images (BUILDER=podman: by another builder)
	$(foreach one,agent coordinator serve,$(BUILDER) build --file containers/$(one).Dockerfile --tag edgefl-$(one) . &&) true

# For a device without internet, by its processor, C library (2.GLIBC) and Python: make wheels ARCH=aarch64 FOR=3.10
ARCH ?= x86_64
GLIBC ?= 28
FOR ?= 3.11
EXTRA ?= train
WHEELS ?= dist/$(ARCH)-$(FOR)
wheels: wheel  ## $(WHEELS): the wheel and what an extra needs, for a device without internet (docs/install.md)
	build/wheel-environment/bin/python -m pip --disable-pip-version-check --quiet download --dest $(WHEELS) \
		--only-binary=:all: --implementation cp --python-version $(FOR) \
		$(foreach minor,$(shell seq 5 $(GLIBC)),--platform manylinux_2_$(minor)_$(ARCH)) --platform manylinux2014_$(ARCH) \
		"$$(ls -t dist/*.whl | head -1)$(if $(EXTRA),[$(EXTRA)])"
	@du -sh $(WHEELS)

demo: $(VENV)/.demo  ## the main job on real data: broker, coordinator, four devices, six stages, the bill
	@$(BIN)/edgefl run demo

lint: $(VENV)/.dev  ## ruff, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.dev  ## everything CI runs on each change, lint while tests wait for processes
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow' --durations=30

test-all: $(VENV)/.dev lint  ## test, and the slow ones (nightly)
	$(BIN)/python -m pytest

OWN_DATA_DEBIAN := fortunes fortunes-de tango-icon-theme klettres-data \
	$(foreach language,en fr es it ru,asterisk-core-sounds-$(language)-wav)
AS_ROOT = $(if $(filter-out 0,$(shell id -u)),sudo)
own-data: $(VENV)/.dev  ## the packages that the sets of benchmarks/own_data come in (Debian's by apt-get)
	$(BIN)/python -m pip --disable-pip-version-check --quiet install palmerpenguins vega_datasets statsmodels sktime
	$(AS_ROOT) apt-get update -qq
	$(AS_ROOT) apt-get install -y -qq --no-install-recommends $(OWN_DATA_DEBIAN) >/dev/null

# PyPI's torch for x86-64 brings 5 GB of CUDA packages; LOWEST_TORCH='torch<2.14', with an index that has it without, does not.
LOWEST := build/lowest
LOWEST_TORCH ?= torch==2.8.0
$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet install uv '$(LOWEST_TORCH)'
	$(LOWEST)/bin/python -m pip freeze | grep '^torch==' > $(LOWEST)/torch.txt
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --extra dev --python $(LOWEST)/bin/python \
		--override $(LOWEST)/torch.txt --output-file $(LOWEST)/versions.txt pyproject.toml
	VIRTUAL_ENV=$(LOWEST) $(LOWEST)/bin/uv pip install --quiet --editable '.[dev]' \
		--constraint $(LOWEST)/versions.txt --override $(LOWEST)/torch.txt
	@touch $@

test-lowest: $(LOWEST)/.ready  ## test, with the lowest versions that pyproject.toml admits (nightly)
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadscope -m 'not slow' --durations=30

test-postgresql: $(VENV)/.dev  ## what concerns the ledger, on a PostgreSQL server of its own (installed when missing)
	.ci/postgresql sh -c "$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow' $(LEDGER_TESTS) \
		&& $(BIN)/python -m pytest -m 'not slow' tests/coordinator/test_ledger_faults.py" # which restarts the server

test-gpu: $(VENV)/.dev  ## training and its memory limits on this machine's NVIDIA card
	EDGEFL_REQUIRE_GPU=1 $(BIN)/python -m pytest tests/gpu

# In an environment of its own: KServe's package has versions of pandas, protobuf and psutil that are not ours.
test-kserve: $(VENV)/.dev  ## `edgefl serve` with KServe's own client, installed for it (nightly)
	$(PYTHON) -m venv build/kserve-environment
	build/kserve-environment/bin/python -m pip --disable-pip-version-check --quiet install 'kserve>=0.15'
	EDGEFL_KSERVE_PYTHON="$(CURDIR)/build/kserve-environment/bin/python" \
		$(BIN)/python -m pytest tests/serve/test_foreign_clients.py -k kserve

RUNTIMES := build/runtimes
# onnxruntime 1.17 has wheels for Python 3.8 to 3.12.
test-runtimes: $(VENV)/.dev  ## bundles in other runtimes, installed for it: pip, npm, node and chromium (nightly)
	$(PYTHON) -m venv $(RUNTIMES)/oldest
	$(RUNTIMES)/oldest/bin/python -m pip --disable-pip-version-check --quiet install 'onnxruntime==1.17.3' 'numpy<2'
	$(PYTHON) -m venv $(RUNTIMES)/python
	$(RUNTIMES)/python/bin/python -m pip --disable-pip-version-check --quiet install openvino tract numpy
	cd $(RUNTIMES) && npm install --ignore-scripts --silent --no-save --prefix . onnxruntime-node onnxruntime-web
	EDGEFL_RUNTIMES="$(CURDIR)/$(RUNTIMES)" $(BIN)/python -m pytest -rP tests/export/test_runtimes.py

docs: $(VENV)/.dev  ## regenerate the configuration and command references
	$(BIN)/python docs/generate.py

site: $(VENV)/.dev  ## docs/ as web pages in build/site, without a network; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build # --quiet would let warnings pass
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

bench: $(VENV)/.dev  ## the figures of the README, side by side in one run
	$(BIN)/python -m benchmarks.cost.schedules --write docs/results/schedules.md
	$(BIN)/python -m benchmarks.accuracy.har_prototypes --seeds 3 --plain --write docs/results/har.md

# atheris has wheels for Linux on x86-64; Python 3.10 to 3.13. SECONDS_EACH=600 TARGETS='part packed' for more of less.
SECONDS_EACH ?= 60
TARGETS ?=
fuzz: $(VENV)/.dev  ## every decoder, guided by coverage: a minute each (docs/fuzzing.md)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install 'atheris>=2.3'
	PYTHONPATH=tests $(BIN)/python -m fuzz --time $(SECONDS_EACH) --target $(TARGETS)

# EACH mutants of each folder, drawn by SEED; 0 is all 12,000. ONLY=coordinator/core for one folder.
EACH ?= 60
SEED ?= 1
ONLY ?=
mutants: $(VENV)/.dev  ## whether the tests can fail: a sample of mutants (nightly; docs/results/mutants.md)
	@$(BIN)/python -c 'import mutmut' 2>/dev/null || $(PIP) install --editable '.[mutants]'
	PYTHONPATH=tests $(BIN)/python -m mutation --each $(EACH) --seed $(SEED) $(if $(ONLY),--folder $(ONLY))

clean:  ## forget the environment and what was built; runs stay
	rm -rf $(VENV) build dist mutants .fuzz .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
