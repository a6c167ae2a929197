"""What goes wrong, and when: crashes at any point, processes that hang, connections that break; all from the seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .clock import Clock
from .network import SimulatedNetwork
from .process import Process


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """How much goes wrong."""

    faults: int = 5
    """In all."""
    over_s: float = 4.0
    """They come within this time; then the world is left in peace."""
    points: int = 12
    """A crash comes at one of so many touches of the outside from its moment on."""
    hang_s: float = 2.0
    """Longest time that a process hangs."""


class Nemesis:
    """Plans the faults of one seed and carries them out."""

    def __init__(
        self, clock: Clock, random: Random, network: SimulatedNetwork, victims: Sequence[Process], trouble: Trouble,
        say: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._random, self._network, self._victims, self._trouble = random, network, victims, trouble
        self._clock, self._say = clock, say
        for _ in range(random.randint(0, trouble.faults)):
            clock.after(random.random() * trouble.over_s, self._strike)

    def _strike(self) -> None:
        random = self._random
        kind = random.choices(("crash", "now", "cut", "hang"), (5, 2, 3, 2))[0]
        victim = random.choice(self._victims)
        if kind == "cut":
            if self._network.connections:
                connection = random.choice(self._network.connections)
                self._say("network", f"the connection to {connection.door.address} breaks")
                self._network.cut(connection)
        elif kind == "hang":
            victim.stopped_until = self._clock.now + random.random() * self._trouble.hang_s
            self._say(victim.name, f"hangs until {victim.stopped_until:.3f}")
        elif kind == "now":
            self._say(victim.name, "is killed between two turns")
            victim.die()
        else:
            points = random.randint(0, self._trouble.points)
            self._say(victim.name, f"will die at its touch {points} of the outside")
            victim.light(points)
