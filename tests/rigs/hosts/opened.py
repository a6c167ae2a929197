"""Which host opened which file of a folder that several see, as the kernel tells it (fanotify).
Needs root.
"""

import contextlib
import ctypes
import os
import select
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from .host import Host, NoHosts

OPEN, CLOSE_WRITE = 0x20, 0x8
UNLIMITED, CLOSE_ON_EXEC, NON_BLOCKING, MARK_ADD, MARK_MOUNT, HERE = 0x30, 0x1, 0x2, 0x1, 0x10, -100
EVENT = struct.Struct("IBBHQii")


class Opened:
    """Files below a shared folder, by host. Those of a host that is booted again are not seen."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        """Errors: NoHosts without the right to look."""
        self._folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._by_fd: dict[int, str] = {}
        self.seen: dict[str, set[str]] = defaultdict(set)
        """Paths below the folder, opened in whichever way, by host."""
        self.written: dict[str, set[str]] = defaultdict(set)
        """Those that were open for writing, and were closed."""
        for host in hosts:
            self._by_fd[self._mark(host)] = host.name
        self._stop, self._go_on = os.pipe()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def writers(self) -> dict[str, set[str]]:
        """Hosts, by the file that they wrote."""
        found: dict[str, set[str]] = defaultdict(set)
        for host, paths in self.written.items():
            for path in paths:
                found[path].add(host)
        return found

    def close(self) -> None:
        """Every event that there was is counted then."""
        os.close(self._go_on)
        self._thread.join(10)
        for fd in (*self._by_fd, self._stop):
            os.close(fd)

    def _mark(self, host: Host) -> int:
        """One queue for each host, as each has a mount of its own of the folder."""
        fd: int = self._libc.fanotify_init(
            UNLIMITED | CLOSE_ON_EXEC | NON_BLOCKING, os.O_RDONLY | os.O_CLOEXEC
        )
        if fd < 0:
            raise NoHosts(f"fanotify: {os.strerror(ctypes.get_errno())}; it needs root")
        place = os.fsencode(host.outside(self._folder))
        if (
            self._libc.fanotify_mark(
                fd, MARK_ADD | MARK_MOUNT, ctypes.c_uint64(OPEN | CLOSE_WRITE), HERE, place
            )
            < 0
        ):
            error = os.strerror(ctypes.get_errno())
            os.close(fd)
            raise NoHosts(f"fanotify: {error}; it needs root")
        return fd

    def _listen(self) -> None:
        """Until the end, and then what has not been read yet."""
        while self._stop not in (ready := select.select([self._stop, *self._by_fd], [], [])[0]):
            for fd in ready:
                self._take(fd)
        for fd in self._by_fd:
            while self._take(fd):
                pass

    def _take(self, queue: int) -> bool:
        try:
            events = os.read(queue, 1 << 16)
        except BlockingIOError:
            return False
        while events:
            length, _, _, _, mask, fd, _ = EVENT.unpack_from(events)
            events = events[length:]
            if fd >= 0:
                self._note(self._by_fd[queue], mask, fd)
        return True

    def _note(self, host: str, mask: int, fd: int) -> None:
        try:
            path = Path(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)"))  # noqa: PTH115
            if path.is_relative_to(self._folder):
                name = str(path.relative_to(self._folder))
                self.seen[host].add(name)
                if mask & CLOSE_WRITE:
                    self.written[host].add(name)
        finally:
            os.close(fd)


@contextlib.contextmanager
def opened(hosts: Sequence[Host], folder: Path) -> Iterator[Opened]:
    """What they open within; complete when it has ended."""
    watch = Opened(hosts, folder)
    try:
        yield watch
    finally:
        watch.close()
