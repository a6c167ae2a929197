"""Memory that another process can open by a handle: what an executor needs of it, and a double in
files.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from transport.weights.errors import SegmentError

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
        buffer = _mapped(
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
            return _mapped(Path(handle["path"]), os.O_RDWR, handle["nbytes"], lambda: None)
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


def _mapped(path: Path, flags: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
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
