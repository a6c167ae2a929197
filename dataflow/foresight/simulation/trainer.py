"""A trainer by the clock: groups in order of issue, step by step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from dataflow.foresight.simulation.clock import Clock, Event
from dataflow.foresight.simulation.groups import SimulatedGroup
from dataflow.foresight.simulation.scenario import Scenario
from dataflow.foresight.simulation.turns import SimulatedTurns
from dataflow.foresight.simulation.usage import Usage
from dataflow.foresight.training import LAST
from dataflow.rules.reorder_buffer import InOrder
from dataflow.rules.room import queue_prompts, row_room
from dataflow.staleness import sweep

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
        told of a version that is there now; ended: of groups that have an outcome."""
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
        """Take in what there is room for, and begin a step if its groups are there."""
        self._let_in()
        if self._event is not None or not self._alive:
            return
        scenario = self._scenario
        while len(self._groups) < scenario.prompts_per_step:
            found = self._queue.take()
            if found is None:
                self._shared.look()
                return
            self._let_in()
            group, drop = found
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
        rollouts = size * len(self._groups)
        tokens = (
            sum(group.tokens + scenario.prompt_tokens for group in self._groups) - LAST * rollouts
        )
        seconds = costs.step_s + costs.rollout_s * rollouts + costs.token_s * tokens
        self._usage.begins()
        self._event = self._clock.after(seconds, self._made, shared=costs.shared)

    def wants(self) -> bool:
        """Whether it makes a step, or has all groups of one."""
        return self._event is not None or len(self._groups) == self._scenario.prompts_per_step

    def fail(self) -> None:
        """Lose the step under way; its groups are trained again."""
        if self._event is not None:
            self._clock.cancel(self._event)
            self._event = None
            self._usage.ends()
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
        groups, self._groups = self._groups, []
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
