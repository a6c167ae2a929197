"""Forks into which nothing of the parent reaches over: no thread that a child does not have is
waited for there.

A fork copies the memory of a process and one of its threads. Two things in that memory hang a child
for good, whatever the child itself does:

- garbage that owns threads (a process group of torch, say): the collector finds it in the child
  sooner or later, and its destructor joins threads that are not there;
- the pool of GNU OpenMP, once the parent has computed with it: the child's first computation on
  several threads waits for its members.
"""

import contextlib
import ctypes
import gc
import os
import sys
import warnings
from pathlib import Path

_GNU_OPENMP = "libgomp"
_PAUSE_SOFT = 1
"""omp_pause_soft of OpenMP 5.0: what was set stays set."""


def fork() -> int:
    """As `os.fork`; what the child inherits is never collected there, and it may compute on several
    threads.

    The caller's pool of OpenMP threads is ended; its next computation makes another, which takes
    microseconds. Streams are flushed, so that nothing is written twice.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _end_openmp_threads()
    collects = gc.isenabled()
    gc.disable()  # nothing may be collected between the fork and the freeze
    try:
        with warnings.catch_warnings():
            # of threads, which the child does not have
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return pid


def has_used_cuda() -> bool:
    """Whether this process has used CUDA, which no fork of it can use again."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _end_openmp_threads() -> None:
    """Those of this thread's pool; of other libraries (LLVM's, Intel's) none need it: they see to
    forks themselves.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for path in {
        line.split(maxsplit=5)[5].strip()
        for line in maps.read_text().splitlines()
        if _GNU_OPENMP in line
    }:
        # replaced on disk since it was loaded; older than GCC 9
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_SOFT)
