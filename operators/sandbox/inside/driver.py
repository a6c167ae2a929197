"""The first process of a sandbox: runs tests one after the other, each in processes of its own, and
reports their outcomes.

It is process 1 of its namespace, which no process there can signal, stop or look into. It never
reads a test: the process that runs the test does, so that the candidate, which is forked from here,
has nothing of it in its memory.
"""

from __future__ import annotations

import gc
import os
import select
import struct
import sys
import time

from . import cage
from .candidate import run_script, serve_calls
from .tester import PROGRAM_ENDED, call, check, run_test
from .wire import decode, read_exactly, read_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .tester import CandidateClient

    Judge = Callable[[bytes, CandidateClient], None]
    Work = Callable[[], None]

HEAD = struct.Struct("<cI")
"""Before each test: its kind and the bytes that follow."""
OUTCOME = struct.Struct("<?II")
"""Before each outcome: whether it went well, and the bytes of its note and its output."""
SCRIPT, CHECK, CALL = b"s", b"t", b"c"
_JUDGES = {CHECK: check, CALL: call}
_TICK_S = 0.02
_KILL = 9


def _nothing() -> None:
    pass


def main() -> None:
    """Read the program and the tests from descriptor 0, write an outcome for each to descriptor 1.

    consumes: limits and program (a frame), then tests (kind, size, bytes)
    produces: an outcome for each test, in their order
    waits for: the processes of one test, until they end or pass a limit
    unblocked by: their end, what they write, or a clock
    """
    os.environ.clear()
    sys.path.remove("/sandbox")
    cage.go_dark()
    gc.freeze()
    limits, source, tests = decode(read_frame(0), lambda number: None)
    deadline = time.monotonic() + limits["total_s"]
    for _ in range(tests):
        kind, size = HEAD.unpack(read_exactly(0, HEAD.size))
        if time.monotonic() >= deadline:
            os.lseek(0, size, os.SEEK_CUR)
            _write_outcome(False, f"no time was left ({limits['total_s']:g} s for all tests)", b"")
            continue
        run = SandboxRun(limits, deadline)
        if kind == SCRIPT:
            _write_outcome(*run.script(source, size))
        else:
            _write_outcome(*run.test(source, size, _JUDGES[kind]))


class SandboxRun:
    """The processes of one test."""

    def __init__(self, limits: dict[str, Any], deadline: float) -> None:
        self._limits = limits
        self._deadline = min(deadline, time.monotonic() + limits["wall_s"])
        self._streams: dict[int, bytearray] = {}
        self._pids: list[int] = []

    def script(self, source: str, size: int) -> tuple[bool, str, bytes]:
        """Run the program on the next bytes as its input: whether it ended well, why not, what it
        printed.
        """
        feed = os.memfd_create("input")
        with os.fdopen(os.dup(feed), "wb") as file:
            file.write(read_exactly(0, size))
        os.lseek(feed, 0, os.SEEK_SET)
        out, err = self._pipe(), self._pipe()
        self._fork(lambda: run_script(source), (feed, out[1], err[1]))
        _close(feed, out[1], err[1])
        reason, status = self._wait(self._pids[0])
        self._end()
        note = reason or how_it_ended(status, bytes(self._streams[err[0]]))
        return not note, note, b"" if note else bytes(self._streams[out[0]])

    def test(self, source: str, size: int, judge: Judge) -> tuple[bool, str, bytes]:
        """Run the test in the next bytes against the program: whether it passed, why not, its
        output.
        """
        ask, reply = os.pipe(), os.pipe()
        note, out, err = self._pipe(), self._pipe(), self._pipe()
        null, unread = os.open(os.devnull, os.O_RDWR), os.dup(0)
        streams = (null, out[1], err[1])
        test: list[bytes] = []
        self._fork(
            lambda: run_test(judge, test[0], ask[1], reply[0], note[1]),
            streams,
            (ask[1], reply[0], note[1], unread),
            first=lambda: test.append(read_exactly(unread, size)),
        )
        self._fork(lambda: serve_calls(source, ask[0], reply[1]), streams, (ask[0], reply[1]))
        _close(*ask, *reply, null, unread, note[1], out[1], err[1])
        reason, status = self._wait(self._pids[0])
        ended = self._end()[self._pids[1]]
        why = bytes(self._streams[note[0]]).decode("utf-8", "replace")
        if not reason and why == PROGRAM_ENDED:
            reason = (
                how_it_ended(ended, bytes(self._streams[err[0]]))
                or "exited before its test was over"
            )
        reason = reason or (why or how_it_ended(status, b"") if status else "")
        return not reason, reason, b""

    def _pipe(self) -> tuple[int, int]:
        """A pipe that `_wait` reads."""
        ends = os.pipe()
        self._streams[ends[0]] = bytearray()
        return ends

    def _fork(
        self,
        work: Work,
        streams: tuple[int, ...],
        descriptors: tuple[int, ...] = (),
        first: Work = _nothing,
    ) -> None:
        """A caged process that does this, with these streams and descriptors; back once it is past
        `first`.

        Raises OSError where it cannot be caged.
        """
        ready = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                keep_files(streams, (*descriptors, ready[1]))
                cage.go_dark()
                cage.limit(**self._limits["cage"])
                cage.refuse_calls()
                first()
                os.write(ready[1], b".")
                os.close(ready[1])
                work()
            finally:
                os._exit(1)
        self._pids.append(pid)
        os.close(ready[1])
        is_ready = os.read(ready[0], 1)
        os.close(ready[0])
        if not is_ready:
            raise OSError("a process of the sandbox could not give up what it must")

    def _wait(self, main: int) -> tuple[str, int]:
        """Read what the processes write until the main one ends: the limit that was passed, and its
        wait status.
        """
        poll = select.poll()
        ends = [os.pidfd_open(pid) for pid in self._pids]
        for fd in (*self._streams, ends[0]):
            poll.register(fd, select.POLLIN)
        reason = ""
        while not reason:
            ready = {fd for fd, _ in poll.poll(_TICK_S * 1000)}
            for fd in ready & set(self._streams):
                if not self._read(fd):
                    poll.unregister(fd)
            reason = self._passed()
            if ends[0] in ready:
                break
        if reason:
            os.kill(main, _KILL)
        status = os.waitpid(main, 0)[1]
        _close(*ends)
        for fd in self._streams:
            os.set_blocking(fd, False)
            while not reason and self._read(fd):
                reason = self._passed()
        return reason, status

    def _read(self, fd: int) -> bool:
        """Take what a pipe holds; whether more may come."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self._streams[fd] += data
        return bool(data)

    def _passed(self) -> str:
        """The limit that these processes have passed, if any."""
        limits = self._limits
        if sum(map(len, self._streams.values())) > limits["output_bytes"]:
            return f"wrote more than {limits['output_bytes']} bytes"
        if any(_cpu_s(pid) > limits["cpu_s"] for pid in self._pids):
            return f"took more than {limits['cpu_s']:g} s of CPU time"
        if time.monotonic() > self._deadline:
            return f"had not ended after {limits['wall_s']:g} s"
        room = os.statvfs("/tmp")
        if room.f_files - room.f_ffree > limits["files"]:
            return f"made more than {limits['files']} files"
        return ""

    def _end(self) -> dict[int, int]:
        """Kill all other processes and collect them: wait statuses by process."""
        ended: dict[int, int] = {}
        try:  # noqa: SIM105  (contextlib is slow to import)
            os.kill(-1, _KILL)
        except ProcessLookupError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            ended[pid] = status
        _close(*self._streams)
        return ended


def keep_files(streams: tuple[int, ...], descriptors: tuple[int, ...]) -> None:
    """Have these descriptors as standard streams, keep those, and close all others."""
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
    low = 3
    for fd in sorted(descriptors):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 16)


def how_it_ended(status: int, errors: bytes) -> str:
    """A wait status and the last line on the error stream as a reason; empty for a good end."""
    if status == 0:
        return ""
    lines = errors[-4096:].decode("utf-8", "replace").strip().splitlines()
    last = f": {lines[-1][:300]}" if lines else ""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}{last}"
    return f"exited with status {os.WEXITSTATUS(status)}{last}"


def _cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has taken, by its clock (clock_getcpuclockid(3)); 0 once
    it is gone.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _write_outcome(ok: bool, note: str, output: bytes) -> None:
    note_bytes = note.encode("utf-8", "replace")
    view = memoryview(OUTCOME.pack(ok, len(note_bytes), len(output)) + note_bytes + output)
    while view:
        view = view[os.write(1, view) :]


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
