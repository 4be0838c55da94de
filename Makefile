PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(shell command -v $(PYTHON) || command -v python3)

.PHONY: install train test quick lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,dev]"
	@touch $@

# make train ARGS="--train.steps 20 --parallel.pp 2"
train: install
	$(BIN)/pipeloom train $(ARGS)

test: install lint
	$(BIN)/python -m pytest -n 2 -q

quick: install lint
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not dist"

lint: install
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
