"""Versions of the weights on all ranks of a reader: rank 0 leads, and what one of them cannot hold,
none takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from dataflow.errors import DeadlineError
from dataflow.limits import Limits
from dataflow.system.messages import Channel, Message, Plain
from dataflow.weight_ends import (
    LeadingAgain,
    LeadingWeightsIn,
    Offered,
    OpensWeights,
    VerifiedOffer,
    WeightsBeside,
    WeightSite,
    leave,
)
from dataflow.worker.weight_ports import open_reader
from operators.ranks.team import Exchange, Team, expected

T = TypeVar("T")

Slices = Mapping[str, Plain]
"""Of each tensor of a rank, which part of a full one it is: (full shape, dimension, ranges along
it), by name."""

# From rank 0


class Meet(Message):
    """Open your end of the weight plane: these are the parts that each rank holds."""

    slices: tuple[Slices, ...]


class Enter(Message):
    """Hold this version of the weights, a `VerifiedOffer`."""

    segment: str
    version: int
    layout: Mapping[str, Plain] | None


class ReleaseVersion(Message):
    """Let go of the version that you hold."""


class Take(Message):
    """Compute with the version that you hold."""


# From the others


class Holds(Message):
    """Which part of each tensor I hold."""

    slices: Slices


class Entry(Message):
    """Whether I hold the version."""

    entered: bool


KINDS = (Meet, Enter, ReleaseVersion, Take, Holds, Entry)
"""Messages that belong to the protocol of every operator whose ranks read weights."""


def opens_for_ranks(reader: object) -> OpensWeights | None:
    """This opener of a reader, if it names a site at which other ranks find the same versions."""
    return reader if isinstance(reader, OpensWeights) and reader.site is not None else None


def met(team: Team, own: Slices) -> tuple[Slices, ...]:
    """Rank 0: which parts each rank holds, rank by rank; all others open their ends of the weight
    plane (`beside`).
    """
    slices = (own, *(team.answer(rank, Holds).slices for rank in range(1, team.size)))
    team.tell(Meet(slices))
    return slices


@contextlib.contextmanager
def beside(
    channel: Channel[Any],
    rank: int,
    site: WeightSite | None,
    device: str,
    tensors: Mapping[str, Any],
    own: Slices,
    *,
    limits: Limits,
    attempt: int,
) -> Iterator[WeightsBeside | None]:
    """Another rank's end of the weight plane at this `site`, opened when rank 0 has met all; None
    without one.

    tensors: its own slices of full ones. attempt: the scheduler's, at rank 0.
    """
    if site is None:
        yield None
        return
    channel.send(Holds(own))
    slices = expected(Meet, channel, rank, os.getppid(), limits.exchange_s).slices
    end: WeightsBeside = open_reader(
        site, rank, device, tensors, slices, limits=limits, attempt=attempt
    )
    try:
        yield end
    finally:
        leave(end)


def followed(message: object, channel: Channel[Any], end: WeightsBeside | None) -> bool:
    """On another rank: act on a message of the `Leader`; False for another message."""
    match message:
        case _ if end is None:
            return False
        case Enter():
            channel.send(Entry(end.enter(message.segment, message.version, message.layout)))
        case ReleaseVersion():
            end.decline()
        case Take():
            end.adopt()
        case _:
            return False
    return True


class Leader:
    """A `WeightsIn` for the runtime on rank 0, which has an end of the weight plane of its own, as
    every rank has: what it adopts, all ranks adopt, each its own slices; what one of them cannot
    hold, none adopts.

    Rank 0 holds a version, verified, until all others hold the same one or it has told them to let
    go of it: then whatever the trainer offers, and whoever dies, all that go on compute with the
    same one. What is refused is offered again, or a newer one is.

    consumes: offers of the trainer
    produces: the same version on every rank
    waits for: the other ranks' word that they hold it, up to the group's time-out
    unblocked by: their word, their end, or the time-out
    """

    def __init__(
        self,
        exchange: Exchange,
        clock: Callable[[], float],
        opens: OpensWeights,
        slices: Sequence[Slices],
        tensors: Mapping[str, Any],
    ) -> None:
        """Attach rank 0's tensors; the other ranks attach theirs. clock: the worker's. slices: of
        each rank, as `met` gives them.
        """
        self._exchange, self._clock = exchange, clock
        self._end = cast(LeadingWeightsIn, opens(tensors, slices))
        self._refused_at: float | None = None

    @property
    def version(self) -> int:
        """The version in use, on every rank."""
        return self._end.version

    @property
    def note(self) -> Mapping[str, int | float | str]:
        """The trainer's last note."""
        return self._end.note

    @property
    def socket(self) -> Any:
        """What may become readable; None in one process."""
        return getattr(self._end, "socket", None)

    def poll(self) -> Offered | None:
        """An offer that could be adopted now, or None; never waits. WorkerDied when a rank has
        ended, without which none would come.
        """
        if self._exchange.team.fallen():
            with self._exchange.together("waiting for a version"):
                raise RuntimeError("another rank has ended")
        return self._end.poll()

    def adopt(self) -> int:
        """Take the newest offered version on all ranks, or on none; the version now in use.

        Of what rank 0 finds damaged no other rank hears. Raises WorkerDied or DeadlineError when
        a rank does not take part, or could hold nothing for as long as the group's time-out.
        """
        offer = self._end.verify()
        if offer is None:
            return self.version
        outside = self._enter(offer)
        if outside:
            self._end.decline()
            self._bear(outside, offer.version)
            return self.version
        self._refused_at = None
        return self._take(offer.version, self._end.adopt)

    def let_go(self) -> bool:
        """As `WeightsAgain.let_go`, for rank 0; the others do the same when they go to sleep."""
        return isinstance(self._end, LeadingAgain) and self._end.let_go()

    def again(self) -> bool:
        """Have all ranks take the version in use once more, or none; False where one of them does
        not find it.
        """
        assert isinstance(self._end, LeadingAgain), "it has let go"
        offer = self._end.enter_again()
        if offer is None:
            return False
        if self._enter(offer):
            self._end.decline()
            return False
        return self._take(offer.version, self._end.again)

    def _take(self, version: int, own: Callable[[], T]) -> T:
        """Have all others take the version that they hold, while rank 0 does so by `own`; what that
        returns.
        """
        with self._exchange.together(f"taking version {version}"):
            self._exchange.tell(Take())
            return own()

    def _enter(self, offer: VerifiedOffer) -> list[int]:
        """Have all others hold a version that rank 0 holds; the ranks that cannot: then none of
        them does.
        """
        with self._exchange.together(f"entering version {offer.version}"):
            self._exchange.tell(Enter(offer.segment, offer.version, offer.layout))
            entries = enumerate(self._exchange.answers(Entry), start=1)
            outside = [rank for rank, entry in entries if not entry.entered]
            if outside:
                self._exchange.tell(ReleaseVersion())
            return outside

    def _bear(self, outside: list[int], version: int) -> None:
        """Tolerate a refusal for a while: the trainer may have withdrawn the version, or a rank may
        learn of it later.
        """
        now, team = self._clock(), self._exchange.team
        limit = team.limits.exchange_s
        self._refused_at = now if self._refused_at is None else self._refused_at
        if now - self._refused_at >= limit:
            raise DeadlineError(
                f"ranks {outside} of '{team.node}' could enter no version of the weights for"
                f" {limit:.0f} s; found version {version} gone for them, or not there; see this"
                " worker's log, and whether they can open the trainer's files where weights go by"
                " shared memory"
            )
