"""A keeper ends a program with all that it has started; SIGTERM asks for it in a session of its own
alone.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until

from dataflow.system.child import below_keeper
from dataflow.system.keeper import END

FAMILY = """
import os, sys, time
child = os.fork()
if child == 0:
    os.setsid()
with open(sys.argv[1], "a") as out:
    out.write(f"{'program' if child else 'other'} {os.getpid()}\\n")
time.sleep(600)
"""
"""A program, and another that it has started, in a session of its own, where no signal to its group
comes."""
DEADLINE_S = 30.0


class Kept:
    """That program below a keeper."""

    def __init__(self, path: Path, *, leads: bool) -> None:
        """leads: a session of its own."""
        command = below_keeper([sys.executable, "-c", FAMILY, str(path)])
        self.keeper = subprocess.Popen(command, start_new_session=leads)
        wait_until(
            lambda: path.exists() and len(path.read_text().splitlines()) == 2,
            DEADLINE_S,
            "the program",
        )
        self.below = {name: int(pid) for name, pid in map(str.split, path.read_text().splitlines())}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    found: list[Kept] = []

    def made(*, leads: bool) -> Kept:
        found.append(Kept(tmp_path / "pids", leads=leads))
        return found[-1]

    yield made
    for each in found:
        each.keeper.kill()
        each.keeper.wait(DEADLINE_S)
        for pid in alive(each.below.values()):
            os.kill(pid, signal.SIGKILL)


def test_sigterm_ends_all_of_a_keeper_with_a_session_of_its_own(start: Callable[..., Kept]) -> None:
    kept = start(leads=True)
    kept.keeper.send_signal(signal.SIGTERM)
    assert kept.keeper.wait(DEADLINE_S) == -signal.SIGKILL
    assert not alive(kept.below.values())


def test_sigterm_ends_nothing_where_it_may_have_been_meant_for_others(
    start: Callable[..., Kept],
) -> None:
    kept = start(leads=False)
    kept.keeper.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        kept.keeper.wait(1.5)
    assert len(alive(kept.below.values())) == 2
    kept.keeper.send_signal(END)
    assert kept.keeper.wait(DEADLINE_S) == -signal.SIGKILL
    assert not alive(kept.below.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_as_its_program_does_and_leaves_none_of_what_that_started(
    start: Callable[..., Kept], number: int
) -> None:
    kept = start(leads=True)
    os.kill(kept.below["program"], number)
    assert kept.keeper.wait(DEADLINE_S) == -number
    assert not alive(kept.below.values())


def test_a_program_that_cannot_be_started_is_named() -> None:
    done = subprocess.run(
        below_keeper(["/no/such/program"]), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 127 and "/no/such/program cannot be started" in done.stderr
