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
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from transport.weights.errors import SegmentError
from transport.weights.executors.address import flock, memory_folder
from transport.weights.executors.shared_memory import allocate

Handle = dict[str, Any]
"""What opens a buffer elsewhere: text, bytes and integers, as msgpack carries them."""


class DeviceMemory(Protocol):
    """One device's memory. The memory of a buffer goes with the last tensor that refers to it."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of zeros. SegmentError when there is none left."""

    def export(self, buffer: torch.Tensor) -> Handle:
        """What `open` takes, in any process of this machine, while `buffer` lives."""

    def open(self, handle: Handle, *, to_write: bool = False) -> torch.Tensor:
        """The same bytes, uint8[nbytes], in this process. SegmentError when they cannot be had.

        Every tensor made from them must be gone before the exporter lets go of its own. `to_write`:
        by kernels of this device, whose tensor it is to be, wherever the bytes lie.
        """

    def written(self, buffer: torch.Tensor) -> None:
        """Until what this thread has asked to be written to `buffer` is there for other
        processes.
        """

    def read(self, buffer: torch.Tensor) -> None:
        """Until nothing that this process has asked for reads `buffer` any more."""


def numbered(device: str | torch.device) -> torch.device:
    """The device as its tensors name it: `cuda` is the GPU that is current."""
    resolved = torch.device(device)
    bare = resolved.type == "cuda" and resolved.index is None
    return torch.device("cuda", torch.cuda.current_device()) if bare else resolved


class Lease(Protocol):
    """What every process that has a buffer open holds a lock on."""

    def seal(self) -> bool:
        """Whether no process has it open; from then on none can open it."""

    def close(self) -> None:
        """Let go of it."""


class Departing:
    """Buffers that their owners have released while another process still has them open."""

    def __init__(self) -> None:
        self._held: list[tuple[Lease, torch.Tensor]] = []
        self._lock = threading.Lock()

    def add(self, lease: Lease, buffer: torch.Tensor) -> None:
        """Keep the buffer until its lease has ended."""
        with self._lock:
            self._held.append((lease, buffer))

    def release(self) -> None:
        """Free those that no process has open."""
        with self._lock:
            ended = [lease for lease, _ in self._held if lease.seal()]
            self._held = [pair for pair in self._held if pair[0] not in ended]
        for lease in ended:
            lease.close()


departing = Departing()
"""Outlives the owners: the memory is the process's."""


class HostMemory:
    """Files in a folder, through the same calls: what tests, and machines without a GPU, run on.

    A buffer that its exporter lets go is overwritten first, as a device may do with it.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder`: the same for all processes."""
        self.folder = Path(folder)
        self._paths: dict[int, str] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of zeros, in a file of its own."""
        path = self.folder / f"memory-{secrets.token_hex(6)}"
        buffer = _file_mapped(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL, nbytes, lambda: _spoil(path, nbytes)
        )
        self._paths[buffer.data_ptr()] = str(path)
        return buffer

    def export(self, buffer: torch.Tensor) -> Handle:
        """The file's path."""
        return {"path": self._paths[buffer.data_ptr()], "nbytes": len(buffer)}

    def open(self, handle: Handle, *, to_write: bool = False) -> torch.Tensor:
        """The file's bytes."""
        try:
            return _file_mapped(Path(handle["path"]), os.O_RDWR, handle["nbytes"], lambda: None)
        except OSError as error:
            raise SegmentError(
                f"the memory of another process cannot be opened; found {error}; is that process"
                " alive?"
            ) from None

    def written(self, buffer: torch.Tensor) -> None:
        """At once: there is nothing to wait for."""

    def read(self, buffer: torch.Tensor) -> None:
        """At once: there is nothing to wait for."""

    def __reduce__(self) -> tuple[type[HostMemory], tuple[Path]]:
        """The folder travels; what was allocated here is this process's own."""
        return HostMemory, (self.folder,)


def _file_mapped(path: Path, flags: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
    """uint8[nbytes] over a file; `gone` is called when no tensor refers to it any more, if the
    process lives.
    """
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(file, nbytes)
        mapping = mmap.mmap(file, nbytes)
    finally:
        os.close(file)
    weakref.finalize(mapping, gone).atexit = False
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _spoil(path: Path, nbytes: int) -> None:
    try:
        with path.open("r+b") as file:
            file.write(b"\xff" * nbytes)
        path.unlink()
    except FileNotFoundError:
        return


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
