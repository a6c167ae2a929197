"""A run in processes goes on whatever the program has done before it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rigs import past
from rigs.graphs import fake_graph

from dataflow import run, scorer


def collect_and_compute() -> float:
    """What any worker does now and then; hangs in one that inherited threads which it does not
    have.
    """
    gc.collect()
    past.compute()
    return 1.0


@scorer(isolate=False)
def in_the_worker(answer: str) -> float:
    """Calls it in the worker."""
    return collect_and_compute()


@scorer(timeout_s=30.0)
def in_the_pool(answer: str) -> float:
    """Calls it in a process of its own."""
    return collect_and_compute()


@pytest.fixture
def eventful_past() -> Iterator[None]:
    """This process has computed on two threads, and leaves a process group of torch for the
    collector.
    """
    before = torch.get_num_threads()
    past.compute()
    gc.disable()
    past.drop_a_group()
    yield
    gc.enable()
    gc.collect()
    torch.set_num_threads(before)


@pytest.mark.timeout(60)
def test_nobody_waits_for_threads_that_the_program_had(
    eventful_past: None, light: None, tmp_path: Path
) -> None:
    result = run(
        fake_graph(scorers=(in_the_worker, in_the_pool), count=8), runs=tmp_path, quiet=True
    )
    assert (result.verdict.clean, result.steps) == (True, 1), result.verdict.line
