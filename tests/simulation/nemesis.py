"""What goes wrong, and when: crashes at any point, processes that hang, connections that break, and
the end of them all at once; all from the seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from .clock import Clock
from .hosts import Hosts
from .network import SCHEDULER, SimulatedNetwork
from .process import Process

MOST_SCHEDULERS = 4
"""That die in one run."""


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
        self,
        clock: Clock,
        random: Random,
        network: Callable[[], SimulatedNetwork],
        victims: Callable[[], Sequence[Process]],
        trouble: Trouble,
        say: Callable[[str, str], None],
    ) -> None:
        """network, victims: those of the moment; where there are no victims, nothing happens."""
        self._random, self._network, self._victims, self._trouble = (
            random,
            network,
            victims,
            trouble,
        )
        self._clock, self._say = clock, say
        for _ in range(random.randint(0, trouble.faults)):
            clock.after(random.random() * trouble.over_s, self._strike)

    def strike_soon(self, within_s: float, favourites: Callable[[], Sequence[Process]]) -> None:
        """One fault more, as something has begun that it may come in the midst of; most often to
        one of those.
        """
        of = self._victims if self._random.random() < 0.3 else favourites
        self._clock.after(
            self._random.random() * within_s, lambda: self._strike(of() if self._victims() else ())
        )

    def _strike(self, of: Sequence[Process] | None = None) -> None:
        random, victims = self._random, self._victims() if of is None else of
        if not victims:
            return
        kind = random.choices(("crash", "now", "cut", "hang"), (5, 2, 3, 2))[0]
        victim = random.choice(victims)
        if kind == "cut":
            connections = self._network().wires
            if connections:
                connection = random.choice(connections)
                self._say("network", f"the connection to {connection.listener.address} breaks")
                self._network().cut(connection)
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


class Blackouts:
    """Plans the moments at which the scheduler and all workers die at once: between two turns, or
    at a touch of one.
    """

    def __init__(
        self,
        clock: Clock,
        random: Random,
        everybody: Callable[[], Sequence[Process]],
        go_dark: Callable[[], None],
        say: Callable[[str, str], None],
        *,
        over_s: float,
        points: int = 40,
    ) -> None:
        """everybody: the processes of the moment, the scheduler's first. go_dark: ends them all."""
        self._random, self._everybody, self._go_dark, self._say, self._points = (
            random,
            everybody,
            go_dark,
            say,
            points,
        )
        for _ in range(random.choice((1, 1, 2))):
            clock.after(random.random() ** 2 * over_s, self._strike)

    def _strike(self) -> None:
        random, everybody = self._random, self._everybody()
        kind = random.choice(("now", "scheduler", "worker"))
        if kind == "now":
            self._go_dark()
        else:
            first = random.choice(everybody) if kind == "worker" else everybody[0]
            points = random.randint(0, self._points)
            self._say(
                first.name,
                f"will die at its touch {points} of the outside, and all the others with it",
            )
            first.on_death.append(self._go_dark)
            first.light(points)


class SchedulerDeaths:
    """Plans the moments at which the scheduler dies alone, whichever it is then."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        chair: Callable[[], Process],
        say: Callable[[str, str], None],
        *,
        over_s: float,
        points: int = 30,
    ) -> None:
        """chair: where the scheduler of the moment sits."""
        self._clock, self._random, self._chair, self._say, self._points = (
            clock,
            random,
            chair,
            say,
            points,
        )
        self._left = MOST_SCHEDULERS
        for _ in range(random.choice((1, 1, 2, 3))):
            self.strike_soon(2.0 + over_s)

    def strike_soon(self, within_s: float) -> None:
        """It dies in this time, unless enough of them have."""
        self._clock.after(self._random.random() * within_s, self._strike)

    def _strike(self) -> None:
        chair = self._chair()
        if not self._left or not chair.alive:
            return
        self._left -= 1
        if self._random.random() < 0.4:
            self._say(chair.name, "is killed between two turns")
            chair.die()
        else:
            points = self._random.randint(0, self._points)
            self._say(chair.name, f"will die at its touch {points} of the outside")
            chair.light(points)


class HostTrouble:
    """Plans what becomes of hosts: they die, and come back; links are cut, for less or more than
    the limits, in one direction or both; some are slow.
    """

    def __init__(
        self,
        clock: Clock,
        random: Random,
        network: Callable[[], SimulatedNetwork],
        agents: Callable[[], Hosts | None],
        everybody: Callable[[], Sequence[Process]],
        say: Callable[[str, str], None],
        *,
        over_s: float,
    ) -> None:
        """agents: those of the moment; None: nothing happens yet."""
        self._clock, self._random, self._network, self._agents = clock, random, network, agents
        self._everybody, self._say = everybody, say
        self._gone = False
        """Whether a host is cut off for good."""
        self._left = 1
        """Processes to cut off in the midst of something."""
        for _ in range(random.choice((1, 1, 2, 3))):
            clock.after(random.random() * 2 * over_s, self._strike)

    def cut_off(self, process: Process) -> None:
        """The host of a process is cut off for longer than the limits, now; the process goes on
        afterwards.
        """
        agents, for_s = self._agents(), 4.0 + 4.0 * self._random.random()
        if agents is not None and self._left:
            self._left -= 1
            self._say("host " + process.host, f"is cut off for {for_s:.3f} s")
            others = [name for name in (SCHEDULER, *agents.names) if name != process.host]
            self._cut(process.host, others, for_s, hears=True, speaks=True)
            process.is_patient = True

    def mend_soon(self, host: str) -> None:
        """What was cut of a host is mended, in the midst of the restart of a worker that it had."""
        self._clock.after(self._random.random(), partial(self._mend, host))

    def _mend(self, host: str) -> None:
        self._say("host " + host, "is not cut off any more")
        self._network().machines.mend(host)

    def _strike(self) -> None:
        random, agents = self._random, self._agents()
        if agents is None:
            return
        host = random.choice(agents.names)
        kind = random.choices(("die", "cut", "deaf", "mute", "link", "slow"), (3, 4, 2, 2, 1, 1))[0]
        for_s = random.choice((1.0, 3.0, 6.0, 12.0)) * random.random()
        if kind == "cut" and not self._gone and random.random() < 0.3:
            for_s, self._gone = 1000.0, True
        others = [name for name in (SCHEDULER, *agents.names) if name != host]
        if kind == "die":
            self._say("host " + host, f"dies; another agent comes in {for_s:.3f} s")
            agents.die(host, for_s, is_told=random.random() < 0.5)
        elif kind == "slow":
            self._say("host " + host, "is slow from now on")
            self._network().machines.slow(host, random.choice((3.0, 30.0)))
        else:
            to = [random.choice(others)] if kind == "link" else others
            self._say("host " + host, f"is {kind} for {for_s:.3f} s from {to}")
            self._cut(host, to, for_s, hears=kind != "mute", speaks=kind != "deaf")

    def _cut(
        self, host: str, others: Sequence[str], for_s: float, *, hears: bool, speaks: bool
    ) -> None:
        """hears, speaks: whether what it hears, or says, is cut."""
        network, until = self._network(), self._clock.now + for_s
        for process in self._everybody():
            process.is_patient = self._random.random() < 0.5
        for other in others:
            if hears:
                network.machines.cut(other, host, until)
            if speaks:
                network.machines.cut(host, other, until)
        for wire in network.wires:
            if host in wire.hosts and set(wire.hosts) & set(others) and self._random.random() < 0.5:
                self._clock.after(self._random.random() * for_s, partial(network.cut, wire))
