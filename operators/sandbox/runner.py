"""One program and its tests in one sandbox: starts it, listens to it, and ends it."""

import functools
import math
import os
import selectors
import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from operators.sandbox.bwrap import (
    SandboxError,
    find,
    last_words,
    missing,
    refuse,
    started,
    threads_below,
)
from operators.sandbox.inside.first import CALL, CHECK, SCRIPT, TESTS
from operators.sandbox.inside.wire import FRAME, decode, encode, write_frame

_LOOK_S = 0.05
_GRACE_S = 10.0
_OWN_THREADS = 4  # of bubblewrap, the first process, and the test
_ERROR_BYTES = 1 << 14
_WALL_FACTOR = 5


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    time_s: float = 4.0
    """Seconds of CPU time for one test; five times as many on the clock."""
    total_s: float = 30.0
    """Seconds on the clock for all tests of a program."""
    memory_bytes: int = 1 << 30
    """Address space of its process, Python's own 30 MB included."""
    output_bytes: int = 1 << 20
    """What it may print in one test, on both streams together."""
    file_bytes: int = 64 << 20
    """All that it may have in files, and at most so much in one."""
    files: int = 1000
    threads: int = 64


_USUAL = SandboxLimits()


@dataclass(frozen=True)
class ScriptTest:
    """A test that runs the program as a script."""

    stdin: str


@dataclass(frozen=True)
class PythonTest:
    """A test in Python, whose names stand for what the program defines; it passes if it ends
    without an exception.
    """

    source: str


@dataclass(frozen=True)
class CallTest:
    """A test that calls a function of the program, or a method of its class Solution; the rest of
    it is plain data.
    """

    name: str
    arguments: list[Any]
    expected: Any
    """What it should return, as JSON would hold it; it passes if it does (`tester.is_same`)."""


Test = ScriptTest | PythonTest | CallTest


@dataclass(frozen=True)
class SandboxResult:
    """How one test went."""

    passed: bool
    """Whether a `PythonTest` or a `CallTest` passed; whether a `ScriptTest` ended with status 0."""
    note: str
    """Why it did not."""
    output: str = ""
    """What a `ScriptTest` that ended well printed."""


def run(
    source: str, tests: Sequence[Test], limits: SandboxLimits = _USUAL
) -> Generator[SandboxResult, None, None]:
    """Run a program's tests in one sandbox, each in a new process: an outcome for each, as they
    come.

    Closing the iterator ends the sandbox with all that is in it. Raises SandboxError where there is
    no sandbox, or where it fails.

    consumes: the program and its tests, handed to the sandbox whole
    produces: outcomes, in the order of the tests
    waits for: the sandbox's answers, until `total_s` and 10 s are over
    unblocked by: an answer, the sandbox's end, or the clock
    """
    request = _request(source, tests, limits)
    try:
        process = started(
            limits.file_bytes,
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(request)
    try:
        yield from _outcomes(process, len(tests), limits)
    finally:
        process.kill()
        process.communicate()


def _outcomes(
    process: "subprocess.Popen[bytes]", tests: int, limits: SandboxLimits
) -> Generator[SandboxResult, None, None]:
    assert process.stdout is not None and process.stderr is not None
    within_s = limits.total_s + _GRACE_S
    deadline = time.monotonic() + within_s
    inbox, errors, remaining = bytearray(), bytearray(), tests
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, inbox)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        looked = time.monotonic()
        while remaining:
            for key, _ in selector.select(_LOOK_S):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fileobj)
            while remaining and (outcome := _next_outcome(inbox)) is not None:
                remaining -= 1
                yield outcome
            if remaining and not selector.get_map():
                raise SandboxError(
                    f"a sandbox ended with status {process.wait(_GRACE_S)}; {last_words(errors)}"
                )
            if (now := time.monotonic()) > deadline or len(errors) > _ERROR_BYTES:
                raise SandboxError(
                    f"a sandbox gave no answer for {within_s:g} s; {last_words(errors)}"
                )
            if now > looked + _LOOK_S:
                looked = now
                if threads_below(process.pid) > limits.threads + _OWN_THREADS:
                    yield from [
                        SandboxResult(False, f"started more than {limits.threads} threads")
                    ] * remaining
                    return


def _request(source: str, tests: Sequence[Test], limits: SandboxLimits) -> int:
    """A file in memory with all that the sandbox reads, at its beginning."""
    settings = {
        "cpu_s": limits.time_s,
        "wall_s": _WALL_FACTOR * limits.time_s,
        "total_s": limits.total_s,
        "output_bytes": limits.output_bytes,
        "files": limits.files,
        "cage": {
            "cpu_s": math.ceil(limits.time_s) + 1,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "threads": limits.threads,
        },
    }
    fd = os.memfd_create("request")
    plain_tests = list(map(_plain, tests))
    kinds = [kind for kind, _ in plain_tests]
    write_frame(fd, encode([TESTS, settings, source, kinds], refuse))
    for _, data in plain_tests:
        write_frame(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _plain(test: Test) -> tuple[str, bytes]:
    """A test's kind and its bytes."""
    if isinstance(test, CallTest):
        return CALL, encode([test.name, test.arguments, test.expected], refuse)
    kind, text = (SCRIPT, test.stdin) if isinstance(test, ScriptTest) else (CHECK, test.source)
    return kind, text.encode("utf-8", "surrogatepass")


def _next_outcome(inbox: bytearray) -> SandboxResult | None:
    """Take the next complete outcome out of the bytes that have come."""
    if len(inbox) < FRAME.size:
        return None
    stop = FRAME.size + FRAME.unpack_from(inbox)[0]
    if len(inbox) < stop:
        return None
    passed, note, output = decode(bytes(inbox[FRAME.size : stop]), lambda number: None)
    del inbox[:stop]
    return SandboxResult(passed, note, output.decode("utf-8", "replace"))


def fault() -> str | None:
    """Why no sandbox can be made on this machine, in three parts; None where a program has run in
    one.
    """
    reason, program = missing(), find()
    return reason if program is None or reason is not None else _probed(program)


@functools.cache
def _probed(program: str) -> str | None:
    try:
        (outcome,) = run("print(6 * 7)", [ScriptTest("")], SandboxLimits(time_s=10.0))
    except SandboxError as error:
        problem = str(error)
    else:
        if outcome.passed and outcome.output == "42\n":
            return None
        problem = f"the trial program {outcome.note or f'printed {outcome.output!r}'}"
    return (
        f"{program} cannot make a sandbox for model-written code on this machine: {problem}; allow"
        " unprivileged user namespaces (sysctl user.max_user_namespaces,"
        " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a"
        " container, its seccomp profile), and see docs/sandbox.md"
    )
