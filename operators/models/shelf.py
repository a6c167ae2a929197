"""Parks tensors that are unused for a while: a GPU's in pinned main memory, main memory's in a
file.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dataflow.system.files import disk


class Shelf:
    """Takes the memory of tensors and gives it back to their device; they stay the same objects,
    and so does whatever shares memory with them, and they have their values again after `back`.

    Pinned memory is taken once. The file has no name: it goes with the process, however that ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """folder: of files for what lies in main memory; None: that is left where it is."""
        self._folder = folder
        self._file = -1
        self._pinned: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | int | None]] = []
        """Storages whose memory is given back: their bytes, and pinned memory, a place in the file,
        or nothing."""
        self._is_full = False

    @property
    def nbytes(self) -> int:
        """Main memory that it holds."""
        return sum(host.nbytes for _, host in self._pinned.values())

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor], forget: Iterable[Tensor] = ()) -> None:
        """Put their values away, after all that the current stream does, and give their memory
        back.

        forget: tensors that have no value afterwards, only their memory: whoever takes them back
        fills them. RunFolderError where the disk refuses.
        """
        if self._is_full:
            return
        chosen = self._storages(forget)
        self._away = [(storage, storage.nbytes(), None) for storage in chosen.values()]
        at = 0
        for key, storage in self._storages(tensors).items():
            if key in chosen:
                continue
            if storage.device.type == "cpu":
                self._away.append((storage, storage.nbytes(), at))
                at += storage.nbytes()
            else:
                self._away.append((storage, storage.nbytes(), self._room(storage)))
        for storage, _, place in self._away:
            if isinstance(place, Tensor):
                place.copy_(_bytes(storage), non_blocking=True)
            elif place is not None:
                self._write(storage, place)
        if any(storage.device.type == "cuda" for storage, _, _ in self._away):
            torch.cuda.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        self._is_full = True

    @torch.no_grad()
    def back(self) -> None:
        """Have them on their devices, for all that the current stream does from now on."""
        for storage, nbytes, place in self._away:
            storage.resize_(nbytes)
            if isinstance(place, Tensor):
                _bytes(storage).copy_(place, non_blocking=True)
            elif place is not None:
                self._read(storage, place)
        self._away, self._is_full = [], False

    def close(self) -> None:
        """Let the file go."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Those that can be given back, each once."""
        storages = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            moves = storage.device.type == "cuda" or (
                storage.device.type == "cpu" and self._folder is not None
            )
            if moves and storage.resizable() and storage.nbytes():
                storages[storage._cdata] = storage
        return storages

    def _room(self, storage: torch.UntypedStorage) -> Tensor:
        pinned = self._pinned.get(storage._cdata)
        if pinned is None or pinned[1].nbytes != storage.nbytes():
            pinned = (storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True))
            self._pinned[storage._cdata] = pinned
        return pinned[1]

    def _write(self, storage: torch.UntypedStorage, at: int) -> None:
        assert self._folder is not None
        with disk("putting memory aside in", self._folder):
            if self._file < 0:
                self._file, name = tempfile.mkstemp(dir=self._folder, prefix=".aside-")
                Path(name).unlink()
            view = _view(storage)
            while view:
                done = os.pwrite(self._file, view, at)
                view, at = view[done:], at + done

    def _read(self, storage: torch.UntypedStorage, at: int) -> None:
        assert self._folder is not None and self._file >= 0
        with disk("taking memory back from", self._folder):
            view = _view(storage)
            while view:
                done = os.preadv(self._file, [view], at)
                if not done:
                    raise OSError(f"the file ends {len(view)} bytes too early")
                view, at = view[done:], at + done


def return_freed_memory() -> None:
    """Have what was freed at other processes' disposal: allocators keep it for themselves
    otherwise, and cuBLAS 32 MiB for each stream that has multiplied on an H100; no captured graph
    may be left that multiplies there.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that several share out."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage) -> memoryview:
    """Its bytes, for reading and writing; a storage that numpy has seen could not be given back any
    more.
    """
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast(
        "B"
    )
