"""The ends of the weight plane as operators see them: a trainer's, a reader's, and those of further
ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

Span: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Tells the run's trace of a stretch of work, by name."""
TAKE = "take weights"
"""As what a reader tells it."""
EXECUTORS = ("local", "cuda_ipc", "shared_memory", "nccl", "gloo")
"""What moves versions, in the order of preference."""


def untold(what: str) -> AbstractContextManager[None]:
    """Tells nobody."""
    return nullcontext()


class SentVersion(Protocol):
    """What one version has taken."""

    @property
    def version(self) -> int:
        """Its number."""

    @property
    def pair_bytes(self) -> Sequence[Sequence[int]]:
        """[ranks of the trainer][ranks of the reader]: bytes from each to each."""

    @property
    def seconds(self) -> float:
        """From the start of the transfer until every rank of the reader had its part, verified."""

    @property
    def held_s(self) -> float:
        """The longest that taking it has kept the loop of one of them, 0 until one has taken it; in
        seconds.
        """

    @property
    def whole_bytes(self) -> int:
        """What the bytes of all pairs would have been without deltas."""

    @property
    def committed_s(self) -> float:
        """As the trainer sees it: from the start until it heard that all ranks of the reader
        compute with it, else 0; in seconds.
        """

    @property
    def taken_s(self) -> float:
        """As the reader sees it: the longest time of one of its ranks from its arrival until it
        computed with it.
        """


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """Which of a trainer's versions a reader is refreshed with: every n-th, of the weights or of
    their moving average.

    >>> Refresh(every=10).newest(37)
    30
    >>> str(Refresh(every=10)), str(Refresh(every=1, decay=0.99))
    ('every 10', 'average 0.99')
    """

    every: int
    """Steps between two versions that are sent; the reader's own model is version 0."""
    decay: float = 0.0
    """Of the exponential moving average that is sent; 0: the weights themselves are."""

    def newest(self, step: int) -> int:
        """The version that a reader has to have when the trainer has made so many steps."""
        return step // self.every * self.every

    def __str__(self) -> str:
        """For people: `average 0.99, every 10`."""
        average = [f"average {self.decay:g}"] if self.decay else []
        return ", ".join(average + [f"every {self.every}"] * (self.every > 1 or not average))


class WeightsOut(Protocol):
    """The trainer's end of the weight plane (transport/weights).

    One that sends over links also has `traffic`: bytes of weights sent so far, by all ranks of the
    trainer, and what these would have been without deltas. One that quantizes has `full_share`: how
    many times as many bytes a version would have without that.
    """

    def publish(self, version: int, tensors: Mapping[str, Any]) -> bool:
        """Offer a version; False when it goes out later (by `poll`), because readers still hold
        both buffers.
        """

    def settle(self, timeout_s: float) -> bool:
        """The tensors are about to change: forget a version that is still to be copied, and wait
        until nobody reads them. False when the time was up, and who reads them was given up; they
        may change in both cases.
        """

    def tell(self, note: dict[str, int | float | str]) -> None:
        """A small note that every reader gets; the newest wins."""

    def poll(self) -> None:
        """Answer the readers; never waits."""

    @property
    def sent(self) -> Mapping[str, SentVersion]:
        """What the newest version that each reader has whole has taken, where ranks sent it to
        ranks.
        """


@dataclass(frozen=True, kw_only=True)
class WeightSite:
    """Where ends of a weight plane meet, and how versions get from one to the other."""

    executor: str
    """One of EXECUTORS."""
    is_sharded: bool
    """Each rank of the trainer sends to each rank of a reader; else one rank offers its own memory
    to all of them."""
    address: str
    folder: str
    """Of the host, private to the run."""
    name: str = ""
    """Of a reader."""
    link_bytes_per_s: float | None = None
    """Of a link so slow that changes alone are sent; None: of another."""
    zero_copy: bool = False
    """Versions are sent from the trainer's weights themselves."""
    in_host: bool = False
    """A reader receives them in main memory, and copies them to its device from there."""
    host: str = ""
    """Address of this end's own host, where ends are on several hosts."""
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Of the run, where ends are on several hosts."""
    where: str = ""
    """The file with the line's present address, where the trainer may move."""
    encoding: Mapping[str, Any] | None = None
    """As `Encoding.to_plain`, of a trainer's."""

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS or bool(self.host) != bool(self.keys):
            raise ValueError(
                f"ends of a weight plane cannot meet here: found executor {self.executor!r}, host"
                f" {self.host!r} and {len(self.keys)} keys; name one of {', '.join(EXECUTORS)}, and"
                " keys where there is a host"
            )


@dataclass(frozen=True)
class OpensWriter:
    """Opens a trainer's end of the weight plane for some tensors: that of its first rank."""

    opened: Callable[[Mapping[str, Any], Callable[[Any], object] | None], WeightsOut]
    sites: tuple[WeightSite, ...] = ()
    """Where the trainer's other ranks offer their shards (`open_writer`).

    Where there are any, tensors are DTensors; where there are none, one rank offers whole tensors.
    """

    def __call__(
        self, tensors: Mapping[str, Any], largest: Callable[[Any], object] | None = None
    ) -> WeightsOut:
        """largest: where there are sites; it replaces the numbers of a torch tensor by the largest
        that any rank has at their places, when all ranks call it. They do so in each publishing in
        which scales are of rows that are cut.
        """
        return self.opened(tensors, largest)


class Offered(Protocol):
    """A version that may be adopted."""

    @property
    def version(self) -> int:
        """Its number."""


class WeightsIn(Protocol):
    """A reader's end of the weight plane (transport/weights).

    While no trainer is there it keeps the version in use. A restarted trainer's line is the one
    that counts: what it offers is adopted, though its number may be that of the version in use,
    with other weights, or a lower one.
    """

    @property
    def version(self) -> int:
        """The version in use."""

    @property
    def note(self) -> Mapping[str, int | float | str]:
        """The trainer's last note."""

    def poll(self) -> Offered | None:
        """An offer that could be adopted now, or None; never waits."""

    def adopt(self) -> int:
        """Take the newest offered version into the attached tensors; its number, or that of the
        version kept.
        """


def taken(reader: WeightsIn, span: Span = untold) -> int | None:
    """Take what is offered, if anything: the number of what was taken, None where the version in
    use was kept.

    What is offered may be another one by the time it is taken. span: as of `Context`.
    """
    offer, before = reader.poll(), reader.version
    if offer is None:
        return None
    with span(TAKE):
        version = reader.adopt()
    return version if version == offer.version or version != before else None


class Closes(Protocol):
    """What is closed in the end."""

    def close(self) -> None:
        """Leave the weight plane."""


@runtime_checkable
class LetsGo(Protocol):
    """The end of a reader, or of one of its ranks, that may sleep: the trainer's memory keeps the
    version for it.
    """

    def let_go(self) -> bool:
        """Leave the memory of the version in use, which the tensors lose; True: the end will fill
        them all.
        """


def leave(end: Closes) -> None:
    """Close an end of the weight plane whose operator has ended: its tensors lose the version that
    they had, which `close` alone would copy for them.
    """
    if isinstance(end, LetsGo):
        end.let_go()
    end.close()


@runtime_checkable
class WeightsAgain(WeightsIn, LetsGo, Protocol):
    """The end of a reader that comes back to what it let go of: `adopt` or `again` fills the
    tensors.
    """

    def again(self) -> bool:
        """Take the version in use once more; False where it is not there any more, and another has
        to be adopted.
        """


class VerifiedOffer(Offered, Protocol):
    """A version that is held still."""

    @property
    def segment(self) -> str:
        """Tells it from every other that was offered under its number."""

    @property
    def layout(self) -> Mapping[str, Any] | None:
        """What the other ranks need to find their slices, where it is another than before."""


class LeadingWeightsIn(WeightsIn, Protocol):
    """The end of the first of several ranks, each of which takes its own part of a version."""

    def verify(self) -> VerifiedOffer | None:
        """Hold the offered version still, verified, until `adopt` or `decline`; None when it was
        withdrawn.
        """

    def decline(self) -> None:
        """Let go of it: some rank cannot take it."""


@runtime_checkable
class LeadingAgain(LeadingWeightsIn, WeightsAgain, Protocol):
    """The same for a reader of several ranks, all of which come back to the version that they let
    go of.
    """

    def enter_again(self) -> VerifiedOffer | None:
        """Hold the version that was let go of still, until `again` or `decline`; None where it is
        gone.
        """


class WeightsBeside(Protocol):
    """The end of one of the other ranks, each of which holds what the first one holds before any of
    them takes it.
    """

    def enter(self, segment: str, version: int, layout: Mapping[str, Any] | None = None) -> bool:
        """Hold the version that the first rank has verified; False when it cannot. `layout` where
        it is a new one.
        """

    def decline(self) -> None:
        """Let go of it."""

    def adopt(self) -> int:
        """Its part of the version into the attached tensors; its number."""

    def close(self) -> None:
        """Leave the weight plane."""


@dataclass(frozen=True)
class OpensWeights:
    """Opens a reader's end of the weight plane for some tensors: that of its first rank."""

    opened: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], WeightsIn]
    site: WeightSite | None = None
    """Where other ranks find the same versions (`open_reader`); None within one process.

    Where it is given, the end is a LeadingWeightsIn and may hold slices of the full tensors.
    """

    def __call__(
        self, tensors: Mapping[str, Any], slices: Sequence[Mapping[str, Any]] = ({},)
    ) -> WeightsIn:
        """`slices`: of each rank, (full shape, dimension, ranges along it) by name, of tensors that
        are parts of full ones.
        """
        return self.opened(tensors, slices)
