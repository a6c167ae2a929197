"""Programs are started, bounded, and ended with all that they started, whoever dies."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.machine import wait_until

from dataflow.errors import DeadlineError, Unusable
from operators.agents.host_line import EndedProgram, HostLine

WAIT_S = 30.0


@pytest.fixture
def line() -> Iterator[HostLine]:
    made = HostLine(sys.executable, [])
    yield made
    made.close()


def start(line: HostLine, number: int, *argv: str, **order: Any) -> None:
    given = {
        "argv": argv,
        "env": {"KEY": f"key-{number}"},
        "without": ["HOME"],
        "marker": f"key-{number}",
        "input": "a line\n",
        "memory_mb": None,
        "output_bytes": 1 << 20,
    }
    line.start(number, given | order)


def ended(line: HostLine, count: int) -> dict[int, EndedProgram]:
    found: dict[int, EndedProgram] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline:
        select.select([line], [], [], 0.1)
        found |= {each.number: each for each in line.ended() or ()}
    assert len(found) == count
    return found


def sleeping(seconds: int) -> list[int]:
    """Processes that sleep for so long, which no other test does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.cmdline() == ["sleep", str(seconds)]
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
    return found


def test_a_program_is_told_and_says_and_its_end_is_known(line: HostLine) -> None:
    start(line, 0, "cat")
    start(line, 1, "sh", "-c", "echo first; echo '{\"a\": 1}'; echo; echo why >&2; exit 3")
    start(line, 2, "no-such-program-anywhere")
    start(line, 3, "sh", "-c", "kill -9 $$")
    start(line, 4, "sh", "-c", "echo $KEY-${HOME:-none}")
    found = ended(line, 5)
    assert (found[0].status, found[0].last) == (0, "a line")
    assert (found[1].status, found[1].last, found[1].errors) == (3, '{"a": 1}', "why\n")
    assert found[2].status == 127 and "FileNotFoundError" in found[2].errors
    assert found[3].status == -9
    assert found[4].last == "key-4-none"


def test_a_program_that_says_too_much_is_ended(line: HostLine) -> None:
    start(line, 0, "sh", "-c", "yes")
    start(line, 1, "sh", "-c", "yes >&2")
    assert all(each.is_too_much and each.status == -9 for each in ended(line, 2).values())


def test_nothing_is_left_of_a_program_that_has_ended(line: HostLine, tmp_path: Path) -> None:
    """What it started in other groups and sessions neither; programs that run keep theirs."""
    start(line, 0, "sh", "-c", "setsid sleep 20101 & sleep 20101 & wait")
    go = tmp_path / "go"
    until = f"until [ -e {go} ]; do sleep 0.05; done"
    start(
        line,
        1,
        "sh",
        "-c",
        f"sleep 20102 & (setsid sleep 20102 &) ; setsid sleep 20102 & {until}; echo over",
    )
    wait_until(lambda: len(sleeping(20102)) == 3, WAIT_S)
    wait_until(lambda: len(sleeping(20101)) == 2, WAIT_S)
    go.touch()
    assert ended(line, 1)[1].last == "over"
    assert not sleeping(20102) and len(sleeping(20101)) == 2
    line.stop(0)
    assert ended(line, 1)[0].status == -signal.SIGTERM
    assert not sleeping(20101)


def test_a_program_that_does_not_end_when_asked_is_killed(line: HostLine) -> None:
    start(line, 0, "sh", "-c", "trap '' TERM; sleep 20103; sleep 20103")
    wait_until(lambda: bool(sleeping(20103)), WAIT_S)
    line.stop(0)
    assert ended(line, 1)[0].status == -9 and not sleeping(20103)


def test_a_program_that_takes_more_memory_than_it_may_fails(line: HostLine) -> None:
    start(line, 0, sys.executable, "-c", "a = bytearray(400 << 20); print(len(a))", memory_mb=200)
    assert ended(line, 1)[0].errors.strip().endswith("MemoryError")


def test_programs_are_forks_of_what_they_import_and_none_draws_as_another(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import random, sys\nprint(sys.stdin.read().strip(), __name__, sys.argv[1:], 'plistlib' in"
        " sys.modules, random.random())\nsys.exit('in the end')\n"
    )
    line = HostLine(sys.executable, ["plistlib"])
    try:
        for number in range(2):
            start(line, number, sys.executable, str(script), "argument")
        found = ended(line, 2)
    finally:
        line.close()
    assert all(
        each.last.startswith("a line __main__ ['argument'] True ") for each in found.values()
    )
    assert all((each.status, each.errors) == (1, "in the end\n") for each in found.values())
    assert found[0].last != found[1].last


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "breaks_inside.py").write_text("raise RuntimeError('no licence')\n")
    for module, why in (
        ("no_such_module_anywhere", "ModuleNotFoundError"),
        ("breaks_inside", "no licence"),
    ):
        line = HostLine(sys.executable, ["json", module], str(tmp_path))
        try:
            with pytest.raises(
                Unusable, match=f"cannot be imported; found imports='{module}' to end with .*{why}"
            ):
                wait_until(lambda each=line: each.ended() is None, WAIT_S)
        finally:
            line.close()


def test_modules_beside_a_program_are_shared_too_and_it_is_ready_when_they_are_there(
    tmp_path: Path,
) -> None:
    """A fork has what the module had made; what else stands on the path is as without imports."""
    (tmp_path / "heavy_state.py").write_text("import os\nmade_by = os.getpid()\n")
    script = tmp_path / "program.py"
    script.write_text(
        "import heavy_state, os, sys\nprint(heavy_state.made_by == os.getppid(), len(sys.path))\n"
    )
    line = HostLine(sys.executable, ["heavy_state"], str(tmp_path))
    plain = HostLine(sys.executable, [])
    try:
        assert not line.is_ready
        for number in range(2):
            start(line, number, sys.executable, str(script))
        start(plain, 2, sys.executable, str(script), without=[])
        found = ended(line, 2) | ended(plain, 1)
    finally:
        line.close()
        plain.close()
    assert line.is_ready and line.importing is None
    lasts = [found[number].last.split() for number in range(3)]
    assert [shared for shared, _ in lasts] == ["True", "True", "False"], found
    assert len({size for _, size in lasts}) == 1


def test_imports_that_take_too_long_are_named(tmp_path: Path) -> None:
    now = [0.0]
    (tmp_path / "never_there.py").write_text("import time\ntime.sleep(600)\n")
    line = HostLine(
        sys.executable, ["never_there"], str(tmp_path), start_s=50.0, clock=lambda: now[0]
    )
    try:
        wait_until(lambda: line.ended() == [] and line.importing == "never_there", WAIT_S)
        now[0] = 51.0
        with pytest.raises(
            DeadlineError, match="not ready after 50 s; found it importing never_there"
        ):
            line.ended()
    finally:
        line.close()


def test_when_the_process_that_starts_programs_dies_they_end_and_others_can_be_started(
    line: HostLine,
) -> None:
    start(line, 0, "sh", "-c", "setsid sleep 20104 & sleep 20104")
    wait_until(lambda: len(sleeping(20104)) == 2, WAIT_S)
    os.kill(line.pid, signal.SIGKILL)
    wait_until(lambda: line.ended() is None, WAIT_S)
    line.restart()
    wait_until(lambda: not sleeping(20104), WAIT_S)  # a kill takes effect a moment after it is sent
    start(line, 1, "echo", "again")
    assert ended(line, 1)[1].last == "again"


def test_a_process_that_somebody_stopped_is_let_go_on(line: HostLine) -> None:
    host = psutil.Process(line.pid)
    host.suspend()
    wait_until(lambda: host.status() == psutil.STATUS_STOPPED, WAIT_S, "the stop")
    start(line, 0, "cat")
    assert ended(line, 1)[0].last == "a line"


def test_programs_end_when_their_owner_does() -> None:
    owner = (
        "import sys, time; from operators.agents.host_line import HostLine; line ="
        " HostLine(sys.executable, []);order = {'env': {}, 'without': [], 'marker': 'x', 'input':"
        " '', 'memory_mb': None, 'output_bytes': 100};line.start(0, {'argv': ['sh', '-c', 'setsid"
        " sleep 20105 & sleep 20105'], **order}); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner])
    try:
        wait_until(lambda: len(sleeping(20105)) == 2, WAIT_S)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not sleeping(20105), WAIT_S)


def test_programs_end_with_their_owner_though_what_starts_them_was_stopped() -> None:
    owner = (
        "import os, signal, sys, time; from operators.agents.host_line import HostLine;line ="
        " HostLine(sys.executable, []);order = {'env': {}, 'without': [], 'marker': 'x', 'input':"
        " '', 'memory_mb': None, 'output_bytes': 100};line.start(0, {'argv': ['sh', '-c', 'setsid"
        " sleep 20106 & sleep 20106'], **order});input(); os.kill(line.pid, signal.SIGSTOP);"
        " print(line.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        wait_until(lambda: len(sleeping(20106)) == 2, WAIT_S)
        process.stdin.write(b"\n")
        process.stdin.flush()
        host = psutil.Process(int(process.stdout.readline()))
        wait_until(lambda: host.status() == psutil.STATUS_STOPPED, WAIT_S)
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not sleeping(20106), WAIT_S)
