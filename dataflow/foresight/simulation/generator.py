"""A generator's replica by the clock: a batch of rollouts that decode steps carry on; as some end,
others begin.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from operator import itemgetter

from dataflow.foresight.simulation.clock import Clock, Event, Usage
from dataflow.foresight.simulation.scenario import GeneratorCosts, Scenario
from dataflow.foresight.simulation.turns import SimulatedTurns
from dataflow.rules import LINGER_STEPS, Admission, enough, leaves, starts
from dataflow.staleness import Bound


class SimulatedGroup:
    """What stands for `PromptGroup`: admission takes either."""

    __slots__ = (
        "from_versions",
        "group_id",
        "last",
        "left",
        "min_version",
        "replica",
        "tokens",
        "unstarted",
    )

    def __init__(self, group_id: int, size: int, replica: int) -> None:
        self.group_id, self.min_version, self.replica = group_id, 0, replica
        self.unstarted = self.left = size
        self.tokens = 0.0
        """Of its completions."""
        self.last = 0
        """The stride of its replica at which the last of its rollouts ends that has begun."""
        self.from_versions: list[tuple[int, int]] = []
        """Versions under which some of its rollouts started, and how many of them."""

    def again(self, size: int) -> None:
        """Begin anew: what there was of its rollouts is lost."""
        self.unstarted = self.left = size
        self.tokens, self.last, self.from_versions = 0.0, 0, []


# How long a replica takes to carry its rollouts on until something happens that others notice.

Ending = tuple[int, int, SimulatedGroup, float, Sequence[int]]
"""A live rollout: the stride at which its turn ends, its number, its group, the tokens that it
would have had at stride 0, and the strides of its later turns."""
Stretch = tuple[float, int, int, float, float]
"""Decode steps with as many rollouts: the clock at its end; how many rollouts have ended by then,
and strides are made; seconds of other work before them, and of all."""


@cache
def turns_of(strides: int, turns: int) -> tuple[int, ...]:
    """So many strides in turns of like length, of one at least.

    >>> turns_of(7, 3), turns_of(1, 2)
    ((3, 2, 2), (1, 1))
    """
    if turns == 1:
        return (max(strides, 1),)
    share, more = divmod(max(strides, turns), turns)
    return tuple(share + (at < more) for at in range(turns))


def carried_on(
    ends: Sequence[Ending],
    costs: GeneratorCosts,
    step_s: Sequence[float],
    stride: int,
    *,
    at: int,
    now: float,
    owed_s: float,
    looks_back: float,
    linger: int,
    until: int | None,
    few: int,
    stops: Callable[[int], bool] | None,
) -> list[Stretch]:
    """The stretches, one or more, until groups may leave, a turn is to be answered, whoever waits
    may start, or nobody is left.

    ends: in the order in which they end. step_s: as `costs` has it. at: strides that are made.
    owed_s: what the first step waits for. looks_back: tokens of all at stride 0. linger: strides
    after which a complete group leaves. until: the stride at which one that is complete does, None
    where none is. few: complete groups that leave at once. stops: whether it stops once so many
    rollouts have ended.
    """
    stretches: list[Stretch] = []
    ended, many, context_s = 0, len(ends), costs.context_s
    target = ends[0][0]
    while True:
        if until is not None and until < target:
            target = until
        live, before = many - ended, ended
        steps = (target - at) * stride
        seconds = owed_s + steps * (
            step_s[live] + context_s * (looks_back + live * (at * stride + steps / 2))
        )
        now += seconds
        at, is_over = target, target == until
        while ended < many:
            end, _, group, base, turns = ends[ended]
            if end > target:
                target = end
                break
            ended += 1
            looks_back -= base
            if turns:
                is_over = True
            elif group.last <= at:
                # as far as its rollouts are live; if it is not complete, there was no need to stop
                few -= 1
                if until is None:
                    until = at + linger
        stretches.append((now, ended, at, owed_s, seconds))
        if is_over or few <= 0 or ended == many or (stops is not None and stops(ended)):
            return stretches
        owed_s = costs.rollout_s * (ended - before)


SOURCE, NODE = "prompts", "generator"


class SimulatedReplica:
    """Time is counted in strides of `scenario.stride` decode steps: one of n strides that starts at
    s ends at s + n.

    Of rollouts that end most change nothing but how many are carried on: there is one event for as
    many of them as end until groups leave, or whoever waits may start.
    """

    def __init__(
        self,
        scenario: Scenario,
        costs: GeneratorCosts,
        clock: Clock,
        bound: Bound,
        lengths: Iterator[int],
        usage: Usage,
        out: Callable[[list[SimulatedGroup]], None],
        dropped: Callable[[], int],
        shared: SimulatedTurns,
    ) -> None:
        """lengths: of completions in strides, without end. out: takes groups that are complete;
        dropped: how many were given up. shared: turns on its devices.
        """
        self._shared = shared
        self._scenario, self._clock, self._lengths, self._usage = scenario, clock, lengths, usage
        self._costs = costs
        self._out, self._dropped = out, dropped
        self.admission: Admission[SimulatedGroup] = Admission({SOURCE: bound}, scenario.in_flight)
        self.version = 0
        self._offered = 0
        self._at = 0
        """Strides that it has made."""
        self._ends: list[Ending] = []
        """Live rollouts, those first whose turn ends first."""
        self._back: deque[tuple[SimulatedGroup, float, Sequence[int]]] = deque()
        """Rollouts whose world has answered, and that have no slot yet: tokens before their next
        turn, strides of all that are to come."""
        self._away: Counter[SimulatedGroup] = Counter()
        """Groups of rollouts that wait for the world."""
        self._lives = 0
        """How often it has lost everything."""
        self._begun = 0
        self._looks_back = 0.0
        """Tokens that all live rollouts would have had at stride 0: their contexts are that long,
        and a token longer with each decode step since."""
        self._complete: list[SimulatedGroup] = []
        self._since = 0
        """Stride at whose end the first of them was complete."""
        self._linger = -(-LINGER_STEPS // scenario.stride)
        self._step_s = costs.step_s.tolist()
        self._slots = costs.slots
        self._enough = enough(self._slots, scenario.group_size)
        self._owed_s = 0.0
        """Work that the next decode step has to wait for."""
        self._event: Event | None = None
        self._stretches: list[Stretch] = []
        """Until that."""
        self._alive = True

    def push(self, groups: Sequence[SimulatedGroup]) -> None:
        """Prompts came, or some that are to begin anew."""
        for group in groups:
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
        if self._event is None:
            self._go_on()
            return
        slots = self._wanted()
        if not slots and self._offered <= self.version:
            return
        now, stretches = self._clock.reading(self._costs.shared), self._stretches
        under_way = min(bisect_right(stretches, now, key=itemgetter(0)), len(stretches) - 1)
        live = len(self._ends) - (stretches[under_way - 1][1] if under_way else 0)
        if self._offered > self.version or live < self._slots:
            self._stop(under_way, now)
            self._go_on()
        else:
            self._stop_early(under_way, slots)

    def wants(self) -> bool:
        """Whether rollouts are under way, or may start."""
        return bool(
            self._ends
            or self._back
            or self.admission.has_due(max(self.version, self._offered), self._dropped())
        )

    def go_on(self) -> None:
        """Its devices are its own now."""
        if self._alive and self._event is None:
            self._go_on()

    def fail(self) -> list[SimulatedGroup]:
        """Lose all rollouts; their groups."""
        if self._event is not None:
            self._clock.cancel(self._event)
            self._event = None
            self._usage.ends()
        lost = {id(group): group for _, _, group, *_ in self._ends} | {
            id(group): group for group in self._complete
        }
        lost |= {id(group): group for group in (*self._away, *(group for group, *_ in self._back))}
        self._ends, self._complete, self._looks_back, self._alive = [], [], 0.0, False
        self._owed_s = 0.0
        self._back, self._away, self._lives = deque(), Counter(), self._lives + 1
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

    def _wanted(self) -> int:
        """Slots that the next group waits for; 0: none may start under this version."""
        if self._back:
            return 1
        due = self.admission.due(self.version, self._dropped())
        return due[0].unstarted if due else 0

    def _stop(self, under_way: int, now: float) -> None:
        """Carry rollouts on no further than to the end of the stride under way."""
        assert self._event is not None, "something is under way"
        self._clock.cancel(self._event)
        self._event = None
        self._usage.ends()
        until, _, strides, owed_s, seconds = self._stretches[under_way]
        if under_way:
            _, ended, self._at, *_ = self._stretches[under_way - 1]
            self._end(ended)
        passed = now - (until - seconds)
        if passed < owed_s:
            self._owed_s = owed_s - passed
        elif seconds > owed_s:
            stride_s = (seconds - owed_s) / (strides - self._at)
            strides_done = min(strides - self._at, math.ceil((passed - owed_s) / stride_s - 1e-6))
            self._owed_s = max(0.0, strides_done * stride_s - (passed - owed_s))
            self._at += strides_done
        else:
            self._at, self._owed_s = strides, 0.0

    def _stop_early(self, under_way: int, slots: int) -> None:
        """Stop where slots become free that are waited for since now."""
        assert self._event is not None, "something is under way"
        for number, (until, ended, *_) in enumerate(self._stretches[under_way:-1], under_way):
            if self._lets_in(ended, slots):
                self._clock.cancel(self._event)
                del self._stretches[number + 1 :]
                self._event = self._clock.at(until, self._reached, shared=self._costs.shared)
                return

    def _lets_in(self, ended: int, slots: int) -> bool:
        """Whether a group that waits for so many slots may start once so many live rollouts have
        ended.
        """
        free = self._slots - len(self._ends) + ended
        return slots > 0 and starts(
            min(slots, free), slots, idle=ended == len(self._ends), slots=self._slots
        )

    def _go_on(self) -> None:
        if not self._shared.has(NODE):
            return
        costs, stride = self._costs, self._scenario.stride
        if self._offered > self.version:
            self.version = self._offered
            self._owed_s += costs.adopt_s
        self._admit()
        if not self._ends:
            if self._complete:
                self._send()
            self._shared.look()
            return
        slots = self._wanted()
        self._stretches = carried_on(
            self._ends,
            costs,
            self._step_s,
            stride,
            at=self._at,
            now=self._clock.reading(costs.shared),
            owed_s=self._owed_s,
            looks_back=self._looks_back,
            linger=self._linger,
            until=max(self._since + self._linger, self._at) if self._complete else None,
            few=self._enough - len(self._complete),
            stops=(lambda ended: self._lets_in(ended, slots)) if slots else None,
        )
        self._usage.begins()
        self._event = self._clock.at(self._stretches[-1][0], self._reached, shared=costs.shared)

    def _admit(self) -> None:
        scenario, ends = self._scenario, self._ends
        begun = len(ends)
        while self._back and len(ends) < self._slots:
            group, context, turns = self._back.popleft()
            self._begin(group, context, [turns])
        free = self._slots - len(ends)
        if free and self.admission:
            for _, group, count in self.admission.start(
                free=free,
                slots=self._slots,
                idle=not ends,
                version=self.version,
                dropped=self._dropped(),
                fit=lambda group, wanted: wanted,
            ):
                if not group.from_versions:
                    self._owed_s += self._costs.prompt_s
                group.unstarted -= count
                group.from_versions.append((self.version, count))
                rollouts = [
                    turns_of(strides, scenario.turns) for strides in islice(self._lengths, count)
                ]
                group.tokens += sum(map(sum, rollouts)) * scenario.stride
                self._begin(group, scenario.prompt_tokens, rollouts)
        if len(ends) > begun:
            ends.sort()

    def _begin(
        self, group: SimulatedGroup, context: float, rollouts: Sequence[Sequence[int]]
    ) -> None:
        """Turns of rollouts have slots from now on. rollouts: strides of all turns that are to
        come.
        """
        at, first = self._at, self._begun
        base = context - at * self._scenario.stride
        begun = [
            (at + turns[0], number, group, base, turns[1:])
            for number, turns in enumerate(rollouts, first)
        ]
        group.last = max(group.last, max(begun)[0])
        self._ends += begun
        self._begun += len(begun)
        self._looks_back += base * len(begun)

    def _world(self, group: SimulatedGroup, context: float, turns: Sequence[int]) -> None:
        """The world has what the policy said, and will answer."""
        life = self._lives
        self._away[group] += 1

        def answered() -> None:
            if life == self._lives:
                self._away[group] -= 1
                if not self._away[group]:
                    del self._away[group]
                self._back.append((group, context, turns))
                self.poke()

        self._clock.after(self._scenario.world_s, answered)

    def _reached(self) -> None:
        self._event = None
        self._usage.ends()
        stretches = self._stretches
        _, ended, self._at, *_ = stretches[-1]
        if len(stretches) > 1:
            self._end(before := stretches[-2][1])
            ended -= before
        self._owed_s = self._costs.rollout_s * self._end(ended)
        waited = (self._at - self._since) * self._scenario.stride + 1
        if self._complete and leaves(len(self._complete), waited, enough=self._enough):
            self._send()
        self._go_on()

    def _end(self, count: int) -> int:
        """So many turns end, the first ones; how many rollouts do."""
        stride, rollouts = self._scenario.stride, 0
        for end, _, group, base, turns in self._ends[:count]:
            self._looks_back -= base
            if turns:
                self._world(group, base + end * stride, turns)
                continue
            rollouts += 1
            group.left -= 1
            if not group.left:
                if not self._complete:
                    self._since = end
                self._complete.append(group)
        del self._ends[:count]
        return rollouts

    def _send(self) -> None:
        complete, self._complete = self._complete, []
        self._out(complete)
