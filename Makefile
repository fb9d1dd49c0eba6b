# Every target sets itself up: all it needs is Python 3.10 or later, pip, venv, GNU make and a package index.
#
#   make demo        a training that is killed again and again and ends bit-equal to one left alone
#   make test        every test;  make test-fast leaves out the slow ones
#   make check       lint, format and types
#   make bench       SIZE=full|small ROUNDS=n: beside other libraries, on this disk
#   make bench-ranks the same for two ranks, and one that loads what they saved
#   make bench-stall what saving costs a training loop that goes on meanwhile
#   make soak        the crash tests for a long time
#   make docs        build the pages into site/
#   make clean       remove all that the above made

PYTHON ?= python3
VENV   ?= .venv
SIZE   ?= full
ROUNDS ?=
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := src tests bench examples

# pip may not run twice at once in one environment.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-fast check format bench bench-ranks bench-stall soak docs clean help

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.ready-demo
	$(BIN)/holdfast demo $(ARGS)

test: $(VENV)/.ready-test $(VENV)/.ready-deepspeed
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy --strict src

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

bench: $(VENV)/.ready-bench
	$(BIN)/python -m bench --size $(SIZE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench-ranks: $(VENV)/.ready-bench
	$(BIN)/python -m bench.ranks --size $(SIZE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench-stall: $(VENV)/.ready-bench
	$(BIN)/python -m bench.stall --size $(SIZE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

soak: $(VENV)/.ready-test $(VENV)/.ready-deepspeed
	HOLDFAST_SOAK=1 $(BIN)/python -m pytest --timeout=0 $(ARGS)

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist src/*.egg-info bench/results/scratch
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. A stamp is one extra of pyproject.toml, mostly on top of torch, which goes in first by its exact pin.

$(VENV)/.ready-venv: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-torch: $(VENV)/.ready-venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-venv
	$(PIP) mkdocs mkdocs-material
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-torch pyproject.toml
	$(PIP) --editable '.[test,demo]'
	@touch $@

# Builds against the torch that is installed; where it cannot be had, the tests of live DeepSpeed jobs skip.
$(VENV)/.ready-deepspeed: $(VENV)/.ready-test
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation deepspeed || echo "make: no DeepSpeed; its tests skip" >&2
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready-torch pyproject.toml bench/requirements.txt
	$(PIP) --editable . --requirement bench/requirements.txt
	@touch $@

$(VENV)/.ready-%: $(VENV)/.ready-torch pyproject.toml
	$(PIP) --editable '.[$*]'
	@touch $@
