"""Keeps freed memory in the process, so that a stream of large messages does not fault its pages in
again and again.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep up to 256 MiB of freed memory; whether it could be told.

    By default every block above 128 KiB is mapped afresh, and the kernel zeroes its pages at each
    use.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 8)) and bool(
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    )
