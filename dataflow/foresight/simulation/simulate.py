"""Simulates a scenario: issues prompts, carries groups from operator to operator, and reports the
result.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataflow.errors import GraphError
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.simulation.clock import Clock, Event, Usage
from dataflow.foresight.simulation.generator import NODE as GENERATOR
from dataflow.foresight.simulation.generator import SimulatedGroup, SimulatedReplica
from dataflow.foresight.simulation.scenario import Scenario, ScorerCosts
from dataflow.foresight.simulation.turns import SimulatedTurns
from dataflow.foresight.training import LAST
from dataflow.rules import InOrder, ends_part, issue_until, queue_prompts, row_room
from dataflow.staleness import Bound, capacity, sweep
from transport.data.credit import next_receiver

# A trainer by the clock: groups in order of issue, step by step.

NODE = "trainer"


class SimulatedTrainer:
    """All its ranks, which work together."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        usage: Usage,
        published: Callable[[int], None],
        ended: Callable[[list[SimulatedGroup]], None],
        shared: SimulatedTurns,
        *,
        first: int = 0,
    ) -> None:
        """shared: turns on its devices. first: steps after which staleness is counted. published:
        told of a version that is there now; ended: of groups that have an outcome.
        """
        self._scenario, self._clock, self._usage, self._shared = scenario, clock, usage, shared
        self._published, self._ended, self._first = published, ended, first
        self._queue: InOrder[tuple[SimulatedGroup, bool]] = InOrder()
        self._arrivals: deque[tuple[SimulatedGroup, bool]] = deque()
        """Wait for room in the queue."""
        self._most = queue_prompts(
            scenario.queue_prompts, scenario.prompts_per_step, scenario.max_staleness
        )
        self._groups: list[SimulatedGroup] = []
        """Of the step that is to come, or under way."""
        self._computed = 0
        """How many of them it has computed, or computes."""
        self._event: Event | None = None
        self._alive = True
        self.steps = 0
        self.step_ends: list[float] = []
        """Seconds."""
        self.staleness: Counter[int] = Counter()
        """Trained rollouts by the versions that their oldest token is behind."""
        self.dropped: Counter[str] = Counter()
        """Groups by reason."""

    def push(self, arrivals: Iterable[tuple[SimulatedGroup, bool]]) -> None:
        """Groups came, and whether an operator on their way has given them up."""
        self._arrivals.extend(arrivals)
        self.go_on()

    def go_on(self) -> None:
        """Take in what there is room for, and compute what is there of a step."""
        self._let_in()
        if self._event is not None or not self._alive:
            return
        scenario = self._scenario
        while not self._has_part:
            group_and_drop = self._queue.take()
            if group_and_drop is None:
                self._shared.look()
                return
            self._let_in()
            group, drop = group_and_drop
            oldest = np.asarray(group.from_versions[0][0])  # it began before the others
            reason = "filtered" if drop else ""
            if not reason and sweep(oldest, self.steps, scenario.max_staleness):
                reason = "stale"
            if reason:
                self.dropped[reason] += 1
                self._ended([group])
            else:
                self._groups.append(group)
        if not self._shared.has(NODE):
            return
        costs, size = scenario.trainer, scenario.group_size
        groups, self._computed = self._groups[self._computed :], len(self._groups)
        tokens = self._tokens(groups) - LAST * size * len(groups)
        is_last = self._computed == scenario.prompts_per_step
        seconds = costs.token_s * tokens + costs.step_s * is_last
        self._usage.begins()
        self._event = self._clock.after(
            seconds, self._made if is_last else self._part_made, shared=costs.shared
        )

    def _tokens(self, groups: Sequence[SimulatedGroup]) -> float:
        return sum(group.tokens + self._scenario.prompt_tokens for group in groups)

    @property
    def _has_part(self) -> bool:
        """Whether groups are there that are computed now."""
        groups, step_groups = self._groups[self._computed :], self._scenario.prompts_per_step
        return len(self._groups) == step_groups or ends_part(
            len(groups),
            self._tokens(groups),
            step_groups=step_groups,
            most=self._scenario.trainer.part_tokens,
        )

    def _part_made(self) -> None:
        self._event = None
        self._usage.ends()
        self.go_on()

    def wants(self) -> bool:
        """Whether it computes, or has all groups of a step."""
        return self._event is not None or len(self._groups) == self._scenario.prompts_per_step

    def fail(self) -> None:
        """Lose the step under way; its groups are trained again."""
        if self._event is not None:
            self._clock.cancel(self._event)
            self._event = None
            self._usage.ends()
        self._computed = 0
        self._alive = False

    def restart(self) -> None:
        """Be there again, where it was."""
        self._alive = True
        self.go_on()

    def _let_in(self) -> None:
        size = self._scenario.group_size
        while (
            self._arrivals
            and row_room(self._most, size, len(self._queue) * size, is_ready=self._queue.is_ready)
            > 0
        ):
            group, drop = self._arrivals.popleft()
            self._queue.put(group.group_id, (group, drop))

    def _made(self) -> None:
        self._event = None
        self._usage.ends()
        groups, self._groups, self._computed = self._groups, [], 0
        if self.steps >= self._first:
            for group in groups:
                for version, count in group.from_versions:
                    self.staleness[self.steps - version] += count
        self.steps += 1
        self.step_ends.append(self._clock.now)
        step = self.steps
        self._clock.after(self._scenario.trainer.weights_s, lambda: self._published(step))
        self._ended(groups)
        self.go_on()


# Operators between generator and trainer by the clock: groups one after the other, each through
# all of them.


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
        the processors that others share.
        """
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


_DRAWN = 1 << 16
_EVENTS = 50_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """The result of a scenario."""

    step_ends: NDArray[np.float64]
    """When each step was made, in seconds, float64[steps]."""
    staleness: Counter[int]
    """Trained rollouts by the versions that their oldest token was behind."""
    dropped: Counter[str]
    """Groups by reason."""
    busy: Mapping[str, float]
    """Share of the counted seconds that each operator was at work, in the mean over replicas."""
    in_flight: float
    """Groups without an outcome, in the mean over the steps' ends."""
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(repr=False)
    """By operator, or replica of one, when it was at work, in seconds."""
    first: int
    """The step from which on steps are counted."""

    @property
    def steps_s(self) -> NDArray[np.float64]:
        """Seconds of each counted step."""
        return np.diff(self.step_ends[self.first - 1 :])

    @property
    def step_s(self) -> float:
        """Of a counted step, in the mean."""
        return float(self.steps_s.mean())

    @property
    def mean_staleness(self) -> float:
        """Versions."""
        return (
            sum(versions * count for versions, count in self.staleness.items())
            / self.staleness.total()
        )


def simulate(scenario: Scenario) -> Simulated:
    """Run it to its last step. GraphError where it comes to a standstill, or needs more than 50
    million events.

    Python looks for no rings of objects meanwhile: there are none among the many that come and
    go.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _World(scenario).run()
    finally:
        if collects:
            gc.enable()


class _World:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._clock = scenario, Clock(scenario.processors)
        clock = self._clock
        self._random = np.random.Generator(np.random.PCG64(scenario.seed))
        per_step, ahead = scenario.prompts_per_step, scenario.max_staleness
        # no end: it is a stretch of a longer run
        bound = Bound(max_staleness=ahead, prompts_per_step=per_step)
        self._usage: dict[str, Usage] = {}
        self._turns = SimulatedTurns(clock, scenario.moves_s)
        lengths = _drawn(scenario.lengths, scenario.stride, self._random)
        self._replicas = [
            SimulatedReplica(
                scenario,
                scenario.costs_of(number),
                clock,
                bound,
                lengths,
                self._used(_name("generator", number, scenario.replicas)),
                self._pass_on,
                lambda: self._told,
                self._turns,
            )
            for number in range(scenario.replicas)
        ]
        self._first = counted_from(scenario.steps, ahead)
        self._trainer = SimulatedTrainer(
            scenario,
            clock,
            self._used("trainer"),
            self._publish,
            self._settle,
            self._turns,
            first=self._first,
        )
        self._turns.join(
            GENERATOR, lambda: any(replica.wants() for replica in self._replicas), self._generate
        )
        self._turns.join(NODE, self._trainer.wants, self._trainer.go_on)
        self._hops: list[int] = []
        """Before each of these scorers, and before the trainer: those that take no time are hops
        alone."""
        self._scorers = self._chain()
        self._dropping = 1 - math.prod(1 - costs.drops for costs in scenario.scorers.values())
        self._following = 0
        self._without_outcome = [0] * scenario.replicas
        together = scenario.prompts_at_once
        self._most = scenario.prompts_without_outcome or capacity(per_step, ahead) + per_step
        self._room = max(1, together * self._most // scenario.replicas)
        """Of each replica, an equal share."""
        self._last_sent = -1
        self._told = 0
        """Groups given up, as generators know it."""
        self._given_up = 0
        self._in_flight: list[int] = []
        self._counted: tuple[float, dict[str, float]] = (0.0, {})

    def run(self) -> Simulated:
        scenario, clock, trainer = self._scenario, self._clock, self._trainer
        for number in range(scenario.replicas):
            self._doom(number)
        self._doom_trainer()
        self._issue()
        events = 0
        while trainer.steps < scenario.steps:
            if not clock.next():
                raise GraphError(
                    f"the simulation stands still after {trainer.steps} of {scenario.steps} steps:"
                    " its trainer waits for groups that nobody may start; look at in_flight"
                    f" ({scenario.in_flight}) and prompts_per_step ({scenario.prompts_per_step})"
                )
            events += 1
            if events > _EVENTS:
                raise GraphError(
                    f"the simulation had {events:,} events after {trainer.steps} of"
                    f" {scenario.steps} steps; ask for fewer steps"
                )
        began, before = self._counted
        seconds = clock.now - began
        busy = {
            name: (usage.so_far() - before.get(name, 0.0)) / seconds
            for name, usage in self._usage.items()
        }
        merged: dict[str, list[float]] = {}
        for name, share in busy.items():
            merged.setdefault(name.partition(" ")[0], []).append(share)
        return Simulated(
            step_ends=np.array(trainer.step_ends),
            staleness=trainer.staleness,
            dropped=trainer.dropped,
            busy={name: sum(shares) / len(shares) for name, shares in merged.items()},
            in_flight=float(np.mean(self._in_flight)),
            first=self._first,
            spans={name: usage.spans for name, usage in self._usage.items()},
        )

    def _used(self, name: str) -> Usage:
        return self._usage.setdefault(name, Usage(self._clock))

    def _chain(self) -> list[SimulatedScorer]:
        scorers: list[SimulatedScorer] = []
        hops = 1
        for name, costs in self._scenario.scorers.items():
            usage = self._used(name)
            if costs.row_s <= 0:
                hops += 1
                continue
            self._hops.append(hops)
            hops = 1
            scorers.append(
                SimulatedScorer(
                    costs,
                    self._scenario.group_size,
                    self._clock,
                    usage,
                    partial(self._pass_on, to=len(scorers) + 1),
                    self._turns,
                    name,
                    shared=bool(self._scenario.generator.shared),
                )
            )
        self._hops.append(hops)
        return scorers

    def _hop(self, act: Callable[[], None], hops: int = 1) -> None:
        """Act after a hop, never at once: the sender may be in the middle of something."""
        self._clock.after(hops * self._scenario.hop_s, act)

    def _issue(self) -> None:
        scenario = self._scenario
        while True:
            stop = issue_until(self._following, last=None, needed=None, dropped=self._given_up)
            room = self._most - sum(self._without_outcome)
            count = min(stop - self._following, scenario.prompts_at_once, room)
            if count <= 0:
                return
            number = next_receiver(
                [max(0, self._room - pending) for pending in self._without_outcome],
                last=self._last_sent,
                slack=scenario.prompts_slack,
            )
            if number is None:
                return
            groups = [
                SimulatedGroup(group_id, scenario.group_size, number)
                for group_id in range(self._following, self._following + count)
            ]
            self._following, self._last_sent = self._following + count, number
            self._without_outcome[number] += count
            self._hop(partial(self._replicas[number].push, groups))

    def _pass_on(self, groups: Sequence[SimulatedGroup], to: int = 0) -> None:
        """Send groups to the scorer of this number, or behind the last one to the trainer."""
        receive = self._scorers[to].push if to < len(self._scorers) else self._train
        self._hop(partial(receive, groups), self._hops[to])

    def _train(self, groups: Sequence[SimulatedGroup]) -> None:
        self._trainer.push(
            [
                (group, self._dropping > 0 and self._random.random() < self._dropping)
                for group in groups
            ]
        )

    def _generate(self) -> None:
        for replica in self._replicas:
            replica.go_on()

    def _publish(self, version: int) -> None:
        for replica in self._replicas:
            replica.offer(version)

    def _settle(self, groups: list[SimulatedGroup]) -> None:
        for group in groups:
            self._without_outcome[group.replica] -= 1
        given_up = self._trainer.dropped.total()
        if given_up > self._given_up:
            self._given_up = given_up
            self._hop(self._tell_dropped)
        steps = self._trainer.steps
        if steps > len(self._in_flight):
            self._in_flight.append(sum(self._without_outcome))
            if steps == self._first:
                self._counted = (
                    self._clock.now,
                    {name: usage.so_far() for name, usage in self._usage.items()},
                )
        self._issue()

    def _tell_dropped(self) -> None:
        self._told = self._given_up
        for replica in self._replicas:
            replica.poke()

    def _doom(self, number: int) -> None:
        rate = self._scenario.failures.generator_per_hour / 3600
        if rate:
            self._clock.after(self._random.exponential(1 / rate), lambda: self._fail(number))

    def _fail(self, number: int) -> None:
        replica = self._replicas[number]
        lost = replica.fail()

        def back() -> None:
            replica.restart()
            for group in lost:
                group.again(self._scenario.group_size)
            replica.push(lost)
            self._doom(number)

        self._clock.after(self._scenario.failures.restart_s, back)

    def _doom_trainer(self) -> None:
        rate = self._scenario.failures.trainer_per_hour / 3600
        if rate:
            self._clock.after(self._random.exponential(1 / rate), self._fail_trainer)

    def _fail_trainer(self) -> None:
        self._trainer.fail()
        failures = self._scenario.failures

        def back() -> None:
            self._trainer.restart()
            self._doom_trainer()

        self._clock.after(failures.restart_s + failures.lost_s, back)


def counted_from(steps: int, max_staleness: int) -> int:
    """The step from which on steps are counted: the pipeline is full, and whole rounds follow. At
    the bound a generator may start the prompts of several steps at once, so steps are unlike in
    rounds of `max_staleness + 1`.

    >>> counted_from(60, 2), counted_from(24, 2), counted_from(2, 0)
    (12, 9, 1)
    """
    first = 2 * (max_staleness + 1) + steps // 10
    return max(1, min(steps - 1, first + (steps - first) % (max_staleness + 1)))


def _name(node: str, number: int, replicas: int) -> str:
    return node if replicas == 1 else f"{node} {number}"


def _drawn(lengths: Lengths, stride: int, random: np.random.Generator) -> Iterator[int]:
    """Lengths of completions in strides, one after the other, without end."""
    while True:
        drawn = random.choice(lengths.tokens, _DRAWN) / stride
        yield from np.maximum(1, np.rint(drawn)).astype(np.int64).tolist()
