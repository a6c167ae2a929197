"""Rank 0's end of the weight plane where every rank maps the trainer's memory and takes its own slices from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dataflow.errors import DeadlineError
from dataflow.weight_ends import LeadingWeightsIn, Offered, OpensWeights
from operators.engine.parallel.lockstep import Lockstep
from operators.engine.parallel.shards import plain_pieces


class Leader:
    """A `WeightsIn` for the runtime: what it adopts, all ranks adopt; what one of them cannot enter, none adopts.

    Only rank 0 hears the trainer. It enters a version and proves it, and is inside until all others have entered the
    same one or it has told them to leave, so that none of them can find another one, whatever the trainer offers
    meanwhile. What is refused is offered again, or a newer one is.

    consumes: offers of the trainer
    produces: the same version on every rank
    waits for: the other ranks' word that they are inside, up to the group's time-out
    unblocked by: their word, their end, or the time-out
    """

    def __init__(self, lockstep: Lockstep, opens: OpensWeights) -> None:
        """Attach rank 0's slices; the other ranks have attached theirs."""
        own = {name: shard.local for name, shard in lockstep.shards.items()}
        self._lockstep = lockstep
        self._end = cast(LeadingWeightsIn, opens(own, plain_pieces(lockstep.shards)))
        self._layout: Any = None
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
        """An offer that could be adopted now, or None; never waits."""
        return self._end.poll()

    def adopt(self) -> int:
        """Take the newest offered version on all ranks, or on none; the version now in use.

        Of what rank 0 finds damaged no other rank hears. Raises WorkerDied or DeadlineError when
        a rank does not take part, or could enter nothing for as long as the group's time-out.
        """
        offer = self._end.prove()
        if offer is None:
            return self.version
        layout = self._end.layout
        news = None if layout is self._layout else layout.to_plain()
        outside = self._lockstep.enter(offer.segment, offer.version, news)
        self._layout = layout
        if outside:
            self._end.decline()
            self._bear(outside, offer.version)
            return self.version
        self._refused_at = None
        return self._lockstep.take(offer.version, self._end.adopt)

    def _bear(self, outside: list[int], version: int) -> None:
        """Put up with a refusal for a while: a segment that the trainer has given up cannot be opened any more."""
        now, limit = self._lockstep.clock(), self._lockstep.timeout_s
        self._refused_at = now if self._refused_at is None else self._refused_at
        if now - self._refused_at >= limit:
            raise DeadlineError(
                f"ranks {outside} of '{self._lockstep.node}' could enter no version of the weights for {limit:.0f} s; "
                f"found the memory of version {version} gone or sealed for them; see whether they can open the "
                f"trainer's files in shared memory"
            )
