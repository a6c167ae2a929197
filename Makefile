# demo: learn to sort; test: the quick tests; test-all: the slow ones too; lint; bench; each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
MARK = $(VENV)/.installed
TEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n logical --maxprocesses 4 --dist loadfile

.PHONY: venv demo test test-all lint bench clean

venv: $(MARK)

$(MARK): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, but {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12 venv" or 0)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $(MARK)

demo: venv
	$(RUN) -m graphs.sorting

test: venv lint
	$(TEST) -m 'not slow and not gpu'

test-all: venv lint
	$(TEST) -m 'not gpu'

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
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
