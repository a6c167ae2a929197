"""The process's heap: freed memory returns to the system, on request or at once."""

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 2 << 20


def trim_memory() -> None:
    """Give back what lies free anywhere in the heap: workers keep up to 256 MiB of it otherwise
    (`transport.data.keep_freed_memory`), and holes of any size. Takes milliseconds for each 100
    MiB.
    """
    with contextlib.suppress(AttributeError, OSError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def map_large_blocks() -> None:
    """Have blocks of 2 MiB and more mapped by themselves, and given back when they are freed.

    For a process that takes and gives back tensors as large as a layer's again and again: in the
    heap smaller ones come to lie in the holes that they leave, so that the next does not fit. Costs
    the kernel's zeroing of pages at each use.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
