"""A generator's ends of the weight plane within a machine: its first rank follows offers, and takes
the newest version between two decode steps; the others take their slices from the same memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import zmq

from transport.weights.errors import ChecksumMismatch, WeightError
from transport.weights.executors import Site
from transport.weights.executors.shared_memory import SharedMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.rank_slices import RankSlice
from transport.weights.memory import NAP_S, Arrival, Attached, Mapped
from transport.weights.protocol.membership import ReaderEnd, Timing, VerifiedOffer
from transport.weights.protocol.messages import Offer
from transport.weights.protocol.segments import SegmentReader

log = logging.getLogger(__name__)


class WeightReader(ReaderEnd[SegmentReader]):
    """Takes versions of one model's tensors from one writer. For a single-threaded loop.

    Consumes: offers. Produces: new values in the attached tensors.
    Waits for: nothing, except in `wait`. Unblocked by: the writer's next version.
    """

    def __init__(
        self,
        address: str | Site,
        name: str,
        *,
        adopt: Literal["view", "copy"] = "view",
        on_damage: Literal["raise", "keep"] = "raise",
        pace: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        attempt: int = 0,
    ) -> None:
        """`name` is unique among the writer's live readers; a newcomer of the same name replaces
        the older. `attempt`: the scheduler's, at this process; a reader of an earlier one never
        takes the name back.

        A reader whose writer has died keeps its version, finds the next writer at the same address
        by itself, and takes what that one offers, whatever its number: the restarted trainer's line
        is the one that counts.

        `adopt`: "view" turns parameters into views of the shared buffer, so that an update is a
        pointer flip; "copy" copies into the parameters' own memory, for callers that keep pointers
        to it (captured graphs, fused tensors). Tensors that are no Parameter, or have another dtype
        or device, are always copied. `on_damage`: what `adopt` does with a damaged version: "raise"
        ChecksumMismatch, or "keep" the version held and say so in the log. Either way the writer
        hears that it was refused, and newer versions are taken. Where a version can be read while
        it is written (shared memory, with a C compiler at hand) its sums are checked on a thread
        beside this loop, and it is offered when they are. Elsewhere, and for xxh3, `adopt` checks.
        """
        super().__init__(f"reader '{name}'", clock)
        self.name = name
        self._port = (SharedMemory(address) if isinstance(address, str) else address).reader()
        self._member = SegmentReader(name, pace, incarnation=attempt)
        self._plain: Mapping[str, object] | None = None
        self._layout: FlatLayout | None = None
        self._told: FlatLayout | None = None
        """The layout that the other ranks of this reader know."""
        self._attached = Attached(self._port, self._whose, view=adopt == "view")
        self._arrival: Arrival | None = None
        self._held: Offer | None = None
        """What was adopted last."""
        self._heard: tuple[str, int, float] = "", -1, 0.0
        """Segment and version of the newest offer, and when it came."""
        self._away = False
        """Whether it has let go of that, and has not come back."""
        self._returning: Mapped | None = None
        """The segment of it that was entered once more."""
        self._keeps = on_damage == "keep"

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """What a loop may poll for reading; None in one process."""
        return self._port.socket

    def attach(
        self, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, RankSlice] | None = None
    ) -> None:
        """Name the tensors that versions go into, `dict(model.named_parameters())`; before the
        first adopt.

        `slices` tells which part of a full tensor one holds, where it is not all of it: one rank's
        slices. Parameters that hold a single range of rows become views of it; other slices are
        copied. LayoutMismatch, here or at the poll that brings the writer's layout, when names or
        full shapes differ.
        """
        self._require_open()
        if self._member.version >= 0:
            raise WeightError(
                "tensors must be attached before the first version is adopted; found version"
                f" {self.version} adopted; attach right after making the reader"
            )
        self._attached.name(tensors, slices)
        self._bind()

    def poll(self) -> Offer | None:
        """Hear the writer; the newest version that may be adopted, if there is one. Never waits.

        AddressTaken when another reader has taken this one's name; LayoutMismatch when the writer
        has denied it.
        """
        self._require_open()
        now = self._clock()
        for message in self._port.receive():
            for answer in self._member.receive(message, now):
                self._port.send(answer)
        for answer in self._member.tick(now):
            self._port.send(answer)
        self._check()
        plain = self._member.layout
        if plain is not None and plain is not self._plain:
            self._plain, layout = plain, FlatLayout.from_plain(plain)
            self._give_up()
            self._attached.forget()
            if layout != self._layout:
                self._layout = layout
                self._bind()
        offer = self._member.offer
        if offer is not None and self._heard[:2] != (offer.segment, offer.version):
            self._heard = offer.segment, offer.version, now
        if not self._attached.named or self._away:
            return offer
        arrival = self._pursue(eager=False)
        if offer is None or offer is not self._member.offer:
            return None
        return offer if arrival is None or arrival.is_summed() else None

    def verify(self) -> VerifiedOffer | None:
        """Step into the offered version's segment and verify it, the first half of `adopt`; None as
        there.

        It stays entered until `adopt` or `decline`, with no poll in between: whoever enters its
        segment meanwhile, the other ranks of this reader (`RankReader`), finds the bytes that were
        verified.
        """
        self._return()
        offer = self._verify()
        return None if offer is None else self._shown(offer)

    def decline(self) -> None:
        """Step out of a verified version; it is offered again, or a newer one is. Or of what
        `enter_again` entered.
        """
        if self._returning is not None:
            self._returning.segment.leave()
            self._returning = None
            return
        offer = self._member.offer
        self._give_up()
        if offer is not None:
            self._member.withdrawn(offer)

    def adopt(self) -> int:
        """Make the offered version the attached tensors' value; the version now held.

        It is verified by checksum first; of a damaged one `on_damage` tells, and the old one stays.
        When there is no offer, or the writer has just withdrawn it for a newer one, nothing
        changes.
        """
        self._return()
        offer, arrival = self._verify(), self._arrival
        if offer is None or arrival is None:
            return self.version
        self._arrival, self._held = None, offer
        arrival.stop()
        self._attached.take(arrival.mapped)
        is_known = self._heard[:2] == (offer.segment, offer.version)
        taken_s = self._clock() - self._heard[2] if is_known else 0.0
        self._port.send(self._member.committed(offer, taken_s))
        return self.version

    def let_go(self) -> bool:
        """Leave the segment in use: the attached tensors have no value until `adopt` or `again`,
        which fill them all.

        Until then no segment is looked into: an offered version is verified when it is adopted.
        False before the first version: then the tensors have their own values, which nobody will
        fill in again.
        """
        self._require_open()
        self._give_up()
        self._attached.let_go()
        self._away = True
        return self._held is not None

    def again(self) -> bool:
        """After `let_go`, have the version in use in the attached tensors again; False when its
        segment holds another by now, or is gone: then a newer version, or another writer's, is to
        be adopted.
        """
        if self._returning is None and self.enter_again() is None:
            return False
        mapped, self._returning = self._returning, None
        assert mapped is not None, "it was entered"
        self._attached.take(mapped)
        return True

    def enter_again(self) -> VerifiedOffer | None:
        """The first half of `again`: step into the segment of the version in use, which stays
        entered until `again` or `decline`, with no poll in between; None as there.
        """
        self._require_open()
        self._return()
        mapped = self._attached.open(self._held.segment) if self._held is not None else None
        if mapped is None or self._held is None or not mapped.segment.enter(self._held.version):
            return None
        self._returning = mapped
        return self._shown(self._held)

    def close(self) -> None:
        """Leave the writer; attached tensors keep the version held, in memory of their own."""
        if self._closed:
            return
        self._closed = True
        self._give_up()
        self._attached.close()
        if self._member.epoch:
            self._port.send(self._member.leaving())
        self._port.close()

    @property
    def _is_torn(self) -> bool:
        return self._attached.torn

    def _rest(self, timeout_s: float) -> None:
        if self._member.offer and self._arrival and self._arrival.running:
            time.sleep(NAP_S)
        else:
            self._port.wait(timeout_s)

    def _verify(self) -> Offer | None:
        self._require_open()
        arrival, offer = self._pursue(eager=True), self._member.offer
        if arrival is None or offer is None:
            return None
        damage = arrival.damage(offer)
        if damage is not None:
            self._give_up()
            self._port.send(self._member.refused(offer, damage))
            problem = (
                f"version {offer.version} is damaged and reader '{self.name}' keeps version"
                f" {self.version}; found other bytes in {damage} than were published; wait for the"
                " next version"
            )
            if not self._keeps:
                raise ChecksumMismatch(problem)
            log.warning(problem)
            return None
        return offer

    def _shown(self, entered: Offer) -> VerifiedOffer:
        """The message to this reader's other ranks about a version that this rank is inside of."""
        assert self._layout is not None, "it has a segment"
        news = None if self._layout is self._told else self._layout.to_plain()
        self._told = self._layout
        return VerifiedOffer(version=entered.version, segment=entered.segment, layout=news)

    def _bind(self) -> None:
        """Find the tensors in the layout, once they have memory."""
        self._give_up()
        if not self._away:
            self._attached.bind(self._layout)

    def _return(self) -> None:
        if self._away:
            self._away = False
            self._bind()

    def _give_up(self) -> None:
        if self._arrival is not None:
            self._arrival.close()
            self._arrival = None

    def _pursue(self, eager: bool) -> Arrival | None:
        """The arrival of the newest offer, entered, or else of what is coming; the one before is
        given up.

        Without `eager` only where that takes none of this loop's time.
        """
        offer = self._member.offer
        goal = offer or self._member.upcoming
        if self._arrival is not None and (goal is None or not self._arrival.is_of(goal)):
            self._give_up()
        if goal is None or self._layout is None:
            return None
        if not self._attached.named:
            raise WeightError(
                f"{self._whose} has nowhere to put version {goal.version}; found nothing"
                " attached; call attach(dict(model.named_parameters())) first"
            )
        if self._arrival is None:
            mapped = self._attached.open(goal.segment)
            if mapped is not None and not mapped.is_followed and not (eager and offer):
                return None
            if mapped is not None:
                self._arrival = Arrival(goal.segment, goal.version, mapped)
        if offer is not None and (self._arrival is None or not self._enter(self._arrival, offer)):
            self._give_up()
            self._member.withdrawn(offer)
        return self._arrival

    def _enter(self, arrival: Arrival, offer: Offer) -> bool:
        if not arrival.inside and arrival.mapped.segment.enter(offer.version):
            arrival.inside = True
            self._port.send(self._member.entered(offer))
        return arrival.inside


class RankReader:
    """Has no seat at the writer: its reader has one for all ranks, with one epoch, and tells it
    what to enter.

    A version is verified once, by the reader, in the memory that they all map; its gate, which the
    reader holds from then on and each of these from `enter` on, keeps it as it is. So ranks that
    enter what their reader has entered, and take it when all of them are inside, never hold
    different versions. For a single-threaded loop.

    Consumes: segments that the reader names. Produces: new values in the attached tensors.
    Waits for: nothing. Unblocked by: -
    """

    def __init__(
        self,
        address: str | Site,
        name: str,
        *,
        adopt: Literal["view", "copy"] = "view",
    ) -> None:
        """`address`, `adopt`: as for the `WeightReader`; `name` is for errors."""
        self.name, self.version = name, -1
        self._port = (SharedMemory(address) if isinstance(address, str) else address).reader()
        self._attached = Attached(self._port, f"rank '{name}'", view=adopt == "view")
        self._layout: FlatLayout | None = None
        self._entered: tuple[Mapped, int] | None = None

    def attach(
        self, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, RankSlice] | None = None
    ) -> None:
        """As `WeightReader.attach`; before the first `enter`."""
        self._attached.name(tensors, slices)

    def enter(self, segment: str, version: int, layout: Mapping[str, Any] | None = None) -> bool:
        """Step into the segment that holds this version; False when it is gone, or holds another by
        now.

        `layout`: the reader's, by `to_plain`, where it is another than before. LayoutMismatch when
        the attached tensors are not of it; WeightError before there is one.
        """
        self.decline()
        if layout is not None:
            self._layout = FlatLayout.from_plain(layout)
            self._attached.bind(self._layout)
        if self._layout is None or not self._attached.named:
            raise WeightError(
                f"rank '{self.name}' cannot enter version {version}; found"
                f" {'no layout' if self._attached.named else 'nothing attached'}; attach tensors,"
                " and pass the reader's layout with its first version"
            )
        mapped = self._attached.open(segment)
        if mapped is None or not mapped.segment.enter(version):
            return False
        self._entered = (mapped, version)
        return True

    def decline(self) -> None:
        """Step out without taking the version that was entered, if any."""
        if self._entered is not None:
            self._entered[0].segment.leave()
            self._entered = None

    def adopt(self) -> int:
        """Make the version that was entered the attached tensors' value; its number. WeightError
        outside of one.
        """
        if self._entered is None:
            raise WeightError(
                f"rank '{self.name}' cannot take a version; found none entered; enter what the"
                " reader has entered first"
            )
        (mapped, version), self._entered, self.version = self._entered, None, -1
        self._attached.take(mapped)
        self.version = version
        return version

    def let_go(self) -> bool:
        """Leave the segment in use: the attached tensors have no value until `adopt`, which fills
        all. False before the first version, as of `WeightReader`.

        The version may be entered again (`WeightReader.enter_again`), as any other.
        """
        self.decline()
        self._attached.let_go()
        return self.version >= 0

    def close(self) -> None:
        """Leave; the tensors keep the version held, in memory of their own."""
        self.decline()
        self._attached.close()
        self._port.close()
