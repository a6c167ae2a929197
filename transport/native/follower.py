"""Sums a buffer on a thread of its own, behind the writer: the reader's proof costs its loop
nothing.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import torch

from transport.native.build import library
from transport.native.sums import Ints, Pairs

RUNNING, SUMMED = range(2)


class _Follow(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("version", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
    )


class Follower:
    """One pass over ranges of a buffer while they are written.

    Consumes: bytes below the writer's watermark. Produces: their sums. Waits for: the watermark.
    Unblocked by: the writer; another version in its place; `close`.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        offsets: Ints,
        sizes: Ints,
        progress: torch.Tensor | None,
        version: int,
    ) -> None:
        """`progress` (int64[2]): the version that is being written, and how many bytes of it are
        whole; None: all.

        RuntimeError where there is no thread to be had.
        """
        kernels = library()
        assert kernels is not None, "whoever follows has asked for the library"
        self._kernels, self._held = kernels, (buffer, progress)
        self._process = os.getpid()
        self._offsets, self._sizes = np.asarray(offsets, np.int64), np.asarray(sizes, np.int64)
        self._sums = np.zeros((len(self._offsets), 2), np.uint64)
        self._job: _Follow | None = _Follow(
            data=buffer.data_ptr(),
            offsets=self._offsets.ctypes.data,
            sizes=self._sizes.ctypes.data,
            count=len(self._offsets),
            sums=self._sums.ctypes.data,
            version=version,
            progress=None if progress is None else progress.data_ptr(),
        )
        if error := kernels.dataflow_follow(ctypes.byref(self._job)):
            self._job = None
            raise RuntimeError(
                f"no thread to verify version {version} with; found {os.strerror(error)}; raise the"
                " limit on processes"
            )

    @property
    def running(self) -> bool:
        """Whether it is still on its way."""
        return self._job is not None and self._job.state == RUNNING

    @property
    def pairs(self) -> Pairs | None:
        """s1 and s2 of each range, uint64[ranges, 2], once all are summed; None before, or for
        good.
        """
        return self._sums if self._job is not None and self._job.state == SUMMED else None

    def close(self) -> None:
        """Stop; returns when the thread is gone, within the time of one chunk. A forked process has
        none.
        """
        if self._job is not None and self._process == os.getpid():
            self._kernels.dataflow_forget(ctypes.byref(self._job))
        self._job = None

    def __del__(self) -> None:
        if hasattr(self, "_job"):
            self.close()
