PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(shell command -v $(PYTHON) || command -v python3)

# the many processes of the tests start from compiled modules
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all install train test test-all interop budget full versions real lint fuzz growth mutants mutate soak gpu docs clean

# the environment, and the line that makes `pipeloom` a command of this shell
all: install
	@$(activate)

activate = echo "pipeloom is installed in $(VENV); to use it in this shell:  . $(BIN)/activate"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,hf,data,tensorboard,opt,dev]"
	@touch $@

# make train ARGS="--train.steps 20 --parallel.pp 2"
train: install
	$(BIN)/pipeloom train $(ARGS)
	@$(activate)

# The last line names the tests that failed twice, and those that failed beside the others and passed alone.
TWICE = $(BIN)/python tests/support/twice.py

CORE = (unit or core) and not slow

# the checks, tests/unit and the tests marked `core` of tests/dist and tests/e2e, without those marked `slow`: minutes
test: install lint
	$(TWICE) -n 2 -m "$(CORE) and not full"

# six of the mutants, and all other tests, which wait for clocks and a browser a third of their time
test-all: install
	$(BIN)/python tests/mutants.py --sample 6 --no-baseline
	$(TWICE) -n 3 -m "not ($(CORE)) and not full" tests/unit tests/dist tests/e2e

# jobs written for Megatron-LM, torchtitan and NeMo Automodel, judged by their own code, in a folder of its own
interop: install .interop/.installed
	$(BIN)/python -m pytest -q -n 2 tests/interop

.interop/.installed: Makefile
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .interop megatron-core==0.16.1 torchtitan==0.3.0 \
	  nemo-automodel==0.7.0 spmd_types==0.2.3 tyro==1.0.17 typeguard==4.6.1 docstring-parser==0.18.0 einops==0.8.2
	@touch $@

# the times that the documentation promises: promised, measured, and the ratio; nothing fails
budget: install
	$(BIN)/python tests/budget.py

# every change of tests/mutants.toml must turn a named test red
mutants: install
	$(BIN)/python tests/mutants.py $(ARGS)

# generated changes of twelve modules, and the share of them that the tests see; ARGS="check simulate --sample 60"
mutate: install
	$(BIN)/python tests/mutate.py $(ARGS)

# the cells of the matrices that both leave out
full: install
	$(BIN)/python -m pytest -q -m full

# a selection of the tests with other versions of torch and transformers, and a table; ARGS="transformers==5.22.2"
versions: install
	$(BIN)/python tests/versions.py $(ARGS)

# a chat model from the Python index, fine-tuned with the defaults and asked for what it knew; ARGS=lora for one of two ways
real: install
	$(BIN)/python benchmarks/real.py $(ARGS)

# make fuzz                                       all parts, 10 minutes
# make fuzz PART=costs ARGS="--cases 10000"       one part; also --seed N, --minutes M
fuzz: install
	$(BIN)/python -m tests.fuzz $(PART) $(or $(ARGS),--minutes 10)

# what the workers of a long run hold after 1,000 and after 10,000 steps
growth: install
	$(BIN)/python tests/growth.py $(ARGS)

# checkpoints: 30 rounds of kill -9 at random moments; ARGS="--seed 1"
soak: install
	$(BIN)/python -m tests.soak $(ARGS)

# proof and measurement on a GPU with this machine's own Python and torch, without a network: no install
# make gpu                                        all parts, benchmarks/RESULTS-gpu.md
# make gpu PART=overlap                           one part;  WHEELS=DIR: packages that the machine lacks, as wheels
gpu: export PYTHONPATH := src$(if $(WHEELS),:$(CURDIR)/.gpu-wheels)
gpu:
	$(if $(WHEELS),python3 -m pip install --quiet --no-index --no-deps --upgrade --target .gpu-wheels $(WHEELS)/*.whl)
	python3 benchmarks/gpu.py $(PART)

# the documentation site, in site/: pages, live gallery, API reference
docs: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python docs/site.py

lint: install
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy src benchmarks tests/gpu
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache runs
