"""Constants that fit run folders: `dataflow calibrate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.generation import Replica
from dataflow.foresight.least_squares import non_negative
from dataflow.foresight.rates import ASSUMED, ASSUMED_CONSTANTS, Constants, Rates
from dataflow.foresight.seen import Seen
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.training import BACKWARD, Learners

_FREE = 1e6
"""Share of a rate that is reached where no seconds are seen to depend on it."""
_ALONE = tuple(1 + 0.05 * step for step in range(11))


def calibrate(runs: Sequence[Seen], kind: str = "cpu") -> Constants:
    """Rates that come nearest to what these runs took: none below 0, and those that are not told apart, 0.

    Runs of several model sizes tell costs of a step and costs of a product apart, synchronous and asynchronous ones
    what a process gains while it computes alone. GraphError for no runs, or for runs on another kind of device."""
    if not runs:
        raise GraphError("a calibration needs run folders; name one or more")
    for run in runs:
        on_cpu = not any(each.get("gpus") for each in run.placed.values())
        if on_cpu != (kind == "cpu"):
            raise GraphError(
                f"run '{run.path}' computed {'on cores' if on_cpu else 'on accelerators'}, but kind is '{kind}'; say "
                f"which kind it was by --kind"
            )
    device = device_kind(kind)
    found = [(alone, *_generator(runs, device, alone), *_learner(runs, device, alone)) for alone in _ALONE]
    alone, generator, _, learner, _ = min(found, key=lambda each: each[2] + each[4])
    names = ", ".join(run.path.name for run in runs)
    return Constants(
        generator=generator, learner=learner, row_s=_rows(runs), alone=alone,
        computed=float(np.mean([run.computed for run in runs])), source=f"calibrated on {names}",
    )  # fmt: skip


def _generator(runs: Sequence[Seen], kind: DeviceKind, alone: float) -> tuple[Rates, float]:
    """Rates, and what is left of the squares, as a share of them."""
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed = run.placed[run.generator]
        replica = Replica(
            model=run.model, kind=kind, tensor_parallel=int(placed["ranks"]), dtype=_dtype(kind)
        )  # fmt: skip
        context = run.prompt_tokens + 0.6 * run.lengths.mean
        for each in run.stretches[run.generator]:
            rollouts = each.rows_out
            once, tokens = replica.step(0.0, 0.0, _NOTHING), replica.step(1.0, context, _NOTHING)
            prompts = run.model.forward(rollouts / run.group_size * run.prompt_tokens, run.prompt_tokens / 2)
            compute = each.tokens * tokens.compute + prompts / (replica.ranks * kind.rate(replica.dtype))
            memory = each.steps * once.memory + each.tokens * (tokens.memory - once.memory)
            x.append([each.steps, each.tokens, rollouts, compute, memory])
            y.append(each.busy_s * _speed(each.busy_s, each.other_s, alone))
    (step_s, row_s, end_s, compute, memory), left = _fit(x, y)
    return replace(
        ASSUMED, step_s=step_s, row_s=row_s, end_s=end_s, compute=_share(compute), memory=_share(memory)
    ), left  # fmt: skip


def _learner(runs: Sequence[Seen], kind: DeviceKind, alone: float) -> tuple[Rates, float]:
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed = run.placed[run.trainer]
        ranks = int(placed["ranks"]) * int(placed["replicas"])
        learners = Learners(model=run.model, kind=kind, ranks=ranks, dtype=_dtype(kind))
        tokens = run.computed * (run.lengths.mean + run.prompt_tokens / run.group_size)
        passes = learners.passes(1.0, tokens, forward=1.0 + BACKWARD, sequences=1e9)
        rollouts = run.prompts_per_step * run.group_size
        for each in run.stretches[run.trainer]:
            x.append([
                each.steps, each.steps * rollouts, each.steps * rollouts * passes.compute,
                each.steps * learners.update().memory,
            ])  # fmt: skip
            y.append(each.busy_s * _speed(each.busy_s, each.other_s, alone))
    (step_s, row_s, compute, memory), left = _fit(x, y)
    return replace(ASSUMED, step_s=step_s, row_s=row_s, compute=_share(compute), memory=_share(memory)), left


_NOTHING = Rates(step_s=0.0)


def _fit(x: Sequence[Sequence[float]], y: Sequence[float]) -> tuple[Sequence[float], float]:
    """Weighted so that, of a single column, it is the sum of seconds over the sum of what they were spent on."""
    weights = 1 / np.sqrt(np.maximum(1e-9, np.array(x)[:, 0]))
    there = np.array(y) * weights
    found, left = non_negative(np.array(x) * weights[:, None], there)
    return found.tolist(), left / max(1e-12, float(there @ there))


def _speed(busy_s: float, other_s: float, alone: float) -> float:
    """Of a process that was at work for `busy_s` while another was for `other_s`, in that of one beside others."""
    beside = min(1.0, other_s / busy_s) if busy_s > 0 else 1.0
    return beside + (1 - beside) * alone


def _share(seconds: float) -> float:
    """Of a full rate, from the seconds that one second at that rate takes."""
    return 1 / seconds if seconds > 1 / _FREE else _FREE


def _rows(runs: Sequence[Seen]) -> dict[str, float]:
    """Seconds of a row, by operator without a model."""
    found: dict[str, NDArray[np.float64]] = {}
    for run in runs:
        for node, stretches in run.stretches.items():
            if node in (run.generator, run.trainer):
                continue
            spent = np.array([sum(each.busy_s for each in stretches), sum(each.rows_in for each in stretches)])
            found[node] = found.get(node, np.zeros(2)) + spent
    return {node: float(busy / rows) for node, (busy, rows) in found.items() if rows > 0}


def _dtype(kind: DeviceKind) -> str:
    return "float32" if kind.name == "cpu" else "bfloat16"


def described(constants: Constants) -> str:
    """For people: a line for each kind of operator."""
    found = []
    for role, rates in (("generator", constants.generator), ("trainer", constants.learner)):
        each = "decode step" if role == "generator" else "step"
        spent = [f"{1e3 * rates.step_s:.3g} ms a {each}", f"{1e6 * rates.row_s:.3g} us a rollout in it"]
        if rates.end_s:
            spent.append(f"{1e6 * rates.end_s:.3g} us a rollout that ends")
        for share, what in ((rates.compute, "of matrix products"), (rates.memory, "of memory's bandwidth")):
            spent.append(f"{share:.1%} {what}" if share < _FREE else f"nothing for {what.partition(' ')[2]}")
        found.append(f"{role}: {', '.join(spent)}")
    for node, row_s in constants.row_s.items():
        found.append(f"{node}: {1e6 * row_s:.3g} us a row")
    found.append(f"a trainer passes over {constants.computed:.0%} of the tokens")
    found.append(f"a process that computes alone is {constants.alone:.2f} times as fast as beside others")
    return "\n".join(found)


def to_plain(constants: Constants) -> dict[str, Any]:
    """For a file of JSON."""
    return dataclasses.asdict(constants)


def read_constants(text: str) -> Constants:
    """What `dataflow calibrate` wrote into a file of that name; or one of `steps.CONSTANTS`, for a generator's seconds.

    GraphError where it is something else."""
    if text.partition(":")[0] in CONSTANTS:
        return replace(ASSUMED_CONSTANTS, decode=text)
    path = Path(text)
    try:
        plain = json.loads(path.read_text("utf-8"))
        generator, learner = (Rates(**plain.pop(role)) for role in ("generator", "learner"))
        return Constants(generator=generator, learner=learner, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GraphError(
            f"'{path}' has no constants that `dataflow calibrate` wrote; found {type(error).__name__}: {error}; "
            f"calibrate again, with --out {path}, or take one of {', '.join(CONSTANTS)}, kernels:VERSION of vLLM"
        ) from None
