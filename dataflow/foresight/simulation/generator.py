"""A generator's replica by the clock: a batch of rollouts that decode steps carry on; as some end, others begin."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from dataflow.foresight.simulation.clock import Clock, Event
from dataflow.foresight.simulation.groups import SimulatedGroup
from dataflow.foresight.simulation.scenario import GeneratorCosts, Scenario
from dataflow.foresight.simulation.usage import Usage
from dataflow.rules.admission import Admission
from dataflow.rules.leave import LINGER_STEPS, enough, leaves
from dataflow.staleness import Bound

SOURCE = "prompts"


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
        self._ends: list[tuple[int, int, SimulatedGroup, int]] = []
        """Of each live rollout: the stride at which it ends, its number, its group, the stride at which it began."""
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
        lost = {id(group): group for _, _, group, _ in self._ends} | {id(group): group for group in self._complete}
        self._ends, self._complete, self._looks_back, self._alive = [], [], 0.0, False
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
        return len(self._ends) < self._slots and self.admission.has_due(self.version, self._dropped())

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
        free = self._slots - len(self._ends)
        if not free or not len(self.admission):
            return
        scenario = self._scenario
        for _, group, count in self.admission.start(
            free=free, slots=self._slots, idle=not self._ends, version=self.version, dropped=self._dropped(),
            fit=lambda group, wanted: wanted,
        ):  # fmt: skip
            if not group.from_versions:
                self._owed_s += self._costs.prompt_s
            group.unstarted -= count
            group.from_versions.append((self.version, count))
            for _ in range(count):
                strides = next(self._lengths)
                self._begun += 1
                heapq.heappush(self._ends, (self._at + strides, self._begun, group, self._at))
                group.tokens += strides * scenario.stride
            self._looks_back += count * (scenario.prompt_tokens - self._at * scenario.stride)

    def _reached(self) -> None:
        self._event = None
        self._usage.ends()
        self._owed_s = 0.0
        self._at = self._target
        ends, at, stride = self._ends, self._at, self._scenario.stride
        while ends and ends[0][0] <= at:
            _, _, group, start = heapq.heappop(ends)
            self._looks_back -= self._scenario.prompt_tokens - start * stride
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
