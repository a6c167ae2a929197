"""Trains a run's recorded rollouts again, without a generator: which steps, from where, and whether
losses repeat.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import GraphError, RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.ledger import Ledger, MadeStep, some
from dataflow.folder.live_changes import KnobChange, read_changes
from dataflow.folder.retention import KNOB, gone
from dataflow.folder.run_folder import RunFolder
from dataflow.graph import Graph
from dataflow.history.describe import graph_facts
from dataflow.history.launch import Wishes
from dataflow.history.resume import RecordedRun, check_same
from dataflow.node import Learn
from dataflow.records import GROUP_ID
from dataflow.structure import own_folder, trainers
from dataflow.system.files import RunFolderError


@dataclass(frozen=True, kw_only=True)
class ReplayScript:
    """The steps that a trainer repeats."""

    node: str
    start: int
    """Steps behind the weights it starts from."""
    checkpoint: Path | None
    """The folder of these weights; None: the model's own."""
    steps: Sequence[MadeStep]
    """Steps as the ledger has them, in order, from start + 1 on."""
    read: Callable[[MadeStep], pa.Table]
    """The rows that a step trained."""
    threads: int = 1
    """Threads that the trainer computed with, on a CPU."""
    device: str = "cpu"
    seed: int = 0
    """The seed of the run."""
    changes: Sequence[KnobChange] = ()
    """Changes of the trainer's knobs, each with the step from which it counts."""
    loss: str = ""
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One step, as recorded and as replayed; None where a number was not finite."""

    step: int
    recorded_loss: float | None
    loss: float | None
    recorded_grad_norm: float | None
    grad_norm: float | None
    other_logprobs: int | None = None
    """Tokens of which the trainer now computes another log-probability than the run has kept; None:
    it has kept none, or the loss is another one."""

    @property
    def difference(self) -> float:
        """Difference of the losses; infinite where one is missing."""
        if self.recorded_loss is None or self.loss is None:
            return 0.0 if self.recorded_loss == self.loss else math.inf
        return abs(self.recorded_loss - self.loss)


def replay(graph: Graph, wishes: Wishes) -> Iterator[Compared]:
    """Train a run's steps again, in order, from its Arrow files; what came of each.

    It writes nothing into the run's folder. Errors: GraphError for another graph than the run's;
    RunError when there is nothing to train, or its rollouts are not those that the ledger names.
    """
    folder = RunFolder.open(wishes.run)
    recorded = RecordedRun.read(folder)
    check_same(folder, recorded, graph_facts(graph), None)
    node = _trainer(graph, wishes.trainer)
    trainer = graph.operators[node]
    assert isinstance(trainer, Learn), "it trains"
    if wishes.device != "cpu":
        trainer = replace(trainer, **recorded.chosen.get(node, {}))
    out = Path(wishes.out).absolute() if wishes.out else None
    if out is not None and out.resolve().is_relative_to(folder.path):
        raise RunError(
            f"a replay writes nothing into the run's folder, but --out is '{out}'; give another"
            " folder"
        )
    own = own_folder(graph, node)
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        steps, missing = ledger.steps(node, 0, wishes.last), gone(ledger, node)
    start, place = starting_point(folder.checkpoints_of(own), wishes.first)
    if start < missing:
        raise RunError(_not_kept(folder.checkpoints_of(own), node, start, missing))
    script = ReplayScript(
        node=node,
        start=start,
        checkpoint=place,
        steps=steps_to_train(node, steps, start, wishes.last),
        read=lambda step: rows_of(folder, step, own),
        threads=_threads(recorded, node),
        device=wishes.device,
        seed=recorded.seed,
        loss=wishes.loss,
        out=out,
        changes=[change for change in read_changes(folder) if change.node == node],
    )
    for step, facts in zip(script.steps, trainer.replay(script), strict=True):
        yield Compared(
            step=step.step,
            recorded_loss=_finite(step.metrics.get("loss")),
            loss=_finite(facts["loss"]),
            recorded_grad_norm=_finite(step.metrics.get("grad_norm")),
            grad_norm=_finite(facts["grad_norm"]),
            other_logprobs=(
                None
                if wishes.loss or "other_logprobs" not in facts
                else int(facts["other_logprobs"])
            ),
        )


def starting_point(checkpoints: Checkpoints, first: int) -> tuple[int, Path | None]:
    """The newest undamaged checkpoint of a step that is not above `first`, and its folder; 0 and
    None without one.
    """
    for step in reversed(checkpoints.steps()):
        if step <= first and checkpoints.damage(step) is None:
            return step, checkpoints.folder(step)
    return 0, None


def _not_kept(checkpoints: Checkpoints, node: str, start: int, missing: int) -> str:
    good = [
        step for step in checkpoints.steps() if step >= missing and checkpoints.damage(step) is None
    ]
    advice = (
        f"give --from {good[0]}"
        if good
        else f"make the next run with a larger {KNOB}, and with checkpoint_every"
    )
    return (
        f"the rollouts of '{node}' up to step {missing} were not kept, and this replay would train"
        f" those from step {start + 1} on; {advice}"
    )


def steps_to_train(
    node: str, made_steps: Sequence[MadeStep], start: int, last: int | None
) -> list[MadeStep]:
    """Steps after `start`. Errors: RunError when there is none, or the run did not come to
    `last`.
    """
    end = made_steps[-1].step if made_steps else 0
    if last is not None and last > end:
        raise RunError(
            f"'{node}' made {end} steps, so none can be replayed up to {last}; give --to {end} or"
            " less"
        )
    steps = [step for step in made_steps if step.step > start]
    if not steps:
        raise RunError(
            f"'{node}' made {end} steps, and the replay would start from step {start}: nothing is"
            " left to train; give a smaller --from"
        )
    return steps


def rows_of(folder: RunFolder, step: MadeStep, own: str | None) -> pa.Table:
    """What a step trained. Errors: RunFolderError when the file is missing, damaged, or of other
    groups.
    """
    table = folder.rollouts_of(own).read(step.step)
    groups = pc.unique(table.column(GROUP_ID)).to_pylist()
    if groups != list(step.trained):
        raise RunFolderError(
            f"'{folder.rollouts_of(own).step_file(step.step)}' holds other groups than step"
            f" {step.step} trained: found {some(groups)} instead of {some(step.trained)}; it was"
            " overwritten, or taken from another run"
        )
    return table


def report_replay(graph: Graph, wishes: Wishes) -> int:
    """Print a replay, step by step; status 1 when the run's own losses do not repeat."""
    compared = []
    if not wishes.json:
        column = wishes.loss or "replayed"
        print(
            f"{'step':>6} {'loss, recorded':>24} {f'loss, {column}':>24} {'difference':>12}"
            f" {'grad norms':>24}"
        )
    for row in replay(graph, wishes):
        compared.append(row)
        if not wishes.json:
            print(_line(row), flush=True)
    same = sum(row.difference <= wishes.tolerance for row in compared)
    others_logprobs = [row.other_logprobs for row in compared if row.other_logprobs is not None]
    repeats = same == len(compared) and (wishes.tolerance > 0 or not any(others_logprobs))
    status = 0 if wishes.loss or repeats else 1
    if wishes.json:
        steps = [
            dataclasses.asdict(row) | {"difference": _finite(row.difference)} for row in compared
        ]
        facts = {"run": wishes.run, "loss": wishes.loss or None, "same": same, "steps": steps}
        facts["other_logprobs"] = sum(others_logprobs) if others_logprobs else None
        print(json.dumps(facts, allow_nan=False))
    elif not wishes.loss:
        exactly = "bit for bit" if not wishes.tolerance else f"within {wishes.tolerance:g}"
        print(f"{same} of {len(compared)} losses are the recorded ones, {exactly}")
        if others_logprobs:
            print(
                f"{sum(others_logprobs) or 'no'} tokens have other log-probabilities than the"
                " trainer computed"
                " in the run"
            )
        if status:
            print(_why(graph, wishes))
    return status


def _trainer(graph: Graph, name: str) -> str:
    names = trainers(graph)
    if name in names:
        return name
    if name or len(names) != 1:
        problem = f"'{name}' is none" if name else f"{len(names)} are there"
        raise GraphError(
            f"a replay is of one trainer, but {problem}; give --trainer one of {names}"
        )
    return names[0]


def _threads(recorded: RecordedRun, node: str) -> int:
    return int(recorded.config.get("placed", {}).get(node, {}).get("threads", 1))


def _why(graph: Graph, wishes: Wishes) -> str:
    placed = RecordedRun.read(RunFolder.open(wishes.run)).config.get("placed", {})
    place = placed.get(_trainer(graph, wishes.trainer), {})
    if place.get("gpus") or place.get("ranks", 1) > 1 or wishes.device != "cpu":
        return (
            "a sum's last bits depend on the device and on the number of ranks; give --tolerance,"
            " as in 1e-4"
        )
    return "the trainer, its loss or a library is not what it was when the run was made"


def _line(row: Compared) -> str:
    norms = f"{_text(row.recorded_grad_norm, 11)} {_text(row.grad_norm, 11)}"
    return (
        f"{row.step:>6} {_text(row.recorded_loss)} {_text(row.loss)} {row.difference:>12.3g}"
        f" {norms:>24}"
    )


def _text(value: float | None, width: int = 24) -> str:
    if value is None:
        return f"{'not finite':>{width}}"
    return f"{value:>{width}.17g}" if width > 20 else f"{value:>{width}.4g}"


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
