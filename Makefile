PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test faults lint pretrain clean

setup: $(STAMP)

# One environment with the package and every extra, pinned by constraints.txt; made anew only when those files change.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,wandb,decoders,demo,dev]'
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell src tests benchmarks docs README.md CHANGELOG.md CONTRIBUTING.md

test: lint
	$(BIN)/python -m pytest

# The whole fault matrix on real processes, about 15 minutes on 2 cores; then the table in docs/ from its output.
faults: setup
	rm -rf build/faults && mkdir -p build/faults
	NEST_FAULT_TABLE=$(CURDIR)/build/faults $(BIN)/python -m pytest tests/faults -m 'faults or not faults' --durations=10
	$(BIN)/python -m tests.faults.write_table build/faults docs

# A small NEST on ten minutes of synthetic speech: some minutes on two cores. More options: make pretrain ARGS="trainer.max_steps=2000"
pretrain: setup
	$(BIN)/nest-ssl demo --data-dir demo_data --num-train 100
	$(BIN)/nest-ssl pretrain --config-name nest_demo $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
