"""One trainer's end of its weight plane where its readers are reached in several ways."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.weight_ends import WeightsOut


class FanOut:
    """Offers every version over each of its ends, which are polled and closed by their owner as well.

    consumes: tensors of the trainer
    produces: the same version on every end
    waits for: nothing but what an end's `publish` waits for
    unblocked by: readers
    """

    def __init__(self, ends: Sequence[Any]) -> None:
        """ends: opened, at least one."""
        self._ends: Sequence[WeightsOut] = ends
        self.socket = ends[0].socket

    def publish(self, version: int, tensors: Mapping[str, Any]) -> bool:
        """False when some end offers it later."""
        offered = [end.publish(version, tensors) for end in self._ends]
        return all(offered)

    def tell(self, note: dict[str, int | float | str]) -> None:
        """The same note on every end."""
        for end in self._ends:
            end.tell(note)

    @property
    def traffic(self) -> tuple[int, int]:
        """As `WeightsOut` says, over the ends that have one."""
        known = [getattr(end, "traffic", (0, 0)) for end in self._ends]
        return sum(sent for sent, _ in known), sum(whole for _, whole in known)

    def poll(self) -> None:
        """Answer all readers."""
        for end in self._ends:
            end.poll()
