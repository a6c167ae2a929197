"""A simulated process: takes turns, sleeps until something arrives, and may die at every touch of
the outside.
"""

from collections.abc import Callable
from random import Random

from .clock import Clock


class Crash(BaseException):
    """SIGKILL at this point; a BaseException, so that no handler of the product takes it for an
    error.
    """


class Process:
    """One process under one name, over all its incarnations.

    body: one turn of the program, True when anything moved; set anew at each start.
    """

    def __init__(
        self, name: str, clock: Clock, random: Random, *, pace_s: float, nap_s: float = 0.4
    ) -> None:
        """pace_s: about as long as a turn takes; nap_s: an idle process looks around that often."""
        self.name = name
        self.clock = clock
        self.host = ""
        """Where this incarnation runs."""
        self.is_patient = False
        """Whether it waits for what is out of reach, and does not go on without."""
        self.attempt = -1
        """Incarnations before this one."""
        self.alive = False
        self.stopped_until = 0.0
        """Until then it hangs: it takes no turn, and nothing of it is lost."""
        self.on_death: list[Callable[[], None]] = []
        """What the world does when this incarnation dies: its connections break."""
        self.turns = 0
        self._random, self._pace_s, self._nap_s = random, pace_s, nap_s
        self._fuse: int | None = None
        self._due: float | None = None
        self._body: Callable[[], bool] = lambda: False

    def start(self, body: Callable[[], bool], attempt: int | None = None) -> None:
        """A new incarnation; None: it is one attempt more."""
        self.attempt = self.attempt + 1 if attempt is None else attempt
        self.alive, self._fuse, self._body = True, None, body
        self.stopped_until = 0.0
        self._turn_in(self._pace_s)

    def light(self, points: int) -> None:
        """Die after so many more touches of the outside."""
        self._fuse = points

    def point(self) -> None:
        """A touch of the outside: the program may die here. Raises Crash."""
        if not self.alive:
            raise Crash(self.name)
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self.die()
                raise Crash(self.name)

    def die(self) -> None:
        """End this incarnation: whatever it holds in memory is gone."""
        if self.alive:
            self.alive = False
            self._body = lambda: False
            undone, self.on_death = self.on_death, []
            for action in undone:
                action()

    def wake(self) -> None:
        """Something arrived."""
        if self.alive and self._due is not None and self._due > self.clock.now + self._pace_s:
            self._turn_in(self._pace_s * self._random.random())

    def _turn_in(self, delay_s: float) -> None:
        due = self._due = max(self.clock.now + delay_s, self.stopped_until)
        attempt = self.attempt

        def turn() -> None:
            if self.alive and self.attempt == attempt and self._due == due:
                self._turn()

        self.clock.after(due - self.clock.now, turn)

    def _turn(self) -> None:
        if self.clock.now < self.stopped_until:
            self._turn_in(self.stopped_until - self.clock.now)
            return
        self.turns += 1
        self._due = None
        try:
            moved = self._body()
        except Crash:
            return
        if self.alive and self._due is None:
            self._turn_in(self._pace_s * (0.5 + self._random.random()) if moved else self._nap_s)
