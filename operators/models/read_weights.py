"""The weights that an operator computes with, trained elsewhere or frozen: adopted, put aside,
taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dataflow.weight_ends import TAKE, LetsGo, Offered, Span, WeightsAgain, WeightsIn, taken, untold
from operators.models.shelf import Shelf, return_freed_memory
from operators.ranks.messages import Sleep, SleepDone, Wake

if TYPE_CHECKING:
    from dataflow.system.channel import Channel
    from operators.ranks.exchange import Exchange
    from operators.ranks.watch import ExchangeWatch


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
