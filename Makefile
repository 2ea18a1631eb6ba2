# Everything from a clean clone: `make demo` and `make test` need only Python 3.11+ and a package registry.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: docs demo test test-slow test-light lint bench clean
.DELETE_ON_ERROR:

$(VENV)/.core: pyproject.toml constraints.txt
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.core  ## train reference and federated recommenders on MovieLens-100K and recommend films
	@$(BIN)/python examples/quickstart.py

lint: $(VENV)/.dev  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint  ## style, types, tests and doctests: minutes
	@$(BIN)/pytest -n auto -m "not slow"

test-slow: $(VENV)/.dev  ## real data sets, kills, TLS deployments
	@$(BIN)/pytest -n auto -m slow tests

LIGHT := $(VENV)-light

$(LIGHT)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(LIGHT)
	@$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . pytest pytest-xdist hypothesis pandas pyarrow
	@touch $@

test-light: $(LIGHT)/.core  ## the tests that need no PyTorch, in an environment without it
	@$(LIGHT)/bin/pytest -n auto -m "not slow" tests

bench: $(VENV)/.dev  ## print the speed figures of docs and README
	@$(BIN)/python benchmarks/ground_floor.py
	@$(BIN)/python benchmarks/engines.py
	@$(BIN)/python benchmarks/scale.py

docs: $(VENV)/.dev  ## the site, into build/site, without warnings
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:  ## remove what the other targets made (the data cache stays: `fedmosaic doctor` says where it is)
	@rm -rf $(VENV) $(LIGHT) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
