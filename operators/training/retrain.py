"""Trains recorded steps again, from Arrow files, with the loss that they had or another one;
imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import torch

from dataflow.errors import GraphError, RunError, nearest
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.folder.ledger import MadeStep
from dataflow.history.replay import ReplayScript
from dataflow.records import NEW_LOGPROBS
from dataflow.runtime import Context, DeviceShare, RunSettings
from dataflow.system.modules import named
from operators import losses
from operators.models.loading import load_tokenizer
from operators.trainer import TrainerKnobs
from operators.training.checkpoints import checkpoint
from operators.training.learner.build import make_learner
from operators.training.steps import NewLogprobs, StepMaker


def retrained(trainer: TrainerKnobs, script: ReplayScript) -> Iterator[Mapping[str, float]]:
    """Train the steps of a script in order, each at the learning rate that it had; `loss` and
    `grad_norm` of each, and where the run has kept them, how many tokens' log-probabilities are
    others than it computed (`other_logprobs`).

    A step with a number that is not finite leaves the weights alone, as it would in a run.
    Errors: GraphError for a loss that cannot be used; RunError for a column that it reads and the
    run did not keep.
    """
    torch.set_num_threads(script.threads)
    changed: dict[str, Any] = {"offload": False, "tensor_parallel": 1, "dp_replicate": 1}
    if script.loss:
        changed["loss"] = find_loss(script.loss)
    trainer = dataclasses.replace(trainer, **changed)
    if faults := trainer.faults():
        raise GraphError("; ".join(faults))
    model = trainer.model
    if script.checkpoint is not None:
        model = dataclasses.replace(model, source=str(script.checkpoint), revision=None)
    learner = make_learner(trainer, model, node=script.node, device=script.device, seed=script.seed)
    if script.checkpoint is not None:
        learner.everywhere(checkpoint.restore, folder=script.checkpoint)
    last = script.steps[-1].step
    context = Context(
        node=script.node,
        run=RunSettings(seed=script.seed, steps=last),
        devices=DeviceShare(device=script.device, threads=script.threads),
    )
    knobs = KnobsByStep(trainer, () if script.loss else script.changes)
    making = StepMaker(trainer, context, learner, script.start, knobs)
    for step in script.steps:
        yield _make(making, step, script.read(step))
    if script.out is not None:
        facts: dict[str, int | str] = {"step": last, "version": last, "node": script.node}
        with Checkpoints(script.out).writing(last, node=script.node, version=last) as folder:
            checkpoint.save(folder, learner, load_tokenizer(model), facts)


def find_loss(text: str) -> Callable[..., Any]:
    """The loss of this name in operators.losses, or the function in `module:function` or
    `path/to/file.py:function`.

    Errors: GraphError when there is none.
    """
    if text in losses.__all__:
        return getattr(losses, text)  # type: ignore[no-any-return]
    place, colon, _ = text.rpartition(":")
    if not colon or not place:
        raise GraphError(
            f"no loss is called {text!r}{nearest(text, losses.__all__)}; give one of"
            f" {losses.__all__}, or a function of your own as module:function or"
            " path/to/file.py:function"
        )
    loss = named(text, text, "loss")
    if not callable(loss):
        raise GraphError(f"{text!r} is no function; name a function of its columns as the loss")
    return loss  # type: ignore[no-any-return]


def _make(making: StepMaker, step: MadeStep, table: pa.Table) -> dict[str, float]:
    loss = making.learner.loss
    lacking = [name for name in loss.columns if name not in table.column_names]
    if lacking:
        raise RunError(
            f"loss '{loss.name}' reads columns {lacking}, but the rollouts of step {step.step} have"
            f" {table.column_names}; give a loss that reads these"
        )
    making.step = step.step - 1
    making.take_all(table)
    while making.micro_batches:
        making.micro()
    outcome = making.end(float(step.metrics["lr"]))
    figures = {"loss": outcome.loss, "grad_norm": outcome.grad_norm}
    differing = other_logprobs(making.new_logprobs(), table.to_batches())
    return figures if differing is None else figures | {"other_logprobs": differing}


def other_logprobs(computed: NewLogprobs | None, records: Iterable[pa.RecordBatch]) -> int | None:
    """How many tokens' log-probabilities differ from their column `new_logprobs`; None where there
    is no such column, or nothing was computed.
    """
    count: int | None = None
    for rows in records:
        if computed is None or NEW_LOGPROBS not in rows.schema.names:
            continue
        bare = rows.select([name for name in rows.schema.names if name != NEW_LOGPROBS])
        now, was = computed.beside([bare]).column(NEW_LOGPROBS), rows.column(NEW_LOGPROBS)
        count = (count or 0) + sum(
            _differing(*pair)
            for pair in zip(now.to_pylist(), was.to_pylist(), strict=True)
            if pair[0] != pair[1]
        )
    return count


def _differing(now: list[float | None] | None, was: list[float | None] | None) -> int:
    if now is None or was is None or len(now) != len(was):
        return max(len(now or ()), len(was or ()))
    return sum(computed != recorded for computed, recorded in zip(now, was, strict=True))
