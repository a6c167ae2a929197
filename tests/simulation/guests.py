"""Wishes for more or fewer replicas while a run goes on, from the seed; when all of them are fulfilled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from dataflow.scheduler import scaling
from dataflow.scheduler.requests import Scale
from dataflow.scheduler.table import Table

from .clock import Clock

MOST = 3
"""Replicas of a node."""


class Guests:
    """Asks for replicas of some nodes, as somebody does with `dataflow scale`."""

    def __init__(
        self, clock: Clock, random: Random, nodes: Mapping[str, int], ask: Callable[[Scale], None],
        *, over_s: float,
    ) -> None:  # fmt: skip
        """nodes: replicas that each begins with. ask: takes a request to the scheduler. over_s: wishes come in time."""
        self._random, self._nodes, self._ask = random, nodes, ask
        self.wished: dict[str, int] = {}
        """By node, since the run was last taken up."""
        self._to_come = random.randint(1, 4)
        for _ in range(self._to_come):
            clock.after(random.random() * over_s, self._wish)

    def fulfilled(self, table: Table) -> bool:
        """Whether nobody is on the way, in or out, and all is as it was wished."""
        found = {node: scaling.replicas(table, node) for node in self._nodes}
        settled = not any(counts["joining"] or counts["leaving"] for counts in found.values())
        return not self._to_come and settled and all(found[node]["live"] == n for node, n in self.wished.items())

    def forget(self) -> None:
        """The run is taken up again with the replicas of its plan."""
        self.wished.clear()

    def _wish(self) -> None:
        self._to_come -= 1
        node = self._random.choice(list(self._nodes))
        now = self.wished.get(node, self._nodes[node])
        count = self._random.choice([count for count in range(1, MOST + 1) if count != now])
        self._ask(Scale({node: count}))
