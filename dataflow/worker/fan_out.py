"""A trainer's end of its weight plane where its readers are reached in several ways."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.weight_ends import SentVersion, WeightsOut


class FanOut:
    """Offers every version over each of its ends, which are polled and closed by their owner as
    well.

    consumes: tensors of the trainer
    produces: the same version on every end
    waits for: nothing but what an end's `publish` waits for
    unblocked by: readers
    """

    def __init__(self, ends: Sequence[Any]) -> None:
        """ends: opened, at least one."""
        self._ends: Sequence[WeightsOut] = ends
        self.socket = ends[0].socket

    @property
    def pending(self) -> int | None:
        """The version that some end still has to offer."""
        waiting = (getattr(end, "pending", None) for end in self._ends)
        return next((version for version in waiting if version is not None), None)

    def publish(self, version: int, tensors: Mapping[str, Any]) -> bool:
        """False when some end offers it later."""
        offered = [end.publish(version, tensors) for end in self._ends]
        return all(offered)

    def settle(self, timeout_s: float) -> bool:
        """The tensors are about to change: wait until no end reads them. False where an end has
        given transfers up, as the time was up; they may change all the same.
        """
        settled = [end.settle(timeout_s) for end in self._ends]
        return all(settled)

    def tell(self, note: dict[str, int | float | str]) -> None:
        """Send the same note on every end."""
        for end in self._ends:
            end.tell(note)

    @property
    def sent(self) -> Mapping[str, SentVersion]:
        """By reader, the version sent last; each reader has one end."""
        return {reader: sent for end in self._ends for reader, sent in end.sent.items()}

    @property
    def traffic(self) -> tuple[int, int]:
        """As `WeightsOut` says, over the ends that have one."""
        counts = [getattr(end, "traffic", (0, 0)) for end in self._ends]
        return sum(sent for sent, _ in counts), sum(whole for _, whole in counts)

    def poll(self) -> None:
        """Answer all readers."""
        for end in self._ends:
            end.poll()
