"""The first process of a sandbox: runs the tests of a program, or commands whose traces it keeps,
one after the other, each in processes of its own, and reports what became of them.

It is process 1 of its namespace, which no process there can signal, stop or look into. It never
reads a test: the process that runs the test does, so that the candidate, which is forked from here,
has nothing of it in its memory. Between two commands all others are stopped: a process that a
command left behind takes no time until the next one comes.
"""

from __future__ import annotations

import gc
import os
import select
import time

from . import cage
from .candidate import run_script, serve_calls
from .tester import PROGRAM_ENDED, call, check, run_test
from .wire import FRAME, decode, encode, read_frame, write_all, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from .tester import CandidateClient

    Judge = Callable[[bytes, CandidateClient], None]
    Work = Callable[[], object]

TESTS, SESSION = "tests", "session"
"""What a sandbox is for."""
SCRIPT, CHECK, CALL = "script", "check", "call"
"""Kinds of tests."""
SIGINT, SIGKILL, SIGCONT, SIGSTOP = 2, 9, 18, 19  # `signal` is slow to import
HOME = "/tmp"
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh")
STATE = 9
"""The descriptor into which a shell writes its folder and its environment when it ends."""
LONGEST_COMMAND, LONGEST_CODE = 100_000, 500_000
"""Bytes; the kernel takes no more in one argument."""
_JUDGES = {CHECK: check, CALL: call}
_PROLOGUE = f"""trap '{{ printf "%s\\0" "$PWD"; env -0; }} >&{STATE}' EXIT\n"""
_MOST_STATE = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TICK_S, _INTERRUPTED_S = 0.02, 1.0


def main() -> None:
    """Do what descriptor 0 asks for, in frames, and answer on descriptor 1.

    consumes: what the sandbox is for and its limits; then what `run_tests` or `serve_commands`
        takes
    produces: a reply to each test or command, in their order
    waits for: the processes of one of them, until they end or pass a limit
    unblocked by: their end, what they write, or a clock
    """
    os.environ.clear()
    cage.go_dark()
    gc.freeze()
    use, limits, *rest = decode(read_frame(0), lambda number: None)
    if use == TESTS:
        run_tests(limits, *rest)
    else:
        serve_commands(limits)


def run_tests(limits: dict[str, Any], source: str, kinds: Iterable[str]) -> None:
    """Run a program's tests, each the bytes of a frame; reply to each with [whether it went well,
    note, output].
    """
    deadline = time.monotonic() + limits["total_s"]
    for kind in kinds:
        if time.monotonic() >= deadline:  # and for all that come
            _reply([False, f"no time was left ({limits['total_s']:g} s for all tests)", b""])
        elif kind == SCRIPT:
            _reply(TestRun(limits, deadline).script(source))
        else:
            _reply(TestRun(limits, deadline).judged(source, _JUDGES[kind]))


def serve_commands(limits: dict[str, Any]) -> None:
    """Reply with ["ready"], then to each request, until the stream ends.

    consumes: ["python", code, seconds, bytes], ["shell", command, seconds, bytes],
        ["write", path, data] or ["read", path, bytes]
    produces: ["ran", output, bytes in all, note], ["lost", note] where the sandbox has used more
        than it may, ["data", bytes], or ["failed", note]
    """
    keeper = SandboxKeeper(limits)
    _reply(["ready"])
    try:
        while True:
            command, *arguments = decode(read_frame(0), lambda number: None)
            signal_others(SIGCONT)
            reply = keeper.reply(command, arguments)
            signal_others(SIGSTOP)
            _reply(reply)
    except EOFError:
        signal_others(SIGKILL)  # they are stopped, and nobody lets them go on
        os._exit(0)


class Output:
    """A pipe into which other processes write: the first bytes of what came, and how many there
    were.
    """

    def __init__(self, most: int) -> None:
        self.fd, self.theirs = os.pipe()
        os.set_blocking(self.fd, False)
        self.restart(most)

    def restart(self, most: int) -> None:
        """Hold so many bytes of what comes from now on."""
        self._most = most
        self.held, self.total = bytearray(), 0

    def read(self) -> bool:
        """Take what the pipe holds; whether more may come."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        self.total += len(data)
        self.held += data[: max(0, self._most - len(self.held))]
        return bool(data)

    def drain(self) -> None:
        """Take what is left in the pipe, which others may still write into."""
        for _ in range(32):
            before = self.total
            if not self.read() or self.total == before:
                return

    @property
    def text(self) -> str:
        """What is held."""
        return bytes(self.held).decode("utf-8", "replace")


def fork(
    work: Work,
    streams: tuple[int, int, int],
    descriptors: tuple[int, ...],
    limits: dict[str, Any],
    *,
    programs: bool = False,
    first: Work | None = None,
) -> int:
    """A caged process in a session of its own that does this, with these streams and descriptors;
    back once it is past `first`.

    programs: it may start programs, and signal them. Raises OSError where it cannot be caged.
    """
    ready = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setsid()
            keep_files(streams, (*descriptors, ready[1]))
            cage.go_dark()
            cage.limit(**limits["cage"])
            cage.refuse_calls(programs=programs)
            if first is not None:
                first()
            os.write(ready[1], b".")
            os.close(ready[1])
            work()
        finally:
            os._exit(1)
    os.close(ready[1])
    is_ready = os.read(ready[0], 1)
    os.close(ready[0])
    if not is_ready:
        raise OSError("a process of the sandbox could not give up what it must")
    return pid


def watch(
    pid: int, outputs: Iterable[Output], passed: Callable[[], str], sign: Output | None = None
) -> tuple[bool, str]:
    """Read until a process gives its sign, or ends where it has none: whether it did; the limit
    that was passed before, if any.
    """
    poll, end = select.poll(), os.pidfd_open(pid)
    by_fd = {output.fd: output for output in outputs}
    for fd in (*by_fd, end):
        poll.register(fd, select.POLLIN)
    try:
        while True:
            ready = {fd for fd, _ in poll.poll(_TICK_S * 1000)}
            for fd in ready & by_fd.keys():
                if not by_fd[fd].read():
                    poll.unregister(fd)
            if sign is not None and sign.total:
                return True, ""
            if reason := passed():
                return False, reason
            if end in ready:
                return sign is None, ""
    finally:
        os.close(end)


class TestRun:
    """The processes of one test."""

    def __init__(self, limits: dict[str, Any], deadline: float) -> None:
        self._limits = limits
        self._deadline = min(deadline, time.monotonic() + limits["wall_s"])
        self._outputs: list[Output] = []
        self._pids: list[int] = []

    def script(self, source: str) -> list[Any]:
        """Run the program on the next frame as its input: whether it ended well, why not, what it
        printed.
        """
        feed = os.memfd_create("input")
        write_all(feed, read_frame(0))
        os.lseek(feed, 0, os.SEEK_SET)
        out, err = self._output(), self._output()
        self._fork(lambda: run_script(source), (feed, out.theirs, err.theirs))
        _close(feed)
        reason, ended = self._ended()
        note = reason or how_it_ended(ended[self._pids[0]], err.text)
        return [not note, note, b"" if note else bytes(out.held)]

    def judged(self, source: str, judge: Judge) -> list[Any]:
        """Run the test in the next frame against the program: whether it passed, why not, and no
        output.
        """
        ask, reply = os.pipe(), os.pipe()
        note, out, err = self._output(), self._output(), self._output()
        null, unread = os.open(os.devnull, os.O_RDWR), os.dup(0)
        streams = (null, out.theirs, err.theirs)
        test: list[bytes] = []
        self._fork(
            lambda: run_test(judge, test[0], ask[1], reply[0], note.theirs),
            streams,
            (ask[1], reply[0], note.theirs, unread),
            first=lambda: test.append(read_frame(unread)),
        )
        self._fork(lambda: serve_calls(source, ask[0], reply[1]), streams, (ask[0], reply[1]))
        _close(*ask, *reply, null, unread)
        reason, ended = self._ended()
        status, program = (ended[pid] for pid in self._pids)
        why = note.text
        if not reason and why == PROGRAM_ENDED:
            reason = how_it_ended(program, err.text) or "exited before its test was over"
        reason = reason or (why or how_it_ended(status, "") if status else "")
        return [not reason, reason, b""]

    def _output(self) -> Output:
        self._outputs.append(Output(self._limits["output_bytes"]))
        return self._outputs[-1]

    def _fork(
        self,
        work: Work,
        streams: tuple[int, int, int],
        descriptors: tuple[int, ...] = (),
        first: Work | None = None,
    ) -> None:
        self._pids.append(fork(work, streams, descriptors, self._limits, first=first))

    def _ended(self) -> tuple[str, dict[int, int]]:
        """Read what the processes write until the first one ends, and end the others: the limit
        that was passed, and wait statuses by process.
        """
        _close(*(output.theirs for output in self._outputs))
        first, ended = self._pids[0], dict[int, int]()
        _, reason = watch(first, self._outputs, self._passed)
        if reason:
            os.kill(first, SIGKILL)
        ended[first] = os.waitpid(first, 0)[1]
        for output in self._outputs:
            output.drain()
        reason = reason or self._passed()
        signal_others(SIGKILL)
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            ended[pid] = status
        _close(*(output.fd for output in self._outputs))
        return reason, ended

    def _passed(self) -> str:
        """The limit that these processes have passed, if any."""
        limits = self._limits
        if sum(output.total for output in self._outputs) > limits["output_bytes"]:
            return f"wrote more than {limits['output_bytes']} bytes"
        if any(_cpu_s(pid) > limits["cpu_s"] for pid in self._pids):
            return f"took more than {limits['cpu_s']:g} s of CPU time"
        if time.monotonic() > self._deadline:
            return f"had not ended after {limits['wall_s']:g} s"
        return _too_many_files(limits)


class SandboxKeeper:
    """What is left of one command for the next."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._folder = HOME
        self._environment = {"HOME": HOME, "PATH": _PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
        self._ended: dict[int, int] = {}
        """Wait statuses of processes that were collected before anybody asked for them."""
        self._python: tuple[int, int, Output, Output] | None = None
        """Of the interpreter: its process, our end of its requests, its signs and its output."""

    def reply(self, command: str, arguments: list[Any]) -> list[Any]:
        """What a request comes to; a sandbox that cannot go on after it is lost."""
        try:
            return getattr(self, command)(*arguments)  # type: ignore[no-any-return]
        except Exception as error:
            return ["lost", f"left the sandbox in disorder ({type(error).__name__}: {error})"]

    def python(self, code: str, seconds: float, most: int) -> list[Any]:
        """Run code in the interpreter that ran what came before."""
        encoded = code.encode("utf-8", "surrogatepass")
        if len(encoded) > LONGEST_CODE:
            return [
                "failed",
                f"the code has {len(encoded)} bytes, and may have {LONGEST_CODE}; write a file"
                " first",
            ]
        if self._python is None or self._python[0] in self._ended or not self._told(encoded):
            self._end_python()
            self._python = self._started()
            if not self._told(encoded):
                return ["lost", "no Python takes code any more"]
        pid, _, sign, output = self._python
        output.restart(most)
        is_over, note = watch(pid, (output, sign), self._limit(output, seconds), sign)
        if note:
            os.kill(pid, SIGINT)
            is_over, _ = watch(pid, (output, sign), self._limit(output, _INTERRUPTED_S), sign)
        output.drain()
        if not is_over:
            status = self._end_python()
            note = (
                f"{note or how_it_ended(status, '') or 'exited'}; Python was started anew, its"
                " variables are gone"
            )
        return self._ran(output, note)

    def shell(self, command: str, seconds: float, most: int) -> list[Any]:
        """Run a command in the folder and the environment that the last one left."""
        encoded = command.encode("utf-8", "surrogatepass")
        if len(encoded) > LONGEST_COMMAND:
            return [
                "failed",
                (
                    f"the command has {len(encoded)} bytes, and may have {LONGEST_COMMAND}; write a"
                    " file first"
                ),
            ]
        output, state = Output(most), Output(_MOST_STATE)
        pid = self._fork(lambda: self._execute(encoded, state.theirs), output, (state.theirs,))
        _close(output.theirs, state.theirs)
        _, note = watch(pid, (output, state), self._limit(output, seconds))
        if note:
            self._kill_group(pid)
        status = self._status(pid)
        state.drain()
        output.drain()
        _close(output.fd, state.fd)
        self._remember(state)
        return self._ran(output, note or how_it_ended(status, ""))

    def write(self, path: str, data: bytes) -> list[Any]:
        """Put a file there; its folders are made."""
        try:
            path = os.path.join(HOME, path)  # noqa: PTH118  (pathlib is slow to import)
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            # a pipe that nobody reads holds nobody up
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
            with open(os.open(path, flags, 0o644), "wb") as file:  # noqa: PTH123
                file.write(data)
        except OSError as error:
            return ["failed", f"{path} cannot be written: {error.strerror}"]
        return ["data", b""]

    def read(self, path: str, most: int) -> list[Any]:
        """A file's bytes."""
        try:
            fd = os.open(os.path.join(HOME, path), os.O_RDONLY | os.O_NONBLOCK)  # noqa: PTH118
            try:
                size = os.fstat(fd).st_size
                if size > most:
                    return ["failed", f"{path} has {size} bytes, and {most} are read at most"]
                return ["data", os.read(fd, most)]
            finally:
                os.close(fd)
        except OSError as error:
            return ["failed", f"{path} cannot be read: {error.strerror}"]

    def _limit(self, output: Output, seconds: float) -> Callable[[], str]:
        """What says whether a command has passed a limit, and which."""
        deadline, most = time.monotonic() + seconds, self._limits["output_bytes"]

        def passed() -> str:
            if output.total > most:
                return f"wrote more than {most} bytes"
            return f"took more than {seconds:g} s" if time.monotonic() > deadline else ""

        return passed

    def _ran(self, output: Output, note: str) -> list[Any]:
        self._reap()
        if too_many := _too_many_files(self._limits):
            return ["lost", too_many]
        return ["ran", bytes(output.held), output.total, note]

    def _told(self, code: bytes) -> bool:
        """Whether the interpreter takes code: what ran in it may have closed its end, or does not
        read.
        """
        assert self._python is not None
        _, feed, sign, _ = self._python
        try:
            sign.drain()  # signs that the code gave itself
            sign.restart(0)
            unsent, poll = memoryview(FRAME.pack(len(code)) + code), select.poll()
            poll.register(feed, select.POLLOUT)
            deadline = time.monotonic() + _INTERRUPTED_S
            while unsent and time.monotonic() < deadline:
                if poll.poll(_TICK_S * 1000):
                    unsent = unsent[os.write(feed, unsent) :]
            return not unsent
        except OSError:
            return False

    def _end_python(self) -> int:
        """End the interpreter with what it started; its wait status."""
        if self._python is None:
            return 0
        (pid, feed, sign, output), self._python = self._python, None
        self._kill_group(pid)
        status = self._status(pid)
        _close(feed, sign.fd, output.fd)
        return status

    def _started(self) -> tuple[int, int, Output, Output]:
        from . import interpreter  # what it imports costs more than all else here

        feed, sign, output = os.pipe(), Output(0), Output(0)
        pid = self._fork(
            lambda: interpreter.serve(feed[0], sign.theirs), output, (feed[0], sign.theirs)
        )
        _close(feed[0], sign.theirs, output.theirs)
        os.set_blocking(feed[1], False)
        return pid, feed[1], sign, output

    def _fork(self, work: Work, output: Output, descriptors: tuple[int, ...]) -> int:
        null = os.open(os.devnull, os.O_RDWR)
        streams = (null, output.theirs, output.theirs)
        try:
            return fork(work, streams, descriptors, self._limits, programs=True)
        finally:
            os.close(null)

    def _execute(self, command: bytes, state: int) -> None:
        if state == STATE:
            os.set_inheritable(state, True)
        else:
            os.dup2(state, STATE)
        os.chdir(self._folder if os.path.isdir(self._folder) else HOME)  # noqa: PTH112
        shell = next((path for path in SHELLS if os.access(path, os.X_OK)), SHELLS[-1])
        os.execve(shell, [shell.encode(), b"-c", _PROLOGUE.encode() + command], self._environment)

    def _remember(self, state: Output) -> None:
        """Folder and environment of a shell that came to its end."""
        folder, *entries = bytes(state.held).decode("utf-8", "surrogateescape").split("\0")
        if state.total <= _MOST_STATE and folder.startswith("/") and entries:
            pairs = (entry.partition("=") for entry in entries)
            self._folder = folder
            self._environment = {name: value for name, sign, value in pairs if sign}

    def _status(self, pid: int) -> int:
        """The wait status of a process that ends."""
        return self._ended.pop(pid) if pid in self._ended else os.waitpid(pid, 0)[1]

    def _reap(self) -> None:
        """Collect what has ended."""
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                if self._python is not None and child[0] == self._python[0]:
                    self._ended[child[0]] = child[1]
        except ChildProcessError:
            pass

    def _kill_group(self, pid: int) -> None:
        try:  # noqa: SIM105  (contextlib is slow to import)
            os.killpg(pid, SIGKILL)
        except ProcessLookupError:
            pass


def keep_files(streams: tuple[int, ...], descriptors: tuple[int, ...]) -> None:
    """Have these descriptors as standard streams, keep those, and close all others."""
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
    low = 3
    for fd in sorted(descriptors):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 16)


def how_it_ended(status: int, errors: str) -> str:
    """A wait status and the last line on the error stream as a reason; empty for a good end."""
    if status == 0:
        return ""
    lines = errors[-4096:].strip().splitlines()
    last = f": {lines[-1][:300]}" if lines else ""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}{last}"
    return f"exited with status {os.WEXITSTATUS(status)}{last}"


def signal_others(number: int) -> None:
    """Send a signal to every process of the sandbox but this one; where this one is no process 1,
    as only in a test of it, to those alone that it has forked.
    """
    others = [-1]
    if (own := os.getpid()) != 1:
        with open(f"/proc/self/task/{own}/children") as file:  # noqa: PTH123
            others = list(map(int, file.read().split()))
    for pid in others:
        try:  # noqa: SIM105  (contextlib is slow to import)
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _too_many_files(limits: dict[str, Any]) -> str:
    room = os.statvfs(HOME)
    is_over = room.f_files - room.f_ffree > limits["files"]
    return f"made more than {limits['files']} files" if is_over else ""


def _cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has taken, by its clock (clock_getcpuclockid(3)); 0 once
    it is gone.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _reply(reply: list[Any]) -> None:
    write_frame(1, encode(reply, lambda value: 0))


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
