"""What runs inside a sandbox, started as a plain process: its two uses and their protocol need no
bubblewrap.
"""

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import operators.sandbox.inside as inside
from operators.sandbox.inside.first import CALL, CHECK, SCRIPT, SESSION, TESTS
from operators.sandbox.inside.wire import decode, encode, read_frame, write_frame

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's system calls")
START = (
    f"import sys; sys.path.append({str(Path(next(iter(inside.__path__))).parent)!r});"
    " from inside.first import main; sys.path.pop(); main()"
)
DEADLINE_S = 60.0
CAGE = {"cpu_s": 20, "memory_bytes": 1 << 30, "file_bytes": 1 << 20, "threads": 1 << 15}
LIMITS: dict[str, Any] = {"output_bytes": 4096, "files": 1 << 62, "cage": CAGE}


def plain(value: Any) -> bytes:
    return encode(value, lambda value: 0)


@contextlib.contextmanager
def process_of(**files: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """The first process of a sandbox, in none; it is ended at a deadline."""
    words = [sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", START]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={}, **files) as process:
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def outcomes(source: str, *tests: tuple[str, bytes], **limits: Any) -> list[Any]:
    """What becomes of a program's tests: [whether it went well, note, output] for each."""
    own = {**LIMITS, "cpu_s": 20.0, "wall_s": 40.0, "total_s": 50.0, **limits}
    request = os.memfd_create("request")
    write_frame(request, plain([TESTS, own, source, [kind for kind, _ in tests]]))
    for _, data in tests:
        write_frame(request, data)
    os.lseek(request, 0, os.SEEK_SET)
    with process_of(stdin=request) as process:
        os.close(request)
        assert process.stdout is not None
        replies = [decode(read_frame(process.stdout.fileno()), int) for _ in tests]
        assert process.wait(DEADLINE_S) == 0
        assert process.stdout.read() == b"", "one reply for each test"
    return replies


@pytest.fixture
def ask() -> Iterator[Callable[..., Any]]:
    """Asks a sandbox that is kept; it is ready."""
    with process_of(stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        feed, replies = process.stdin.fileno(), process.stdout.fileno()

        def asked(*request: Any) -> Any:
            write_frame(feed, plain(list(request)))
            return decode(read_frame(replies), int)

        assert asked(SESSION, LIMITS) == ["ready"]
        yield asked
        below = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
        assert psutil.wait_procs(below, DEADLINE_S)[1] == [], "it leaves nobody behind"


def test_a_program_is_tested_by_its_output_by_python_and_by_calls_in_order() -> None:
    source = "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(input() * 2)"
    assert outcomes(
        source,
        (SCRIPT, b"ab\n"),
        (CHECK, b"assert double(3) == 6"),
        (CHECK, b"assert double(3) == 7"),
        (CALL, plain(["double", [4], 8])),
        (CALL, plain(["double", [4], 9])),
        (SCRIPT, b""),
    ) == [
        [True, "", b"abab\n"],
        [True, "", b""],
        [False, "AssertionError in `assert double(3) == 7`", b""],
        [True, "", b""],
        [False, "AssertionError: double returned 8, not 9", b""],
        [False, "exited with status 1: EOFError: EOF when reading a line", b""],
    ]


@pytest.mark.parametrize(
    ("source", "limits", "note"),
    [
        ("import os\nos.kill(os.getpid(), 9)", {}, "ended by signal 9"),
        ("print('x' * 10000)", {}, "wrote more than 4096 bytes"),
        ("while True: pass", {"cpu_s": 0.2}, "took more than 0.2 s of CPU time"),
        ("import time\ntime.sleep(60)", {"wall_s": 0.5}, "had not ended after 0.5 s"),
        ("import os\nos.fork()", {}, "exited with status 1: PermissionError"),
        ("import socket\nsocket.socket()", {}, "exited with status 1: PermissionError"),
    ],
)
def test_a_program_that_passes_a_limit_is_ended(
    source: str, limits: dict[str, float], note: str
) -> None:
    source = f"if __name__ == '__main__' and input():\n    exec({source!r})\n    print('alive')"
    if "wall_s" in limits:
        ((passed, why, _),) = outcomes(source, (SCRIPT, b"1"), **limits)
    else:
        (passed, why, _), second = outcomes(source, (SCRIPT, b"1"), (SCRIPT, b"\n"), **limits)
        assert second == [True, "", b""], "the next test runs"
    assert not passed and why.startswith(note), why


def test_tests_for_which_no_time_is_left_are_not_read() -> None:
    tests = ((SCRIPT, b"1"), (CHECK, b"assert True"))
    note = "no time was left (0 s for all tests)"
    assert outcomes("print(1)", *tests, total_s=0.0) == [[False, note, b""]] * 2


def test_a_session_keeps_what_python_and_a_shell_leave(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    assert ask("python", "x = 6", 20.0, 100) == ["ran", b"", 0, ""]
    assert ask("python", "print('a')\nx * 7", 20.0, 100) == ["ran", b"a\n42\n", 5, ""]
    assert ask("shell", f"cd '{tmp_path}'; export WORD=there", 20.0, 100) == ["ran", b"", 0, ""]
    path = str(tmp_path / "deep" / "file")
    assert ask("write", path, b"data") == ["data", b""]
    assert ask("shell", "cat deep/file; echo $WORD", 20.0, 100) == ["ran", b"datathere\n", 10, ""]
    assert ask("read", path, 100) == ["data", b"data"]
    assert ask("read", path, 3) == ["failed", f"{path} has 4 bytes, and 3 are read at most"]
    assert ask("shell", "exit 3", 20.0, 100) == ["ran", b"", 0, "exited with status 3"]


def test_a_session_cuts_interrupts_and_ends_what_passes_a_limit(ask: Callable[..., Any]) -> None:
    assert ask("shell", "printf 0123456789", 20.0, 4) == ["ran", b"0123", 10, ""]
    assert ask("python", "x = 1", 20.0, 100)[-1] == ""
    slept = ask("python", "import time; time.sleep(60)", 0.2, 1000)
    assert slept[-1] == "took more than 0.2 s" and b"KeyboardInterrupt" in slept[1]
    assert ask("python", "x", 20.0, 100) == ["ran", b"1\n", 2, ""]
    deaf = "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    assert "Python was started anew" in ask("python", deaf, 0.2, 1000)[-1]
    assert b"NameError" in ask("python", "x", 20.0, 1000)[1]
    assert ask("shell", "yes", 20.0, 10)[-1] == "wrote more than 4096 bytes"
    assert "started anew" in ask("python", "import os; os._exit(0)", 20.0, 100)[-1]
    assert ask("python", "1 + 1", 20.0, 100)[1] == b"2\n"


def test_a_process_that_cannot_be_caged_runs_nothing() -> None:
    own = {**LIMITS, "cage": {**CAGE, "memory_bytes": -math.inf}}
    with process_of(stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        feed, replies = process.stdin.fileno(), process.stdout.fileno()
        write_frame(feed, plain([SESSION, own]))
        assert decode(read_frame(replies), int) == ["ready"]
        write_frame(feed, plain(["shell", "echo ran", 20.0, 100]))
        state, note = decode(read_frame(replies), int)
    assert state == "lost" and "could not give up what it must" in note
