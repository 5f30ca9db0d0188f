PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test lint pretrain clean

setup: $(STAMP)

# One environment with the package and every extra, pinned by constraints.txt; made anew only when those files change.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,onnx,finetune,wandb,decoders,demo,dev]'
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell src tests benchmarks docs README.md CHANGELOG.md CONTRIBUTING.md

test: lint
	$(BIN)/python -m pytest

pretrain: setup
	@echo "make pretrain: the embedded default is not part of this version yet (see CHANGELOG.md). To train on data of yours: $(BIN)/nest-ssl pretrain --help" >&2
	@exit 1

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
