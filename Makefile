# make demo    install, then take a real training checkpoint through: look, verify, convert, prove
# make test    everything: lint, types, all tests, with the real frameworks as judges
# make quick   two minutes, no frameworks
# make bench   what it costs beside a durable cp (about 20 GB of disk, an hour; FAMILIES="foundation dcp" for a part)
# make lint    ruff and mypy
#
# Each needs only Python >= 3.10 with venv, and pip. Variables: PYTHON, VENV, PYTEST, FAMILIES, BENCH.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
PYTEST ?=
FAMILIES ?= foundation dcp deepspeed megatron gguf
BENCH ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test quick bench lint clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: $(VENV)/.has-anyckpt
	@PYTHON=$(PY) ANYCKPT=$(VENV)/bin/anyckpt sh examples/demo.sh demo-out

# Lint does not stop the tests: one run reports on both.
test: $(VENV)/.has-frameworks
	@failed=""; \
	$(MAKE) --no-print-directory lint || failed="lint"; \
	echo "== tests, the frameworks judging"; \
	$(PY) -m pytest -m "frameworks or not frameworks" -n 2 --dist loadfile --durations 10 $(PYTEST) </dev/null \
		|| failed="$$failed tests"; \
	test -z "$$failed" || { echo "failed: $$failed" >&2; exit 1; }

quick: $(VENV)/.has-test
	@echo "== tests without frameworks"
	$(PY) -m pytest -m "not frameworks and not slow" -n 2 --dist loadfile $(PYTEST) </dev/null

lint: $(VENV)/.has-test
	@echo "== lint and types"
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(VENV)/.has-bench
	@for family in $(FAMILIES); do \
		echo "== $$family"; $(PY) benchmarks/$$family.py $(BENCH) || failed="$$failed $$family"; done; \
	test -z "$$failed" || { echo "failed: $$failed" >&2; exit 1; }

clean:
	rm -rf demo-out bench-out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The environment, in steps that each leave a stamp; a change of pyproject.toml makes them anew.

$(PY):
	@test -n "$(PYTHON)" || { echo "anyckpt needs Python 3.10 or newer; say which: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "== $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.has-anyckpt: pyproject.toml | $(PY)
	@echo "== installing anyckpt into $(VENV)"
	@$(PIP) install -qq --editable .
	@touch $@

$(VENV)/.has-test: pyproject.toml | $(PY)
	@echo "== installing anyckpt and its test tools into $(VENV)"
	@$(PIP) install -qq --editable '.[test]'
	@touch $@ $(VENV)/.has-anyckpt

$(VENV)/.has-frameworks: pyproject.toml | $(PY)
	@echo "== installing the frameworks that judge (torch, transformers, ...) into $(VENV): some minutes the first time"
	@$(PIP) install -qq --editable '.[test,frameworks]'
	@touch $@ $(VENV)/.has-test $(VENV)/.has-anyckpt

$(VENV)/.has-bench: pyproject.toml | $(PY)
	@echo "== installing what the benchmarks compare with into $(VENV)"
	@$(PIP) install -qq --editable '.[bench]'
	@touch $@ $(VENV)/.has-anyckpt
