"""Buffers that other processes of this machine write into, in files without a name: none is left
behind.

A buffer's owner tells the number that its file has in its own process, under which /proc opens it
to other processes of one user, and what proves that it is that file. However processes end, the
kernel frees the memory with the last of them. A GPU's buffer has such a file too, as a lease:
whoever has it open holds a lock on the file, and its owner, who must not free what others have
open, waits for that. Source: Linux, proc(5), open(2) on O_TMPFILE.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch

from transport.weights.errors import SegmentError
from transport.weights.executors.address import flock, memory_folder
from transport.weights.executors.device_memory import DeviceMemory, Handle, departing
from transport.weights.executors.shared_memory import allocate


class OwnBuffer:
    """A buffer of this process. Its memory goes when it is released, and no tensor and no other
    process has it.
    """

    def __init__(self, buffer: torch.Tensor, file: int, handle: Handle, *, is_leased: bool) -> None:
        self.buffer, self.handle = buffer, handle
        self._file, self._is_leased = file, is_leased
        self._close = weakref.finalize(self, os.close, file)
        self._close.atexit = False

    def release(self) -> None:
        """No other process can open it from now on, except a GPU's, whose handle nobody is told any
        more.
        """
        if self._is_leased:
            departing.add(self, self.buffer)
        else:
            self.close()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        departing.release()

    def seal(self) -> bool:
        """Whether no other process has it open, and none can open it any more."""
        return flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Let go of the file."""
        self._close()


class PeerBuffer:
    """A buffer of another process."""

    def __init__(self, buffer: torch.Tensor, lease: int) -> None:
        self.buffer = buffer
        self._close = weakref.finalize(self, os.close, lease)
        self._close.atexit = False

    def close(self) -> None:
        """Let go of it; no tensor of it may be left."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._close()


class PeerMemory:
    """Main memory, or that of a GPU."""

    def __init__(
        self, memory: DeviceMemory | None = None, folder: str | Path | None = None
    ) -> None:
        """`memory`: a GPU's, or what stands in for one. `folder`: for the files, /dev/shm where
        there is one.
        """
        self._memory, self._folder = memory, memory_folder(folder)

    def allocate(self, nbytes: int) -> OwnBuffer:
        """uint8[nbytes]. SegmentError where there is no memory for it."""
        departing.release()
        device = None if self._memory is None else self._memory.allocate(nbytes)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as unnamed:
                file = os.dup(unnamed.fileno())
            try:
                allocate(file, nbytes if device is None else mmap.PAGESIZE)
                buffer = _mapped(file, nbytes) if device is None else device
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            free = os.statvfs(self._folder)
            raise SegmentError(
                f"no shared memory for a version of {nbytes >> 20} MiB; found {error.strerror},"
                f" {free.f_bavail * free.f_frsize >> 20} MiB free in {self._folder}; each rank of a"
                " reader needs two: enlarge it (docker: --shm-size), or send by gloo"
            ) from None
        status = os.fstat(file)
        handle: Handle = {
            "process": os.getpid(),
            "file": file,
            "device": status.st_dev,
            "inode": status.st_ino,
            "nbytes": nbytes,
            "memory": {} if self._memory is None else self._memory.export(buffer),
        }
        return OwnBuffer(buffer, file, handle, is_leased=self._memory is not None)

    def open(self, handle: Handle) -> PeerBuffer:
        """The buffer that `allocate` gave in another process. SegmentError when it is gone."""
        try:
            file = _opened(handle)
        except OSError as error:
            raise SegmentError(
                f"the memory of process {handle['process']} cannot be opened; found"
                f" {error.strerror}; is it alive, on this machine, and of one user and PID"
                " namespace with this process?"
            ) from None
        try:
            if not flock(file, fcntl.LOCK_SH):
                raise SegmentError(
                    f"a buffer of process {handle['process']} is given up; found its lease ended;"
                    " the epoch is over"
                )
            buffer = (
                _mapped(file, handle["nbytes"])
                if self._memory is None
                else self._memory.open(handle["memory"], to_write=True)
            )
        except BaseException:
            os.close(file)
            raise
        return PeerBuffer(buffer, file)


def _mapped(file: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def _opened(handle: Handle) -> int:
    """A file of another process, by the number that it has there. FileNotFoundError when that is
    another file now.
    """
    path = Path(f"/proc/{handle['process']}/fd/{handle['file']}")
    identity = (handle["device"], handle["inode"])
    status = path.stat()
    # else opening it may do anything: it may be a device
    if (status.st_dev, status.st_ino) == identity:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(file)
        if (status.st_dev, status.st_ino) == identity:
            return file
        os.close(file)
    raise FileNotFoundError(2, os.strerror(2), str(path))
