"""Where a trainer goes on from: its newest good checkpoint, the steps after it, and what a crash
left half done.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.ledger import MadeStep
from dataflow.folder.ledger.refusals import some
from dataflow.folder.retention import KNOB, gone
from dataflow.model import Model
from dataflow.runtime import Context
from dataflow.system.files import disk
from operators.training.checkpoints import checkpoint


@dataclass(frozen=True, kw_only=True)
class StartPoint:
    """What a trainer begins with."""

    model: Model
    """To load: its own, or that of the checkpoint."""
    folder: Path | None = None
    """The checkpoint; None: the model's own weights, and an optimiser that has seen nothing."""
    step: int = 0
    """Steps behind those weights."""
    missing: Sequence[MadeStep] = ()
    """Steps that the ledger has after it, to be made again."""
    last_metrics: Mapping[str, Any] = field(default_factory=dict)
    """The metrics of the last committed step."""


def find_start(model: Model, context: Context) -> StartPoint:
    """Look where to go on, and put right what a crash left: lines of metrics, checkpoints of steps
    taken back.

    Raises RunError when the checkpoint is of another release, or the disk refuses.
    """
    folder, ledger = context.folder, context.ledger
    last = ledger.last_step(context.node) if ledger is not None else 0
    if folder is None or ledger is None:
        return StartPoint(model=model)
    checkpoint = folder.latest_checkpoint(at_most=last, node=context.own_folder)
    checkpoints = folder.checkpoints_of(context.own_folder)
    set_aside(checkpoints, [step for step in checkpoints.steps() if step > last], "taken-back")
    damaged = {
        step: checkpoints.damage(step)
        for step in checkpoints.steps()
        if step > _number_of(checkpoint)
    }
    set_aside(checkpoints, damaged, "damaged")
    for at, damage in damaged.items():
        context.log.warning(
            "a checkpoint is damaged, and an older one is gone on from",
            node=context.node,
            step=at,
            error=damage,
            older=checkpoint.name if checkpoint is not None else "none: from the start",
        )
    if not last:
        return StartPoint(model=model)
    steps = ledger.steps(context.node)
    for line in missing_lines(steps, folder.read_metrics()):
        folder.append_metrics(line)
    step = _step_of(checkpoint)
    if checkpoint is not None:
        model = dataclasses.replace(model, source=str(checkpoint), revision=None)
    missing = [made_step for made_step in steps if made_step.step > step]
    if lost := [
        made_step.step for made_step in missing if made_step.step <= gone(ledger, context.node)
    ]:
        raise RunError(
            f"'{context.node}' cannot come back to step {last}: its newest good checkpoint is of"
            f" step {step}, and the rollouts of steps {some(lost)} after it were not kept ({KNOB});"
            " take a newer checkpoint from a backup, or start a new run"
        )
    if missing:
        context.log.info(
            "catching up",
            node=context.node,
            step=last,
            steps=len(missing),
            checkpoint=checkpoint.name if checkpoint is not None else "none: from the start",
        )
    return StartPoint(
        model=model, folder=checkpoint, step=step, missing=missing, last_metrics=steps[-1].metrics
    )


def missing_lines(
    steps: Iterable[MadeStep], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the ledger knows of steps whose lines of metrics are not there; a line of a step that
    was taken back, and made otherwise, is not that of the step.
    """
    lines_by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for line in lines:
        lines_by_step.setdefault(line.get("step"), []).append(line)
    return [
        dict(step.metrics)
        for step in steps
        if step.metrics
        and not any(
            line.items() >= step.metrics.items() for line in lines_by_step.get(step.step, ())
        )
    ]


def set_aside(checkpoints: Checkpoints, steps: Iterable[int], why: str) -> None:
    """Rename the checkpoints of these steps to <why>-1-step-000100, so that no later start takes
    them for new steps of these numbers. RunFolderError when the disk refuses.
    """
    for folder in map(checkpoints.folder, steps):
        places = (folder.with_name(f"{why}-{at}-{folder.name}") for at in range(1, 1_000_000))
        with disk("renaming", folder):
            folder.rename(next(place for place in places if not place.exists()))


def _number_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.rpartition("-")[2])


def _step_of(folder: Path | None) -> int:
    """A checkpoint's step. RunError where it differs from the folder's name."""
    if folder is None:
        return 0
    step = int(checkpoint.read_state(folder)["step"])
    if folder.name != f"step-{step:06d}":
        raise RunError(
            f"'{folder}' cannot be resumed from: its state is of step {step}; move it away, then an"
            " older checkpoint is taken"
        )
    return step


def expected(context: Context, source: str) -> tuple[int, list[int], int]:
    """The first group still to consume, the later ones that will not come, and how many have an
    outcome.
    """
    if context.ledger is None:
        return 0, [], 0
    following = context.ledger.next_group_id(source)
    in_flight = [group.group_id for group in context.ledger.in_flight(source, context.node)]
    # more may have been issued between the two reads
    waiting = [group for group in in_flight if group < following]
    first = min(waiting, default=following)
    return first, sorted(set(range(first, following)).difference(waiting)), following - len(waiting)


def recorded_drops(context: Context, step: int) -> Counter[str]:
    """Drops by reason that the ledger has of a step which is not committed yet."""
    return (
        Counter()
        if context.ledger is None
        else Counter(context.ledger.drops_at(context.node, step).values())
    )
