"""The first process of a sandbox that is kept: runs commands one after the other, and keeps what
they leave.

It is process 1 of its namespace, which no process there can signal, stop or look into. Between two
commands all others are stopped: a process that a command left behind takes no time until the next
one comes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from . import cage, interpreter
from .driver import how_it_ended, keep_files
from .wire import FRAME, decode, encode, read_frame, write_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HOME = "/tmp"
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh")
STATE = 9
"""The descriptor into which a shell writes its folder and its environment when it ends."""
LONGEST_COMMAND, LONGEST_CODE = 100_000, 500_000
"""Bytes; the kernel takes no more in one argument."""
_PROLOGUE = f"""trap '{{ printf "%s\\0" "$PWD"; env -0; }} >&{STATE}' EXIT\n"""
_MOST_STATE = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TICK_S, _INTERRUPTED_S = 0.02, 1.0


def main() -> None:
    """Read limits, then requests from descriptor 0; write a reply to each to descriptor 1, until
    the stream ends.

    consumes: [limits], then ["python", code, seconds, bytes], ["shell", command, seconds, bytes],
        ["write", path, data] or ["read", path, bytes], in frames
    produces: ["ready"], then for each ["ran", output, bytes in all, note], ["lost", note] where the
        sandbox has used more than it may, ["data", bytes], or ["failed", note]
    waits for: the process of a command, until it ends or passes a limit
    unblocked by: its end, what it writes, or a clock
    """
    os.environ.clear()
    sys.path.remove("/sandbox")
    cage.go_dark()
    (limits,) = decode(read_frame(0), lambda number: None)
    keeper = SandboxKeeper(limits)
    write_frame(1, _encoded(["ready"]))
    try:
        while True:
            command, *arguments = decode(read_frame(0), lambda number: None)
            _signal_all(signal.SIGCONT)
            reply = keeper.reply(command, arguments)
            _signal_all(signal.SIGSTOP)
            write_frame(1, _encoded(reply))
    except EOFError:
        os._exit(0)


class SandboxKeeper:
    """What is left of one command for the next."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._folder = HOME
        self._environment = {"HOME": HOME, "PATH": _PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
        self._ended: dict[int, int] = {}
        """Wait statuses of processes that were collected before anybody asked for them."""
        self._python: tuple[int, int, int, int] | None = None
        """Of the interpreter: its process, and our ends of its requests, its signs and its
        output."""

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
        pid, _, sign, out = self._python
        output = _Output(out, most)
        is_over, note = self._wait(pid, output, sign, seconds)
        if note:
            os.kill(pid, signal.SIGINT)
            is_over, _ = self._wait(pid, output, sign, _INTERRUPTED_S)
        output.drain()
        if not is_over:
            status = self._end_python()
            note = (
                f"{note or how_it_ended(status, b'') or 'exited'}; Python was started anew, its"
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
        out, state = os.pipe(), os.pipe()
        pid = self._fork(lambda: self._execute(encoded), (out[1], out[1]), {STATE: state[1]})
        os.close(out[1])
        os.close(state[1])
        output, final_state = _Output(out[0], most), _Output(state[0], _MOST_STATE)
        _, note = self._wait(pid, output, None, seconds, final_state)
        if note:
            self._kill_group(pid)
        status = self._status(pid)
        final_state.drain()
        output.drain()
        os.close(out[0])
        os.close(state[0])
        self._remember(final_state)
        return self._ran(output, note or how_it_ended(status, b""))

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

    def _ran(self, output: _Output, note: str) -> list[Any]:
        self._reap()
        room = os.statvfs(HOME)
        if room.f_files - room.f_ffree > self._limits["files"]:
            return ["lost", f"made more than {self._limits['files']} files"]
        return ["ran", bytes(output.held), output.total, note]

    def _told(self, code: bytes) -> bool:
        """Whether the interpreter takes code: what ran in it may have closed its end, or does not
        read.
        """
        assert self._python is not None
        _, feed, sign, _ = self._python
        try:
            _Output(sign, 0).drain()  # signs that the code gave itself
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
        (pid, *fds), self._python = self._python, None
        self._kill_group(pid)
        status = self._status(pid)
        for fd in fds:
            os.close(fd)
        return status

    def _started(self) -> tuple[int, int, int, int]:
        feed, sign, out = os.pipe(), os.pipe(), os.pipe()
        pid = self._fork(
            lambda: interpreter.serve(feed[0], sign[1]),
            (out[1], out[1]),
            {feed[0]: feed[0], sign[1]: sign[1]},
        )
        for fd in (feed[0], sign[1], out[1]):
            os.close(fd)
        os.set_blocking(feed[1], False)
        return pid, feed[1], sign[0], out[0]

    def _fork(self, work: Any, streams: tuple[int, int], descriptors: dict[int, int]) -> int:
        """A caged process in a session of its own that does this; `descriptors`: what it has open
        beside its streams.
        """
        null = os.open(os.devnull, os.O_RDWR)
        if (pid := os.fork()) == 0:
            try:
                os.setsid()
                for place, fd in enumerate((null, *streams)):
                    os.dup2(fd, place)
                for place, fd in descriptors.items():
                    os.dup2(fd, place) if place != fd else os.set_inheritable(fd, True)
                keep_files((0, 1, 2), tuple(descriptors))
                cage.go_dark()
                cage.limit(**self._limits["cage"])
                cage.refuse_calls(programs=True)
                work()
            finally:
                os._exit(1)
        os.close(null)
        return pid

    def _execute(self, command: bytes) -> None:
        os.chdir(self._folder if os.path.isdir(self._folder) else HOME)  # noqa: PTH112
        shell = next((path for path in SHELLS if os.access(path, os.X_OK)), SHELLS[-1])
        os.execve(shell, [shell.encode(), b"-c", _PROLOGUE.encode() + command], self._environment)

    def _remember(self, final_state: _Output) -> None:
        """Folder and environment of a shell that came to its end."""
        folder, *entries = bytes(final_state.held).decode("utf-8", "surrogateescape").split("\0")
        if final_state.total <= _MOST_STATE and folder.startswith("/") and entries:
            pairs = (entry.partition("=") for entry in entries)
            self._folder = folder
            self._environment = {name: value for name, sign, value in pairs if sign}

    def _wait(
        self,
        pid: int,
        output: _Output,
        sign: int | None,
        seconds: float,
        final_state: _Output | None = None,
    ) -> tuple[bool, str]:
        """Read until a process gives its sign, or ends where it has none: whether it did; the limit
        that it passed.
        """
        poll, end = select.poll(), os.pidfd_open(pid)
        deadline = time.monotonic() + seconds
        fds = {output.fd: output, **({} if final_state is None else {final_state.fd: final_state})}
        for fd in (*fds, end, *(() if sign is None else (sign,))):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll(_TICK_S * 1000)}
                for fd in ready & set(fds):
                    if not fds[fd].read():
                        poll.unregister(fd)
                if sign is not None and sign in ready:
                    if os.read(sign, 1):
                        return True, ""
                    # closed by the code: its end is what there is to wait for
                    poll.unregister(sign)
                if end in ready:
                    return sign is None, ""
                if output.total > self._limits["output_bytes"]:
                    return False, f"wrote more than {self._limits['output_bytes']} bytes"
                if time.monotonic() > deadline:
                    return False, f"took more than {seconds:g} s"
        finally:
            os.close(end)

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
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class _Output:
    """What came through a pipe: the first bytes of it, and how many there were."""

    def __init__(self, fd: int, most: int) -> None:
        self.fd, self._most = fd, most
        self.held, self.total = bytearray(), 0
        os.set_blocking(fd, False)

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


def _signal_all(number: int) -> None:
    """Send a signal to every process of the sandbox but this one."""
    try:  # noqa: SIM105
        os.kill(-1, number)
    except ProcessLookupError:
        pass


def _encoded(reply: list[Any]) -> bytes:
    return encode(reply, lambda value: 0)
