"""A light trainer: a version is a function of all that was trained, and its steps are recorded as
in the product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dataflow.model import Model
from dataflow.node import CapacityTraits, Learn, SamplingTraits, Traits
from dataflow.records import GROUP_ID, VERSIONS
from dataflow.rules import QueuedGroup, ReorderBuffer
from dataflow.runtime import Batch, Context, Runtime
from dataflow.staleness import oldest_versions, sweep
from operators.training.checkpoints.checkpoint import expected

from .actors import digest, fails, tensors
from .laws import check


@dataclass(frozen=True, eq=False)
class SimulatedTrainer(Learn):
    """Makes of every `prompts_per_step` groups a version that is a function of all that was trained
    so far.
    """

    name: str = field(default="trainer", kw_only=True)
    model: Model | None = None
    prompts_per_step: int = 2
    checkpoint_every: int = 2
    queue_prompts: int | None = None
    temperature: float = 1.0
    filters: bool = False
    """Whether most groups are dropped."""

    @property
    def traits(self) -> Traits:
        """What a graph is checked for."""
        return Traits(
            capacity=CapacityTraits(queue_prompts=self.queue_prompts),
            sampling=SamplingTraits(temperature=self.temperature),
        )

    @property
    def step_prompts(self) -> int:
        """`prompts_per_step`."""
        return self.prompts_per_step

    def reads(self) -> Mapping[str, Any]:
        """The reward."""
        return {"reward": float}

    def build(self, context: Context) -> Runtime:
        """From the newest checkpoint, caught up with the ledger."""
        return _Training(self, context)


class _Training(Runtime):
    """Order of a step as in operators/training: rollouts, ledger, publish, checkpoint,
    acknowledgements.
    """

    def __init__(self, operator: SimulatedTrainer, context: Context) -> None:
        self._operator, self._context, self._probe = operator, context, context.log
        (self._source,) = context.graph.columns
        self._bound = context.graph.bounds[self._source]
        ledger = context.ledger
        assert ledger is not None and context.weights.writer is not None
        made = ledger.last_step(context.node)
        self._disk: dict[int, int] = self._probe.disk
        """Checkpoints: content of the weights by step."""
        self._step = max(step for step in self._disk if step <= made)
        self._content = self._disk[self._step]
        self._content, self._step = catch_up(self._content, self._step, made, self._probe.recorded)
        if self._step < made:
            ledger.roll_back_to(self._step, context.node)
            self._probe.rolled_back(self._step)
        first, holes, ended = expected(context, self._source)
        self._buffer = ReorderBuffer(first, holes)
        self._told_dropped = ended - self._step * operator.prompts_per_step
        self._groups: list[QueuedGroup] = []
        self._passed: list[QueuedGroup] = []
        self._reasons: dict[int, str] = {}
        self._parts: deque[int] = deque()
        self._done = context.run.steps is not None and self._step >= context.run.steps
        self._writer = context.weights.writer(tensors(self._step, self._content))
        self._publish()

    def room(self) -> int:
        if self._done:
            return 1
        ahead = (self._bound.max_staleness + 2) * self._operator.prompts_per_step * 8
        return max(0 if self._buffer.is_ready else 1, ahead - self._buffer.rows)

    def push(self, batch: Batch) -> None:
        if self._done:
            batch.ack()
        else:
            self._buffer.add(batch)

    def pending(self) -> int:
        return 0 if self._done else int(bool(self._parts) or self._buffer.is_ready)

    def work(self) -> list[Batch] | None:
        """A part of a step, or its end."""
        self._writer.poll()
        if self._done:
            return None
        if self._parts:
            self._parts.popleft()
            if not self._parts:
                self._end_step()
            return []
        while len(self._groups) < self._operator.prompts_per_step:
            group = self._buffer.take()
            if group is None:
                return None
            self._passed.append(group)
            reason = self._reason_to_drop(group)
            if reason is None:
                self._groups.append(group)
            else:
                self._drop(group.group_id, reason)
        self._parts.extend(range(self._probe.random.randint(1, 6)))
        self._probe.begins_step()
        return []

    def tell(self, message: Mapping[str, Any]) -> None:
        """The end of the rows does not come before the last step."""
        check(
            self._done or not message.get("end"),
            f"the trainer hears the end of its rows at step {self._step}",
        )

    def status(self) -> dict[str, float | int | str]:
        following = self._buffer.following
        found: dict[str, float | int | str] = {
            "step": self._step,
            "dropped": self._told_dropped,
            "waits_for": following,
            "queue": len(self._buffer),
        }
        return found | ({"done": 1} if self._done and self._probe.may_end() else {})

    def _reason_to_drop(self, group: QueuedGroup) -> str | None:
        if fails(group.group_id, self._operator.filters):
            return "failed"
        oldest = oldest_versions(group.records.column(VERSIONS))
        return "stale" if sweep(oldest, self._step, self._bound.max_staleness).any() else None

    def _drop(self, group: int, reason: str) -> None:
        """Many are recorded before their step is."""
        context = self._context
        assert context.ledger is not None
        self._reasons[group] = reason
        self._told_dropped += 1
        self._note()
        if len(self._reasons) >= self._operator.prompts_per_step:
            reasons, self._reasons = self._reasons, {}
            context.ledger.drop(context.node, self._source, reasons, step=self._step + 1)
            for each in [each for each in self._passed if each.group_id in reasons]:
                self._passed.remove(each)
                each.release()

    def _note(self) -> None:
        self._writer.tell({"dropped": self._told_dropped, "version": self._step})

    def _publish(self) -> None:
        self._probe.publishes(self._step, self._content)
        self._writer.publish(self._step, tensors(self._step, self._content))
        self._note()

    def _end_step(self) -> None:
        context, groups = self._context, self._groups
        rows = [group.records for group in groups]
        table = pa.Table.from_batches(rows)
        self._step, self._content = self._step + 1, trained(self._content, table)
        assert context.folder is not None and context.ledger is not None
        context.folder.rollouts_of().write(self._step, table)
        self._probe.commits(self._step, self._content, table, [group.group_id for group in groups])
        context.ledger.commit_step(
            context.node,
            self._step,
            version=self._step,
            source=self._source,
            trained=[group.group_id for group in groups],
            dropped=self._reasons,
            metrics={},
        )
        self._publish()
        is_last = self._step == context.run.steps
        if is_last or self._step % self._operator.checkpoint_every == 0:
            self._probe.point()
            self._disk[self._step] = self._content
            context.ledger.record_checkpoint(context.node, self._step, f"step {self._step}")
        passed, self._passed, self._groups, self._reasons = self._passed, [], [], {}
        for group in passed:
            group.release()
        self._done = is_last


def catch_up(
    content: int, step: int, made: int, recorded: Callable[[int], pa.Table | None]
) -> tuple[int, int]:
    """From a checkpoint to the last step of the ledger, as far as the rows of each step are
    there.
    """
    while step < made and (rows := recorded(step + 1)) is not None:
        content, step = trained(content, rows), step + 1
    return content, step


def trained(content: int, rows: pa.Table) -> int:
    """The weights after a step over these rows: a function of both, and of nothing else."""
    flat = rows.combine_chunks()
    tokens = flat.column(VERSIONS).combine_chunks().values.to_numpy()
    return digest(content, flat.column(GROUP_ID).to_numpy().tobytes(), tokens.tobytes())
