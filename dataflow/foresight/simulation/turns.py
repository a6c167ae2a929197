"""Turns on shared devices by the clock: one node has them, and memory moves before another one
begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dataflow.foresight.simulation.clock import Clock
from dataflow.rules import decide


@dataclass(frozen=True)
class _Member:
    wants: Callable[[], bool]
    go_on: Callable[[], None]


class SimulatedTurns:
    """Nodes that share devices; one that is not among them has its own."""

    def __init__(self, clock: Clock, moves_s: Mapping[str, float]) -> None:
        """moves_s: by node, seconds in which its memory comes and goes, once for each of its
        turns.
        """
        self._clock, self._moves_s = clock, moves_s
        self._members: dict[str, _Member] = {}
        self._asking: dict[str, None] = {}
        """In the order in which they asked."""
        self._awake = ""
        self._moving = False

    def join(self, node: str, wants: Callable[[], bool], go_on: Callable[[], None]) -> None:
        """Tell who a node is: whether it has work, and how it goes on once the devices are its
        own.
        """
        if node in self._moves_s:
            self._members[node] = _Member(wants, go_on)

    def has(self, node: str) -> bool:
        """Whether a node may compute now; where not, it asks for its turn, and goes on when that
        comes.
        """
        if node not in self._members or (self._awake == node and not self._moving):
            return True
        self._asking[node] = None
        self.look()
        return False

    def look(self) -> None:
        """Pass the devices on, where whoever has them has no work left and another one asks."""
        if self._moving:
            return
        takes = [
            node
            for node in self._asking
            if decide(awake=False, wants=self._members[node].wants(), wanted=False) == "take"
        ]
        awake = self._members.get(self._awake)
        if (
            awake is not None
            and decide(awake=True, wants=awake.wants(), wanted=bool(takes)) == "stay"
        ):
            return
        if takes:
            self._awake, self._moving = takes[0], True
            del self._asking[takes[0]]
            self._clock.after(self._moves_s[takes[0]], self._moved)

    def _moved(self) -> None:
        self._moving = False
        self._members[self._awake].go_on()
