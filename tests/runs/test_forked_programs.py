"""A program that is forked finds what one finds that an interpreter of its own runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, json, os, signal, sys, threading, warnings
assert __name__ == "__main__" and sys.modules["__main__"].PROGRAM
atexit.register(print, "after all")
threading.Thread(target=print, args=("a thread's",)).start()
kept = int(sys.argv[1])
print(json.dumps({
    "arguments": sys.argv[2:], "variable": os.environ.get("GIVEN"), "others": len(os.environ),
    "folder": os.getcwd(), "input": sys.stdin.read(),
    "parent": os.getppid(), "group": os.getpgrp() == os.getpid(),
    "kept": os.read(kept, 10).decode(),
    "ignores": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
    "threads": threading.active_count(), "warnings": [rule[0] for rule in warnings.filters],
}), flush=True)
sys.exit("in the end")
""".replace("PROGRAM", "atexit")


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(params=["forked", "fresh"], autouse=True)
def started(request: pytest.FixtureRequest) -> str:
    """How programs are."""
    request.getfixturevalue(request.param)
    return str(request.param)


def ignored() -> list[int]:
    """What an interpreter ignores, and what its parent does: a shell ignores more for a command in
    the background.
    """
    by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(by_python | {n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN})


@pytest.mark.parametrize("how", ["code", "file", "module"])
def test_a_program_has_what_it_was_given_and_nothing_else(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    words = {
        "code": ["-c", PROGRAM],
        "file": [str(tmp_path / "mine.py")],
        "module": ["-m", "mine"],
    }[how]
    ours, theirs = os.pipe()
    os.write(theirs, b"by a pipe")
    os.close(theirs)
    variables = {"GIVEN": "value", "PYTHONIOENCODING": "utf-8", "LC_CTYPE": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, *words, str(ours), "one", "two"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(ours,),
        cwd=tmp_path,
        env=variables,
        process_group=0,
        text=True,
    )
    os.close(ours)
    said, failed = process.communicate("typed", timeout=60)
    assert (process.returncode, failed) == (1, "in the end\n")
    first, found, last = said.splitlines()
    assert (first, last) == ("a thread's", "after all")
    seen = json.loads(found)
    assert len(seen.pop("warnings")) >= 4
    assert seen == {
        "arguments": ["one", "two"],
        "variable": "value",
        "others": 3,
        "folder": str(tmp_path),
        "input": "typed",
        "parent": os.getpid(),
        "group": True,
        "kept": "by a pipe",
        "ignores": ignored(),
        "threads": 1,
    }


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -9)],
)
def test_a_signal_ends_a_program_as_it_would(number: int, status: int) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(60) == status


def test_a_program_that_raises_prints_it_and_one_that_cannot_start_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "1 / 0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.rstrip().endswith(
        "ZeroDivisionError: division by zero"
    )
    with pytest.raises((OSError, subprocess.SubprocessError), match="No such file"):
        subprocess.run([sys.executable, "-c", ""], cwd="/no-such-folder", timeout=60)
