"""A disk of its own for a process, which it may fill: a small file system in memory that no other
process sees.
"""

import ctypes
import errno
import os
import sys
from pathlib import Path

REFUSED = 77


"""The exit status of a program that may not mount."""


_NEW_MOUNTS = 0x00020000


_PRIVATE, _ALL_BELOW = 1 << 18, 1 << 14


_PAGE = 4096


class Disk:
    """One of them, at a path, until this process and those that it starts have ended."""

    def __init__(self, path: Path, size: int) -> None:
        """Mount it there; ends the process with `REFUSED` where that is not allowed. size:
        bytes.
        """
        self.path, self._ballast = path, path / "ballast"
        path.mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        made = libc.unshare(_NEW_MOUNTS) or libc.mount(
            b"none", b"/", None, _PRIVATE | _ALL_BELOW, None
        )
        if made or libc.mount(b"none", str(path).encode(), b"tmpfs", 0, f"size={size}".encode()):
            print(f"no disk can be mounted at {path}: {os.strerror(ctypes.get_errno())}")
            sys.exit(REFUSED)

    @property
    def free(self) -> int:
        """Bytes."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leaves: int = 0) -> None:
        """Leave nothing of it, or so many bytes."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while not leaves or self.free > leaves:
                    file.write(b"x" * _PAGE)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
        assert self.free <= leaves, self.free

    def make_room(self) -> None:
        """Undo that."""
        self._ballast.unlink()
