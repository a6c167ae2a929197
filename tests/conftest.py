"""Fixtures of the tests of whole runs."""

import contextlib
import gc
import importlib
import itertools
import os
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from rigs import connections, ending
from rigs.forked import finish, forked, fresh, prepare
from rigs.machine import folders_made, nothing_left_behind
from rigs.policy import tiny_policy

from dataflow.planning.hosts import Devices
from dataflow.worker import worker

sqlite3.connect = connections.connect
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
if not HAS_GPU:
    # of kernels it is read when they are first imported, by any test
    os.environ.setdefault("TRITON_INTERPRET", "1")

__all__ = ["forked", "fresh"]

LONG = ("drawn", "runs", "parallel")
"""Folders of whole runs, the longest first."""


def pytest_collection_finish() -> None:
    """Before any test computes; what is forked from then on collects its garbage."""
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules and not HAS_GPU:
        # The first backward decides for the whole process whether other threads compute gradients,
        # which no fork has: torch's builds for GPUs, where there is none, make such threads once
        # DTensor has been used.
        import torch

        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    # whoever loads a model would compile the names of all families
    if "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping

            get_checkpoint_conversion_mapping("llama")
    if not HAS_GPU:  # a program that shall compute on one starts afresh
        prepare()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped, a line for each reason: a module that is skipped whole counts once."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4d}  {reason}")


def pytest_unconfigure() -> None:
    """No program is forked any more."""
    finish()


def pytest_configure(config: pytest.Config) -> None:
    """Without the slow tests a law gets a quarter of its examples (`rigs/examples.py`); Control-C
    and hang-ups are heard by programs of tests also where a shell has put the tests themselves into
    the background.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # by nohup; programs of tests are not to inherit that
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    # A machine that has much else to do fails no test for that.
    anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("every", anywhere, max_examples=100)
    settings.register_profile("quick", anywhere, max_examples=25)
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "every")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays until the end: no collection looks through it, a third of all the time
    of importing it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of whole runs, which take longest and wait for half of it, stand evenly among those
    that compute.

    Processes of pytest-xdist take one file after the other (--dist loadfile
    --no-loadscope-reorder): so no core idles while all wait, and none has a long file left when all
    others are done.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds = {path: [kind for kind in LONG if kind in path.parts] for path in files}
    long = [of for path, of in files.items() if kinds[path]]
    long.sort(key=lambda of: LONG.index(kinds[of[0].path][0]))
    short = [of for path, of in files.items() if not kinds[path]]
    short.sort(key=lambda of: -len(of))
    each = max(1, -(-len(short) // max(1, len(long))))
    turns = itertools.zip_longest(
        long, (short[at : at + each] for at in range(0, len(short), each)), fillvalue=[]
    )
    items[:] = [item for first, others in turns for of in (first, *others) for item in of]


@pytest.fixture(autouse=True)
def rigs_closed() -> Iterator[None]:
    """Closes what rigs opened; logs go where they went before (`capture_logs` alone would leave
    them set up).
    """
    with ending.closed():
        yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy with random weights."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are planned for one core: one thread each, whatever else this machine has to do."""
    runner = importlib.import_module("dataflow.runner")
    monkeypatch.setattr(runner, "this_machine", lambda: Devices(cpus=1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test when a run leaves a process, a socket or shared memory behind."""
    made: list[Path] = []
    monkeypatch.setattr(tempfile, "mkdtemp", folders_made(made.append))
    with nothing_left_behind(made):
        yield


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, machine: None) -> None:
    """For runs of fakes in processes: the forkserver imports no torch."""
    monkeypatch.setattr(worker, "preload", lambda graph: None)
