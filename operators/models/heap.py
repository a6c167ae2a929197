"""The heap of this process: what it has freed goes back to the system when it is told so."""

import contextlib
import ctypes


def trim_memory() -> None:
    """Give back what lies free anywhere in the heap: workers keep up to 256 MiB of it otherwise
    (`transport.data.keep_freed_memory`), and holes of any size. Takes milliseconds for each 100 MiB."""
    with contextlib.suppress(AttributeError, OSError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
