# Each target first makes the environment .venv from requirements.txt, with any
# Python from 3.11 to 3.13 (`make PYTHON=/path/to/python3 ...` names one). As long as
# requirements.txt and pyproject.toml stay as they are, it is made once.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Given to the command that a target runs: `make train ARGS="--stage 2"`.
ARGS :=

SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help book test test-all oldest train bench gpu parity course grade lab rerun check picture clean

help:
	@echo 'make book      the book, as pages in _build/html'
	@echo 'make test      prove the package and run the notebooks, in about ten minutes'
	@echo 'make test-all  every test: solutions, browser, book, kills, 1 to 4 ranks, types, DeepSpeed runs'
	@echo 'make oldest    the tests of minizero.hf on the oldest transformers that is supported'
	@echo 'make train     train a small GPT under ZeRO-3 on 4 ranks (ARGS="--stage 2 --ranks 2")'
	@echo 'make bench     measure speed, as ratios within one run (ARGS="kernels --repeats 9")'
	@echo 'make gpu       what one card can show, in parts (ARGS="alone waits")'
	@echo 'make parity    train one script on DeepSpeed and on this, and compare (ARGS=--record keeps DeepSpeed half for the tests)'
	@echo 'make course    what a course is given, in _build/course: notebooks, a book without solutions'
	@echo 'make grade     grade a class (SUBMISSIONS=folder with a folder for each student)'
	@echo 'make lab       JupyterLab on the notebooks'
	@echo 'make rerun     run every notebook here and store its outputs (ARGS="notebooks/05_zero1.ipynb")'
	@echo 'make check     ruff, mypy, import-linter, and modules equal to their notebooks'
	@echo 'make picture   draw the picture of the README again'
	@echo 'make clean     delete the environment, the pages and the caches'

book: $(READY)
	@$(BIN)/jupyter-book build --quiet --all --warningiserror --keep-going .

# Several test files at a time, each whole on one worker: many tests wait for ranks.
test: $(READY)
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder $(ARGS)

test-all: override ARGS += --all
test-all: test

# Beside the environment, not in it: this path is searched first. Needs a network.
OLDEST := transformers==5.0.0 accelerate==1.10.0 tokenizers==0.22.1 huggingface-hub==1.3.0

oldest: $(READY)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/oldest $(OLDEST)
	@PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -q tests/test_hf.py $(ARGS)

train: $(READY)
	@$(BIN)/python -m minizero train --stage 3 --ranks 4 $(ARGS)

# Beside the environment, not in it: Hugging Face uses a DeepSpeed that it finds.
PEERS := PYTHONPATH=$(CURDIR)/$(VENV)/peers PATH="$(CURDIR)/$(VENV)/peers/bin:$$PATH"

bench: $(VENV)/peers
	@$(PEERS) $(BIN)/python tests/bench $(ARGS)

gpu: $(READY)
	@$(BIN)/python tests/bench gpu $(ARGS)

parity: $(VENV)/peers
	@$(PEERS) $(BIN)/python tests/parity $(ARGS)

course: $(READY)
	@$(BIN)/python -m minizero.lab.course build $(ARGS)

SUBMISSIONS := submissions

grade: $(READY)
	@$(BIN)/python -m minizero.lab.course grade $(SUBMISSIONS) $(ARGS)

lab: $(READY)
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

rerun: $(READY)
	@$(BIN)/python notebooks/rerun.py $(ARGS)

check: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/test_notebooks.py -k export

picture: $(READY)
	@$(BIN)/python book/draw.py

clean:
	rm -rf $(VENV) _build build minizero.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/peers: requirements-bench.txt $(READY)
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade --target $@ --requirement requirements-bench.txt || \
	  echo 'DeepSpeed could not be installed; the comparisons with it are left out'
	@mkdir -p $@ && touch $@

$(READY): requirements.txt pyproject.toml
	@if ! { $(BIN)/python -c '$(SUITABLE)' && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	    if $$python -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No suitable Python was found. Install Python 3.11, 3.12 or 3.13 with its venv module'; \
	    echo '(on Debian and Ubuntu: apt install python3-venv), or name one: make PYTHON=/path/to/python3 ...'; \
	    exit 1; \
	  fi >&2; \
	  echo "Making $(VENV) with $$($$found --version)"; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo 'Installing requirements.txt into $(VENV); the first time this takes some minutes'
	@$(BIN)/python -m pip install --quiet --requirement requirements.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
