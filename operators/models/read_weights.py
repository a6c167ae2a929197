"""The weights that an operator computes with, trained elsewhere or frozen: adopted, put aside,
taken back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataflow.system.files import disk
from dataflow.weight_ends import TAKE, LetsGo, Offered, Span, WeightsAgain, WeightsIn, taken, untold
from operators.ranks.team import Sleep, SleepDone, Wake

if TYPE_CHECKING:
    from dataflow.system.messages import Channel
    from operators.ranks.group import ExchangeWatch
    from operators.ranks.team import Exchange


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


class ModelMemory:
    """The memory of one rank's model: given back while others have its device, and taken again."""

    def __init__(self, attached: Iterable[Tensor], aside: Path | None) -> None:
        """attached: to this rank's end of the weight plane. aside: as of `Context`."""
        self._attached, self._shelf = list(attached), Shelf(aside)

    def sleep(self, end: object, tensors: Iterable[Tensor]) -> bool:
        """Put them aside, and the other tensors of their model; True: those attached lose their
        values, and `end` will fill them.

        What lies in main memory that a version arrives in by itself, as over a network, stays
        there. What they had before the first version may be in use, as by a reference, and is put
        aside.
        """
        again = isinstance(end, LetsGo) and end.let_go()
        arrives = not again and getattr(end, "version", -1) >= 0
        stays = {id(tensor) for tensor in self._attached if tensor.is_cpu} if arrives else set()
        self._shelf.park(
            (tensor for tensor in tensors if id(tensor) not in stays),
            forget=self._attached if again else (),
        )
        return_freed_memory()
        return again

    def wake(self) -> None:
        """Allocate their memory again, with the values that were put aside."""
        self._shelf.back()

    def close(self) -> None:
        """Let what was put aside go."""
        self._shelf.close()


class RankMemory(ModelMemory):
    """That of a rank behind rank 0."""

    def __init__(
        self,
        attached: Iterable[Tensor],
        aside: Path | None,
        end: object,
        tensors: Callable[[], Iterable[Tensor]],
    ) -> None:
        """end: this rank's, of the weight plane. tensors: those of its model, once nothing else of
        it is there.
        """
        super().__init__(attached, aside)
        self._end, self._tensors = end, tensors

    def followed(self, message: object, channel: Channel[Any], watch: ExchangeWatch) -> bool:
        """Sleep or wake as rank 0's message says; False for another message. watch: of the
        exchanges.
        """
        if not isinstance(message, Sleep | Wake):
            return False
        with watch.lifted():
            if isinstance(message, Sleep):
                self.sleep(self._end, self._tensors())
            else:
                self.wake()
        channel.send(SleepDone())
        return True


class ReadWeights:
    """Tensors with a version in them, between two of which their model computes.

    consumes: offers of the trainer
    produces: new values in the tensors
    waits for: the other ranks, where there are some, to sleep and to wake
    unblocked by: their word, their end, or the time-out
    """

    def __init__(
        self,
        reader: WeightsIn | None,
        attached: Mapping[str, Any],
        aside: Path | None,
        ranks: Exchange | None = None,
        span: Span = untold,
    ) -> None:
        """reader: the end that `attached` tensors are attached to; None: the weights are frozen.
        aside, span: as of `Context`. ranks: the others, which sleep and wake when this one does.
        """
        self._reader, self._memory, self._ranks = (
            reader,
            ModelMemory(attached.values(), aside),
            ranks,
        )
        self._span = span
        self.ready = True
        """Whether the tensors hold the version in use."""
        self._awake = True
        self._may_return = False
        """Whether the version that was let go of may still be there to be taken again."""
        self._moved = False
        """Whether the tensors have come back, and their model has not been told."""
        self._offer: Offered | None = None

    @property
    def version(self) -> int:
        """The version in use, or the one to use after waking; -1: none yet."""
        if self._reader is None:
            return 0
        return self._reader.version if self._awake or self._offer is None else self._offer.version

    @property
    def note(self) -> Mapping[str, int | float | str]:
        """The trainer's last note."""
        return self._reader.note if self._reader is not None else {}

    @property
    def socket(self) -> Any:
        """Of the weight plane, where it has one."""
        return getattr(self._reader, "socket", None)

    @property
    def can_be_had(self) -> bool:
        """Whether there are weights, or would be for one that is awake."""
        return self.version >= 0 and (self.ready or self._may_return or self._offer is not None)

    def take(self) -> int | None:
        """A safe point: adopt the newest version that is offered, or have again what was put aside;
        a restarted trainer's may have the same number. The version, where the tensors have other
        values or another memory now.
        """
        version = self._adopted(self._reader) if self._reader is not None else None
        if version is not None:
            self.ready, self._moved = True, False
            return version
        if not self.ready and self._may_return:
            assert isinstance(self._reader, WeightsAgain)
            self.ready = self._may_return = self._moved = self._reader.again()
        if self.ready and self._moved and self.version >= 0:
            self._moved = False
            return self.version
        return None

    def _adopted(self, reader: WeightsIn) -> int | None:
        offer, self._offer = self._offer, None
        if offer is None:
            return taken(reader, self._span)
        before = reader.version
        with self._span(TAKE):
            version = reader.adopt()
        if version != before or (self.ready and version == offer.version):
            return version
        if version != offer.version or not isinstance(reader, WeightsAgain):
            return None
        # of the same number: it was adopted, or had been withdrawn
        return version if reader.again() else None

    def hear(self) -> None:
        """Listen to the trainer, of one that is put aside; what it offers is adopted later."""
        self._offer = self._reader.poll() if self._reader is not None else None

    def sleep(self, tensors: Iterable[Tensor]) -> None:
        """Put the weights aside, as `ModelMemory.sleep`, on all ranks; they stay unread until
        `take`.
        """
        with self._together(Sleep()):
            again = self._memory.sleep(self._reader, tensors)
        self._may_return = again and (self.ready or self._may_return)
        self.ready, self._awake = not again, False

    def wake(self) -> None:
        """Have memory for them again, on all ranks."""
        with self._together(Wake()):
            self._memory.wake()
        self._awake = self._moved = True

    def close(self) -> None:
        """Let what was put aside go."""
        self._memory.close()

    def _together(self, message: Sleep | Wake) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._ranks is None else self._ranks.beside(message)
