"""Wishes while a run goes on, from the seed: for more or fewer replicas, and when all of them are
fulfilled; for other scorers, and which somebody was told to have got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from dataflow.folder.live_changes import Swap, recorded_swaps
from dataflow.scheduler import scaling
from dataflow.scheduler.requests import Reply, Scale, SwapNode, Swapped
from dataflow.scheduler.table import Table
from dataflow.worker.messages import Tried
from transport.life import Life

from .clock import Clock
from .laws import check

if TYPE_CHECKING:
    from .world import World

MOST = 3
"""Replicas of a node."""
UNBUILT = "rewards:unbuilt"
"""An operator with which no worker can start, though it fits."""


class Guests:
    """Asks for replicas of some nodes, as somebody does with `dataflow scale`."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        nodes: Mapping[str, int],
        ask: Callable[[Scale], None],
        *,
        over_s: float,
    ) -> None:
        """nodes: replicas that each begins with. ask: takes a request to the scheduler. over_s:
        wishes come in time.
        """
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
        return (
            not self._to_come
            and settled
            and all(found[node]["live"] == n for node, n in self.wished.items())
        )

    def forget(self) -> None:
        """The run is taken up again with the replicas of its plan."""
        self.wished.clear()

    def _wish(self) -> None:
        self._to_come -= 1
        node = self._random.choice(list(self._nodes))
        now = self.wished.get(node, self._nodes[node])
        count = self._random.choice([count for count in range(1, MOST + 1) if count != now])
        self._ask(Scale({node: count}))


class Swappers:
    """Ask for other scorers, as somebody does with `dataflow swap`; play the processes that try
    them.
    """

    def __init__(self, world: World, *, over_s: float) -> None:
        """over_s: they come in time."""
        self._world, self._random = world, Random(f"{world.seed} swaps")
        self._told = 0
        """The newest that somebody was told to have got."""
        for number in range(self._random.randint(1, 4)):
            reference = UNBUILT if self._random.random() < 0.15 else f"rewards:number{number}"
            request = SwapNode("reward", reference, "somebody")
            world.clock.after(self._random.random() * over_s, partial(self._ask, request))

    def try_(self, name: str, settings: Mapping[str, Any]) -> None:
        """A process tries an operator: in time or not, or it ends without a word."""
        world, outcome, takes_s = (
            self._world,
            self._random.random(),
            3.0 * self._random.random() ** 4,
        )
        exited = {"event": "exited", "name": name, "pid": 1, "status": -9}
        fits, does_not = (
            Swap(**settings["tries"]),
            Tried(life=Life(), swap=None, error="it does not fit"),
        )
        if outcome < 0.1:
            world.clock.after(takes_s, lambda: world.server.note(exited))
        elif outcome < 0.95:
            said = does_not if outcome < 0.2 else Tried(life=Life(), swap=fits, error="")
            world.clock.after(takes_s, lambda: world.server.hear(name, said))

    def hear(self, reply: Reply) -> None:
        """Somebody hears what came of a wish: what is at work is on record."""
        world = self._world
        assert world.scheduler is not None
        world.say("somebody", f"is told {reply}")
        swaps = world.scheduler.table.swaps
        if isinstance(reply, Swapped) and not swaps.worker:
            self._told, numbers = (
                swaps.made[-1].number,
                [swap.number for swap in recorded_swaps(world.ledger.facts())],
            )
            check(
                self._told in numbers,
                f"swap {self._told} is at work, but not on record, only {numbers}",
            )

    def start(self, name: str, settings: Mapping[str, Any]) -> None:
        """A worker starts: with what somebody was told that it would, whoever has died since."""
        world = self._world
        assert world.scheduler is not None
        if (
            name.startswith("reward-")
            and Life(*settings["life"]) == world.scheduler.table.workers[name].life
        ):
            runs = max((swap["number"] for swap in settings["swaps"]), default=0)
            check(
                runs >= self._told,
                f"'{name}' starts with swap {runs}, but was told to have {self._told}",
            )

    def _ask(self, request: SwapNode) -> None:
        world = self._world
        if not world.begun or world.scheduler is None or world.scheduler.table.run.over:
            return
        world.say("somebody", f"asks for {request.reference}")
        world.server.ask(request)
        world.trouble_soon("reward")
