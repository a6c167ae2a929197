# demo: learn to sort; test: the quick tests; test-all: the slow ones too; lint; bench; each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
MARK = $(VENV)/.installed
# One process more than cores, as tests of processes wait for one another; compiled modules are kept, as they start many.
PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
TEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(PROCESSES) --dist loadfile

.PHONY: venv demo test test-all quick every lint style types bench clean

venv: $(MARK)

$(MARK): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, but {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12 venv" or 0)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $(MARK)

demo: venv
	$(RUN) -m graphs.sorting

test: style
	$(MAKE) --no-print-directory --jobs 2 types quick

test-all: style
	$(MAKE) --no-print-directory --jobs 2 types every

quick: venv
	$(TEST) -m 'not slow and not gpu'

every: venv
	$(TEST) -m 'not gpu'

lint: style types

style: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: venv
	$(RUN) -m mypy

bench: venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,bench]'
	$(RUN) -m bench.data_plane --json runs/data_plane.jsonl
	$(RUN) -m bench.end_to_end --json runs/end_to_end.jsonl
	$(RUN) -m bench.generator --json runs/generator.jsonl
	$(RUN) -m bench.weight_plane --json runs/weight_plane.jsonl
	$(RUN) -m bench.trainer --json runs/trainer.jsonl

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
