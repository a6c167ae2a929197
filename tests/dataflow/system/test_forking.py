"""A child finalises nothing that it inherits, and computes on several threads, whatever its parent
has done.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rigs import past

from dataflow.system.forking import fork

PATIENCE_S = 30.0


class Haunt:
    """Part of a cycle, so that only the collector finds it; tells where it ends."""

    def __init__(self, told: Path) -> None:
        self.itself, self._told = self, told

    def __del__(self) -> None:
        self._told.write_text(str(os.getpid()))


def in_child(body: Callable[[], None]) -> int:
    """Wait status of a child that runs `body`; it is killed when that does not end."""
    pid = fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage stays until the end, then all is collected."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def test_a_child_never_collects_what_it_inherits(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def collect_nothing() -> None:
        gc.collect()
        assert not told.exists()

    with uncollected():
        Haunt(told)
        assert in_child(collect_nothing) == 0
    assert told.read_text() == str(os.getpid())


def test_a_child_collects_its_own_garbage(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def litter() -> None:
        Haunt(told)
        assert gc.isenabled()
        gc.collect()
        assert told.read_text() == str(os.getpid())

    assert in_child(litter) == 0


def test_garbage_that_owns_threads_does_not_hang_a_child() -> None:
    def collect() -> None:
        gc.collect()

    with uncollected():
        past.drop_a_group()
        assert in_child(collect) == 0


def test_nothing_is_collected_on_the_way_into_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, plain = tmp_path / "told", os.fork

    def busy() -> int:
        Haunt(told)
        pid = plain()
        if pid == 0:
            kept = [[] for _ in range(10 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
            assert kept and not told.exists()
        return pid

    monkeypatch.setattr(os, "fork", busy)
    assert in_child(lambda: None) == 0
    gc.collect()
    assert told.read_text() == str(os.getpid())


@pytest.mark.slow
def test_parent_and_child_both_compute_on_several_threads() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        past.compute()
        assert in_child(past.compute) == 0
        past.compute()
    finally:
        torch.set_num_threads(before)


def test_the_collector_stays_as_it_was() -> None:
    def expect(collects: bool) -> None:
        assert gc.isenabled() == collects

    with uncollected():
        assert in_child(lambda: expect(False)) == 0
        expect(False)
    assert in_child(lambda: expect(True)) == 0
    expect(True)


def test_what_is_printed_before_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    stream = open(1, "w", closefd=False)  # noqa: SIM115
    before, sys.stdout = sys.stdout, stream
    try:
        stream.write("once\n")
        assert in_child(stream.flush) == 0
        stream.flush()
    finally:
        sys.stdout = before
    assert capfd.readouterr().out == "once\n"
