"""A generator's replica by the clock: a batch of rollouts that decode steps carry on; as some end, others begin."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dataflow.foresight.simulation.clock import Clock, Event
from dataflow.foresight.simulation.groups import SimulatedGroup
from dataflow.foresight.simulation.scenario import GeneratorCosts, Scenario
from dataflow.foresight.simulation.usage import Usage
from dataflow.rules.admission import Admission
from dataflow.rules.leave import LINGER_STEPS, enough, leaves
from dataflow.staleness import Bound

SOURCE = "prompts"


class _Turns(NamedTuple):
    """What a rollout has yet to say."""

    strides: tuple[int, ...]
    """Of each turn."""
    context: float
    """Tokens that stand before the next."""

    @staticmethod
    def of(strides: int, turns: int, context: float) -> _Turns:
        """So many strides in turns of like length, of one at least."""
        if turns == 1:
            return _Turns((max(strides, 1),), context)
        share, more = divmod(max(strides, turns), turns)
        return _Turns(tuple(share + (at < more) for at in range(turns)), context)


class SimulatedReplica:
    """Time is counted in strides of `scenario.stride` decode steps: one of n strides that starts at s ends at s + n."""

    def __init__(
        self, scenario: Scenario, costs: GeneratorCosts, clock: Clock, bound: Bound, lengths: Iterator[int],
        usage: Usage, out: Callable[[list[SimulatedGroup]], None], dropped: Callable[[], int],
    ) -> None:  # fmt: skip
        """lengths: of completions in strides, without end. out: takes groups that are complete; dropped: how many
        were given up."""
        self._scenario, self._clock, self._lengths, self._usage = scenario, clock, lengths, usage
        self._costs = costs
        self._out, self._dropped = out, dropped
        self.admission: Admission[SimulatedGroup] = Admission({SOURCE: bound}, scenario.in_flight)
        self.version = 0
        self._offered = 0
        self._at = 0
        """Strides that it has made."""
        self._ends: list[tuple[int, int, SimulatedGroup, float, _Turns]] = []
        """Of each live rollout: the stride at which its turn ends, its number, its group, the tokens that it would have
        had at stride 0, the turns that are to come."""
        self._back: list[tuple[SimulatedGroup, _Turns]] = []
        """Rollouts whose world has answered, and that have no slot yet."""
        self._away: Counter[SimulatedGroup] = Counter()
        """Groups of rollouts that wait for the world."""
        self._lives = 0
        """How often it has lost everything."""
        self._begun = 0
        self._looks_back = 0.0
        """Tokens that all live rollouts would have had at stride 0: their contexts are that long, and a token longer
        with each decode step since."""
        self._complete: list[SimulatedGroup] = []
        self._since = 0
        """Stride at whose end the first of them was complete."""
        self._linger = max(1, LINGER_STEPS // scenario.stride)
        self._step_s = self._costs.step_s.tolist()
        self._slots = self._costs.slots
        self._enough = enough(self._slots, scenario.group_size)
        self._owed_s = 0.0
        """Of work that the next decode step is to wait for."""
        self._event: Event | None = None
        self._target = 0
        self._alive = True

    @property
    def live(self) -> int:
        """Rollouts that are decoded."""
        return len(self._ends)

    def push(self, group: SimulatedGroup) -> None:
        """A prompt came, or one that is to begin anew."""
        self.admission.add(SOURCE, group)
        self.poke()

    def offer(self, version: int) -> None:
        """A version can be had from now on; it is taken in before the next decode step."""
        self._offered = max(self._offered, version)
        self.poke()

    def poke(self) -> None:
        """Something has changed: go on with what is there now."""
        if not self._alive:
            return
        if self._event is not None:
            if not self._may_change():
                return
            steps = self._target - self._at
            passed = self._clock.cancel(self._event) * steps
            made = min(steps, math.ceil(passed - 1e-6))  # the stride under way is made
            self._owed_s = (made - passed) * self._event.amount / steps if steps else 0.0
            self._at += made
            self._event = None
            self._usage.ends()
        self._go_on()

    def fail(self) -> list[SimulatedGroup]:
        """Lose all rollouts; their groups."""
        if self._event is not None:
            self._clock.cancel(self._event)
            self._event = None
            self._usage.ends()
        lost = {id(group): group for _, _, group, *_ in self._ends} | {id(group): group for group in self._complete}
        lost |= {id(group): group for group in (*self._away, *(group for group, _ in self._back))}
        self._ends, self._complete, self._looks_back, self._alive = [], [], 0.0, False
        self._back, self._away, self._lives = [], Counter(), self._lives + 1
        queue = self.admission.sources.get(SOURCE, ())
        part = [group for group in queue if group.from_versions]
        for group in part:
            self.admission.sources[SOURCE].remove(group)
        return [*lost.values(), *(group for group in part if id(group) not in lost)]

    def restart(self) -> None:
        """Be there again, with the newest weights."""
        self._alive = True
        self.version = self._offered
        self._go_on()

    def _may_change(self) -> bool:
        """Whether what came cannot wait for the end of the stretch of decode steps under way."""
        if self._offered > self.version:
            return True
        is_due = bool(self._back) or self.admission.has_due(self.version, self._dropped())
        return len(self._ends) < self._slots and is_due

    def _go_on(self) -> None:
        costs = self._costs
        if self._offered > self.version:
            self.version = self._offered
            self._owed_s += costs.adopt_s
        self._admit()
        live = self.live
        if not live:
            if self._complete:
                self._send()
            return
        target = self._ends[0][0]
        if self._complete:
            target = min(target, max(self._since + self._linger, self._at))
        steps = (target - self._at) * self._scenario.stride
        context = self._looks_back + live * (self._at * self._scenario.stride + steps / 2)
        seconds = self._owed_s + steps * (self._step_s[live] + costs.context_s * context)
        self._target = target
        self._usage.begins()
        self._event = self._clock.after(seconds, self._reached, shared=costs.shared)

    def _admit(self) -> None:
        scenario = self._scenario
        while self._back and len(self._ends) < self._slots:
            self._begin(*self._back.pop(0))
        free = self._slots - len(self._ends)
        if not free or not len(self.admission):
            return
        for _, group, count in self.admission.start(
            free=free, slots=self._slots, idle=not self._ends, version=self.version, dropped=self._dropped(),
            fit=lambda group, wanted: wanted,
        ):  # fmt: skip
            if not group.from_versions:
                self._owed_s += self._costs.prompt_s
            group.unstarted -= count
            group.from_versions.append((self.version, count))
            for _ in range(count):
                turns = _Turns.of(next(self._lengths), scenario.turns, scenario.prompt_tokens)
                group.tokens += sum(turns.strides) * scenario.stride
                self._begin(group, turns)

    def _begin(self, group: SimulatedGroup, turns: _Turns) -> None:
        """A turn of a rollout has a slot from now on."""
        first = turns.strides[0]
        self._begun += 1
        stride = self._scenario.stride
        base = turns.context - self._at * stride
        left = _Turns(turns.strides[1:], turns.context + first * stride)
        heapq.heappush(self._ends, (self._at + first, self._begun, group, base, left))
        self._looks_back += base

    def _world(self, group: SimulatedGroup, turns: _Turns) -> None:
        """The world has what the policy said, and will answer."""
        life = self._lives
        self._away[group] += 1

        def answered() -> None:
            if life == self._lives:
                self._away[group] -= 1
                if not self._away[group]:
                    del self._away[group]
                self._back.append((group, turns))
                self.poke()

        self._clock.after(self._scenario.world_s, answered)

    def _reached(self) -> None:
        self._event = None
        self._usage.ends()
        self._owed_s = 0.0
        self._at = self._target
        ends, at, stride = self._ends, self._at, self._scenario.stride
        while ends and ends[0][0] <= at:
            _, _, group, base, turns = heapq.heappop(ends)
            self._looks_back -= base
            if turns.strides:
                self._world(group, turns)
                continue
            self._owed_s += self._costs.rollout_s
            group.left -= 1
            if not group.left:
                if not self._complete:
                    self._since = at
                self._complete.append(group)
        if self._complete and leaves(len(self._complete), (at - self._since) * stride + 1, enough=self._enough):
            self._send()
        self._go_on()

    def _send(self) -> None:
        complete, self._complete = self._complete, []
        self._out(complete)
