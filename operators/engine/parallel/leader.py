"""Rank 0's end of the weight plane, of which every rank has one of its own and takes its own slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dataflow.errors import DeadlineError
from dataflow.weight_ends import LeadingAgain, LeadingWeightsIn, Offered, OpensWeights
from operators.engine.parallel.lockstep import Lockstep


class Leader:
    """A `WeightsIn` for the runtime: what it adopts, all ranks adopt; what one of them cannot hold, none adopts.

    Rank 0 holds a version, verified, until all others hold the same one or it has told them to let go of it: then
    whatever the trainer offers, and whoever dies, all that go on compute with the same one. What is refused is offered
    again, or a newer one is.

    consumes: offers of the trainer
    produces: the same version on every rank
    waits for: the other ranks' word that they hold it, up to the group's time-out
    unblocked by: their word, their end, or the time-out
    """

    def __init__(self, lockstep: Lockstep, opens: OpensWeights, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Attach rank 0's slices; the other ranks attach theirs. pieces: of each rank, as `plain_pieces` gives them."""
        own = {name: shard.local for name, shard in lockstep.shards.items()}
        self._lockstep = lockstep
        self._end = cast(LeadingWeightsIn, opens(own, pieces))
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
        a rank does not take part, or could hold nothing for as long as the group's time-out.
        """
        offer = self._end.verify()
        if offer is None:
            return self.version
        outside = self._lockstep.enter(offer)
        if outside:
            self._end.decline()
            self._bear(outside, offer.version)
            return self.version
        self._refused_at = None
        return self._lockstep.take(offer.version, self._end.adopt)

    def let_go(self) -> bool:
        """As `WeightsAgain.let_go`, for rank 0; the others do so when they are told to sleep."""
        return isinstance(self._end, LeadingAgain) and self._end.let_go()

    def again(self) -> bool:
        """Have all ranks take the version in use once more, or none; False where one of them does not find it."""
        assert isinstance(self._end, LeadingAgain), "it has let go"
        held = self._end.enter_again()
        if held is None:
            return False
        if self._lockstep.enter(held):
            self._end.decline()
            return False
        return self._lockstep.take(held.version, self._end.again)

    def _bear(self, outside: list[int], version: int) -> None:
        """Put up with a refusal for a while: the trainer may have given the version up, or a rank hear of it later."""
        now, limit = self._lockstep.clock(), self._lockstep.timeout_s
        self._refused_at = now if self._refused_at is None else self._refused_at
        if now - self._refused_at >= limit:
            raise DeadlineError(
                f"ranks {outside} of '{self._lockstep.node}' could enter no version of the weights for {limit:.0f} s; "
                f"found version {version} gone for them, or not there; see this worker's log, and whether they can "
                f"open the trainer's files where weights go by shared memory"
            )
