"""What holds of every child process, however it was started: a fork, a program, one below a
keeper.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.machine import alive, wait_until

from dataflow.system import child
from dataflow.system.child import Child

DEADLINE_S = 30.0
CODE = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
below = os.fork()
if below:
    print("it has begun", flush=True)
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {below}\\n")
    if ends:
        os._exit(3)
time.sleep(600)
"""
"""Is deaf to all but SIGKILL, and has started another in its group."""
KINDS = ("fork", "program", "keeper")
Start = Callable[..., tuple[Child, list[int]]]


def started(kind: str, path: Path, *, ends: bool = False) -> Child:
    if kind == "fork":
        return child.fork(
            lambda: exec(CODE, {"path": str(path), "ends": ends}) or 0,  # type: ignore[func-returns-value]
            leads=True,
            ends_with_parent=signal.SIGKILL,
        )
    return child.started(
        [sys.executable, "-c", f"path, ends = {str(path)!r}, {ends}\n{CODE}"],
        environment=os.environ,
        leads=True,
        outlives_s=0.0 if kind == "keeper" else None,
        words=True,
    )


def pids(path: Path) -> list[int]:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), DEADLINE_S, "the child")
    return [int(word) for word in path.read_text().split()]


@pytest.fixture(params=KINDS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def start_it(*, ends: bool = False) -> tuple[Child, list[int]]:
        children.append(started(request.param, tmp_path / "pids", ends=ends))
        return children[-1], pids(tmp_path / "pids")

    yield start_it
    for process in children:
        process.end(0.0)


def test_its_end_has_a_deadline_and_takes_along_what_it_started(start: Start) -> None:
    process, family = start()
    began = time.monotonic()
    assert process.poll() is None and process.state == "is still running"
    assert process.end(0.2) == -signal.SIGKILL and time.monotonic() - began < DEADLINE_S
    wait_until(lambda: not alive(family), DEADLINE_S)
    assert process.state == "ended by signal 9"


def test_one_that_ends_by_itself_leaves_nothing_behind(start: Start) -> None:
    process, family = start(ends=True)
    assert process.wait(DEADLINE_S) == 3 and process.returncode == 3
    wait_until(lambda: not alive(family), DEADLINE_S)


@pytest.mark.parametrize("start", KINDS[1:], indirect=True)
def test_the_last_words_of_a_program_are_kept_also_after_its_end(start: Start) -> None:
    process, _ = start(ends=True)
    assert process.wait(DEADLINE_S) == 3 and process.last_words == "it has begun"


@pytest.mark.parametrize("kind", ["fork", "keeper"])
def test_it_dies_with_its_parent_however_that_ends(kind: str, tmp_path: Path) -> None:
    parent = child.fork(
        lambda: started(kind, tmp_path / "pids").wait(), ends_with_parent=signal.SIGKILL
    )
    family = pids(tmp_path / "pids")
    parent.end(0.0)
    watched = family if kind == "keeper" else family[:1]
    wait_until(lambda: not alive(watched), DEADLINE_S)
    for pid in alive(family):
        os.kill(pid, signal.SIGKILL)


def test_a_keeper_gives_a_program_the_time_that_it_is_to_have_after_its_parent(
    tmp_path: Path,
) -> None:
    done = tmp_path / "done"
    code = f"import time; time.sleep(2.0); open({str(done)!r}, 'w').close(); time.sleep(600)"
    command = child.below_keeper([sys.executable, "-c", code], outlives_s=6.0)
    parent = child.fork(lambda: subprocess.Popen(command).pid * 0)
    assert parent.wait(DEADLINE_S) == 0
    wait_until(done.exists, DEADLINE_S)
