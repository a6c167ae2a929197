"""Locks on single bytes of a file, kept by the kernel: one that dies lets go, one that is stopped
does not.
"""

import fcntl
import os
import struct
from pathlib import Path

_LAYOUT = "hhqqi4x"
"""struct flock of Linux: kind, whence, first byte, bytes, process."""


class ByteLocks:
    """One open file with locks of its own: others that open it are others, also within a process.
    Never waits.

    Who inherits the file has the locks too: they are let go of by `drop`, or with the last process
    that has it open.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, byte: int, *, alone: bool) -> bool:
        """Lock a byte, beside others that do not want it `alone`; False while others hold it
        otherwise.
        """
        try:
            self._ask(fcntl.F_OFD_SETLK, fcntl.F_WRLCK if alone else fcntl.F_RDLCK, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def drop(self, byte: int) -> None:
        """Let go of a byte."""
        self._ask(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def is_taken(self, byte: int) -> bool:
        """Whether somebody else has it locked."""
        return self._ask(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK

    def fileno(self) -> int:
        """For others to inherit."""
        return self._file

    def close(self) -> None:
        """Let go of all, where nobody else has inherited them."""
        os.close(self._file)

    def _ask(self, command: int, kind: int, byte: int) -> int:
        answer = fcntl.fcntl(
            self._file, command, struct.pack(_LAYOUT, kind, os.SEEK_SET, byte, 1, 0)
        )
        return int(struct.unpack(_LAYOUT, answer)[0])
