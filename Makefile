# Everything runs from a clean clone with Python 3.11 or newer and make; the rest is installed
# into .venv, once, and again when pyproject.toml changes.

PYTHON ?= python3
JOBS ?= 2  # processes that test side by side; each takes about 3 GB
BIN := .venv/bin
# found also from the directory that holds a clone named jaxmm
EDITABLE := --config-settings editable_mode=compat --editable
export JAX_PLATFORMS ?= cpu

.PHONY: serve test check kernels bench readme clean

serve: .venv/product            ## start the server; prints its URL and a request to paste
	$(BIN)/jaxmm serve $(ARGS)

test: .venv/development         ## the whole suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: .venv/development        ## style, types and the fast tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not tpu and not slow and not aot" $(ARGS)

kernels: .venv/development      ## kernels: against references, compiled for TPUs, their static cost
	$(BIN)/python -m pytest tests/kernels_pallas
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.bench.kernel_table $(ARGS)

bench: .venv/development        ## jaxmm and transformers in turn: make bench MODEL=DIR [ARGS=...]
	$(BIN)/python -m tests.bench.bench_peers --model "$(MODEL)" --transformers $(ARGS)

readme: .venv/product           ## write the README's settings table and tree from the source
	$(BIN)/python -m docs.write_readme

clean:                          ## remove the environment and everything made
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'jaxmm needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv

.venv/product: pyproject.toml | .venv/bin/python
	@echo "installing jaxmm into .venv: a gigabyte on disk, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) .
	touch $@

.venv/development: pyproject.toml | .venv/bin/python
	@echo "installing jaxmm and its development tools into .venv: two gigabytes on disk, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) ".[test,dev]"
	touch $@ .venv/product
