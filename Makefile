# Everything a developer types. Nothing here needs more than Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check soak stubs

setup: $(VENV)/.ready

# pip, not uv: pip finds the CPU build of torch that constraints.txt pins.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m deploy.commands.demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

soak: setup
	$(BIN)/python -m tests.soak

stubs: setup
	PYTHON=$(CURDIR)/$(BIN)/python sh proto/generate.sh
