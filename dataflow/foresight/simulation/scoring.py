"""Operators between generator and trainer by the clock: groups one after the other, each through
all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from dataflow.foresight.simulation.clock import Clock
from dataflow.foresight.simulation.groups import SimulatedGroup
from dataflow.foresight.simulation.scenario import ScorerCosts
from dataflow.foresight.simulation.turns import SimulatedTurns
from dataflow.foresight.simulation.usage import Usage


class SimulatedScorer:
    """One that computes does a group at a time; one that waits has `at_once` calls open."""

    def __init__(
        self,
        costs: ScorerCosts,
        rows: int,
        clock: Clock,
        usage: Usage,
        out: Callable[[Sequence[SimulatedGroup]], None],
        turns: SimulatedTurns,
        node: str,
        *,
        shared: bool,
    ) -> None:
        """rows: of a group. turns: on devices that `node` shares. shared: whether it computes on
        the processors that others share."""
        self._turns, self._node = turns, node
        turns.join(node, lambda: bool(self._queue), self._begin)
        self._costs, self._rows, self._clock, self._usage, self._out = (
            costs,
            rows,
            clock,
            usage,
            out,
        )
        self._shared = shared
        self._queue: deque[SimulatedGroup] = deque()
        self._is_busy = False
        self._free_at = 0.0
        """When the calls that are open leave room for another group."""
        self._open = 0

    def push(self, groups: Sequence[SimulatedGroup]) -> None:
        """Take groups in."""
        if not self._costs.waits:
            self._queue.extend(groups)
            if not self._is_busy:
                self._begin()
            return
        for group in groups:
            self._ask(group)

    def _ask(self, group: SimulatedGroup) -> None:
        costs, now = self._costs, self._clock.now
        self._free_at = max(self._free_at, now) + self._rows * costs.row_s / costs.at_once
        if not self._open:
            self._usage.begins()
        self._open += 1
        self._clock.at(max(self._free_at, now + costs.row_s), lambda: self._answered(group))

    def _answered(self, group: SimulatedGroup) -> None:
        self._open -= 1
        if not self._open:
            self._usage.ends()
        self._out([group])

    def _begin(self) -> None:
        if not self._turns.has(self._node):
            return
        self._is_busy = True
        self._usage.begins()
        seconds = self._rows * self._costs.row_s / self._costs.at_once
        self._clock.after(seconds, self._end, shared=self._shared)

    def _end(self) -> None:
        self._is_busy = False
        self._usage.ends()
        group = self._queue.popleft()
        if self._queue:
            self._begin()
        self._out([group])
        if not self._queue:
            self._turns.look()
