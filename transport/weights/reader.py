"""The generator's end of the weight plane: follow offers, adopt the newest version between two
decode steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import zmq

from transport.weights.errors import (
    AddressTaken,
    ChecksumMismatch,
    LayoutMismatch,
    WeightError,
    waited,
)
from transport.weights.executors.shared_memory import SharedMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.rank_slices import RankSlice
from transport.weights.memory.attached import NAP_S, Attached, Mapped, Verification, follows
from transport.weights.memory.ports import Site
from transport.weights.protocol.membership import VerifiedOffer
from transport.weights.protocol.messages import Note, Offer
from transport.weights.protocol.pace import Timing
from transport.weights.protocol.segments import SegmentReader

log = logging.getLogger(__name__)


class _Transfer:
    """A version on its way: its bytes are verified; inside its segment once it is offered."""

    def __init__(self, key: str, version: int, mapped: Mapped, verification: Verification) -> None:
        self.key, self.version, self.mapped, self.verification = key, version, mapped, verification
        self.inside = False


class WeightReader:
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
        verify_bytes_per_poll: int | None = None,
        threads: int = 1,
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
        beside this loop, and it is offered when they are. Elsewhere, and for xxh3,
        `verify_bytes_per_poll` checks about that much at each poll; None checks it all in
        `adopt`.
        """
        self.name = name
        self._port = (SharedMemory(address) if isinstance(address, str) else address).reader()
        self._membership = SegmentReader(name, pace, incarnation=attempt)
        self._plain: Mapping[str, object] | None = None
        self._layout: FlatLayout | None = None
        self._told: FlatLayout | None = None
        """The layout that the other ranks of this reader know."""
        self._attached = Attached(
            self._port, f"reader '{name}'", view=adopt == "view", threads=threads
        )
        self._transfer: _Transfer | None = None
        self._slice_bytes = verify_bytes_per_poll
        self._held: Offer | None = None
        """What was adopted last."""
        self._heard: tuple[str, int, float] = "", -1, 0.0
        """Segment and version of the newest offer, and when it came."""
        self._away = False
        """Whether it has let go of that, and has not come back."""
        self._returning: Mapped | None = None
        """The segment of it that was entered once more."""
        self._keeps = on_damage == "keep"
        self._clock = clock
        self._closed = False

    @property
    def version(self) -> int:
        """The version that the attached tensors hold, -1 for none."""
        return -1 if self._attached.torn else self._membership.version

    @property
    def epoch(self) -> int:
        """The epoch under which the writer let this reader in, 0 before."""
        return self._membership.epoch

    @property
    def note(self) -> Note:
        """The newest note of the writer."""
        return dict(self._membership.note)

    @property
    def layout(self) -> FlatLayout | None:
        """The writer's layout, once it has answered."""
        return self._layout

    @property
    def silent_s(self) -> float:
        """Seconds since the writer was last heard; infinite if never."""
        return self._clock() - self._membership.heard

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
        if self._membership.version >= 0:
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
            for answer in self._membership.receive(message, now):
                self._port.send(answer)
        for answer in self._membership.tick(now):
            self._port.send(answer)
        if self._membership.replaced:
            raise AddressTaken(
                f"another reader has taken the name '{self.name}'; found this one fenced off for"
                " good; give each reader its own name"
            )
        if self._membership.denied:
            raise LayoutMismatch(
                f"reader '{self.name}' cannot take this writer's weights; {self._membership.denied}"
            )
        plain = self._membership.layout
        if plain is not None and plain is not self._plain:
            self._plain, layout = plain, FlatLayout.from_plain(plain)
            self._give_up()
            self._attached.forget()
            if layout != self._layout:
                self._layout = layout
                self._bind()
        offer = self._membership.offer
        if offer is not None and self._heard[:2] != (offer.segment, offer.version):
            self._heard = offer.segment, offer.version, now
        if not self._attached.named or self._away:
            return offer
        transfer = self._pursue(eager=self._slice_bytes is not None)
        if offer is None or offer is not self._membership.offer:
            return None
        return offer if transfer is None or transfer.verification.verified(offer) else None

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
        offer = self._membership.offer
        self._give_up()
        if offer is not None:
            self._membership.withdrawn(offer)

    def adopt(self) -> int:
        """Make the offered version the attached tensors' value; the version now held.

        It is verified by checksum first; of a damaged one `on_damage` tells, and the old one stays.
        When there is no offer, or the writer has just withdrawn it for a newer one, nothing
        changes.
        """
        self._return()
        offer, transfer = self._verify(), self._transfer
        if offer is None or transfer is None:
            return self.version
        self._transfer, self._held = None, offer
        transfer.verification.close()
        self._attached.take(transfer.mapped)
        taken_s = (
            self._clock() - self._heard[2]
            if self._heard[:2] == (offer.segment, offer.version)
            else 0.0
        )
        self._port.send(self._membership.committed(offer, taken_s))
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

    def wait(self, version: int, timeout_s: float) -> int:
        """Poll and adopt until this version, or a newer one, is held; the version held.

        PeerGone when the writer was not heard in all that time, WaitTimeout when it was but had
        none.
        """
        self._require_open()
        begun = self._clock()
        deadline = begun + timeout_s
        while True:
            if self.poll():
                self.adopt()
            if self.version >= version:
                return self.version
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                break
            if self._membership.offer and self._transfer and self._transfer.verification.running:
                time.sleep(NAP_S)
            else:
                self._port.wait(min(remaining_s, 0.05))
        is_alive = self._membership.heard >= begun
        raise waited(f"reader '{self.name}'", version, timeout_s, self.version, is_alive)

    def close(self) -> None:
        """Leave the writer; attached tensors keep the version held, in memory of their own."""
        if self._closed:
            return
        self._closed = True
        self._give_up()
        self._attached.close()
        if self._membership.epoch:
            self._port.send(self._membership.leaving())
        self._port.close()

    def _verify(self) -> Offer | None:
        self._require_open()
        transfer, offer = self._pursue(eager=True), self._membership.offer
        if transfer is None or offer is None:
            return None
        transfer.verification.finish(offer)
        damage = transfer.verification.damage
        if damage is not None:
            self._give_up()
            self._port.send(self._membership.refused(offer, damage))
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
        layout, sent_layout = self._layout, self._told
        assert layout is not None, "it has a segment"
        self._told = layout
        news = None if layout is sent_layout else layout.to_plain()
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
        if self._transfer is not None:
            self._transfer.verification.close()
            if self._transfer.inside:
                self._transfer.mapped.segment.leave()
            self._transfer = None

    def _pursue(self, eager: bool) -> _Transfer | None:
        """The transfer of the newest offer, entered, or else of what is coming; the one before is
        given up.

        Without `eager` only where that takes none of this loop's time.
        """
        offer, layout = self._membership.offer, self._layout
        goal = offer or self._membership.upcoming
        if self._transfer is not None and (
            goal is None
            or (self._transfer.key, self._transfer.version) != (goal.segment, goal.version)
        ):
            self._give_up()
        if goal is None or layout is None:
            return None
        if not self._attached.named:
            raise WeightError(
                f"reader '{self.name}' has nowhere to put version {goal.version}; found nothing"
                " attached; call attach(dict(model.named_parameters())) first"
            )
        if self._transfer is None:
            mapped = self._attached.open(goal.segment)
            if mapped is not None and not follows(mapped.segment) and not (eager and offer):
                return None
            if mapped is not None:
                verification = Verification(
                    layout, mapped.segment, mapped.follow(goal.version), self._slice_bytes
                )
                self._transfer = _Transfer(goal.segment, goal.version, mapped, verification)
        if offer is not None and (self._transfer is None or not self._enter(self._transfer, offer)):
            self._give_up()
            self._membership.withdrawn(offer)
        return self._transfer

    def _enter(self, transfer: _Transfer, offer: Offer) -> bool:
        if not transfer.inside and transfer.mapped.segment.enter(offer.version):
            transfer.inside = True
            self._port.send(self._membership.entered(offer))
        return transfer.inside

    def _require_open(self) -> None:
        if self._closed:
            raise WeightError("this reader is closed; found a call after close; make a new one")
