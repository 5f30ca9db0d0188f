PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup setup-all test lint fuzz faults slurm pretrain clean

# The package and what the demo needs; installed again only when the files that decide it change.
setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip setuptools wheel
	$(INSTALL) torch
	$(INSTALL) --editable '.[demo]'
	touch $@

# Every extra, for the tests.
setup-all: $(VENV)/.installed-all
$(VENV)/.installed-all: $(VENV)/.installed
	$(INSTALL) --editable '.[hf,onnx,finetune,wandb,lhotse,lightning,decoders,demo,dev]'
	touch $@

lint: setup-all
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell src tests benchmarks docs examples tools README.md CHANGELOG.md CONTRIBUTING.md

# Two files at a time: most tests of several ranks wait, and leave a core free.
test: lint
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

# The property tests of 'make test' with FUZZ times as many examples, drawn at random: about an hour on one core. A
# failing example is printed with what reproduces it, and tried first the next time. More options: ARGS="tests/fuzz"
FUZZ ?= 100
fuzz: setup-all
	NEST_SSL_FUZZ=$(FUZZ) $(BIN)/python -m pytest -m hypothesis --durations=10 $(ARGS)

# The whole fault matrix on real processes, about 12 to 16 minutes on two cores; then the table in docs/ from its output.
faults: setup
	$(INSTALL) pytest
	rm -rf build/faults && mkdir -p build/faults
	NEST_FAULT_TABLE=$(CURDIR)/build/faults $(BIN)/python -m pytest tests/faults tests/unit/watchdog/test_monitor.py -m 'faults or not faults' --durations=10
	$(BIN)/python -m tests.faults.write_table build/faults docs

# A real SLURM with two nodes on this machine, 6 to 12 minutes; Debian or Ubuntu, as root.
slurm: setup
	$(INSTALL) pytest
	command -v slurmctld > /dev/null && command -v munged > /dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends slurm-wlm munge)
	$(BIN)/python -m pytest tests/slurm -m slurm --durations=10

# A small NEST on ten minutes of synthetic speech: some minutes on two cores. More options: make pretrain ARGS="trainer.max_steps=2000"
pretrain: setup
	$(BIN)/nest-ssl demo --data-dir demo_data --num-train 100 --num-val 40
	$(BIN)/nest-ssl pretrain --config-name nest_demo $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
