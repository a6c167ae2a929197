"""Constants that fit run folders: `dataflow calibrate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.generation import GeneratorReplica
from dataflow.foresight.least_squares import non_negative
from dataflow.foresight.parts import Parts
from dataflow.foresight.rates import ASSUMED, ASSUMED_CONSTANTS, Constants, Rates
from dataflow.foresight.scenarios import exchanges_of
from dataflow.foresight.seen import SeenRun
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.training import BACKWARD, Learners

_FREE = 1e6
"""Share of a rate that is reached where no seconds are seen to depend on it."""
_RIDGE = 0.01
"""Root of the penalty on coefficients of columns of length 1: little beside what tells columns apart."""
_ALONE = tuple(1 + number / 20 for number in range(13))
"""How much faster one process on cores may be while no other computes: what two share is caches and memory."""
_CORES_EXCHANGE_S = 150e-6
"""Of two processes on cores, assumed: about what gloo takes for few bytes."""
_PASSES = "seconds_forward_backward"
_ONCE = ("seconds_optimizer", "seconds_record", "seconds_publish")
"""What a line of metrics.jsonl has of a training step."""


def calibrate(runs: Sequence[SeenRun], kind: str = "cpu") -> Constants:
    """Rates that come nearest to what these runs took, none below 0; what the runs do not tell apart is shared out.

    Runs of several sizes of models, steps and batches do. GraphError for no runs, or for runs on another kind of
    device."""
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
    names = ", ".join(run.path.resolve().name for run in runs)
    alone = min(_ALONE, key=lambda each: _misses(runs, device, each)) if _share_cores(runs) else 1.0
    several: dict[Literal["generator", "learner"], dict[int, Rates]] = {
        "generator": _generators(runs, device, alone)[0], "learner": _learners(runs, device, alone)[0],
    }  # fmt: skip
    first = {role: found[min(found)] for role, found in several.items()}
    return Constants(
        generator=first["generator"], learner=first["learner"], row_s=_rows(runs), alone=alone,
        threaded={role: found for role, found in several.items() if len(found) > 1},
        computed=float(np.mean([run.computed for run in runs])), source=f"calibrated on {names}",
    )  # fmt: skip


def _misses(runs: Sequence[SeenRun], kind: DeviceKind, alone: float) -> float:
    """Squares of what is left when processes that compute alone are so much faster."""
    return _generators(runs, kind, alone)[1] + _learners(runs, kind, alone)[1]


def _share_cores(runs: Sequence[SeenRun]) -> bool:
    """Whether some runs had generator and trainer compute at once on cores, and some in turn."""
    on_cores = not any(each.get("gpus") for run in runs for each in run.placed.values())
    return on_cores and len({run.max_staleness > 0 for run in runs}) > 1


def _busy(run: SeenRun, node: str) -> float:
    """Share of the time in which a node was at work, its replicas in the mean."""
    seconds = sum(each.seconds for each in run.stretches[node]) * int(run.placed[node]["replicas"])
    return min(1.0, sum(each.busy_s for each in run.stretches[node]) / seconds) if seconds else 0.0


def _crowded(run: SeenRun, node: str, other: str, alone: float) -> float:
    """Seconds that a node would have taken had all cores been at work, over those that it took."""
    placed = run.placed[node]
    if int(placed["ranks"]) * int(placed["replicas"]) * int(placed.get("threads", 1)) > 1:
        return 1.0
    return 1 + (alone - 1) * (1 - _busy(run, other))


def _threads(run: SeenRun, node: str) -> int:
    return int(run.placed[node].get("threads", 1))


def _generators(runs: Sequence[SeenRun], kind: DeviceKind, alone: float) -> tuple[dict[int, Rates], float]:
    """Rates by threads, and squares of what is left. Of each stretch its decode steps that began nothing, by about how
    many rollouts they carried on, and the rest."""
    counts = sorted({_threads(run, run.generator) for run in runs})
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed, at = run.placed[run.generator], counts.index(_threads(run, run.generator))
        crowded = _crowded(run, run.generator, run.trainer, alone)
        replica = GeneratorReplica(
            model=run.model, kind=kind, tensor_parallel=int(placed["ranks"]), dtype=_dtype(kind)
        )  # fmt: skip
        context = run.prompt_tokens + 0.6 * run.lengths.mean
        once, token = replica.step(0.0, 0.0, _NOTHING), replica.step(1.0, context, _NOTHING)

        def row(
            steps: float, tokens: float, ends: float, prompts: float, replica: GeneratorReplica = replica,
            once: Parts = once, token: Parts = token, at: int = at,
        ) -> list[float]:  # fmt: skip
            memory = steps * once.memory + tokens * (token.memory - once.memory)
            of = [tokens * token.compute + prompts, memory]
            return [steps, tokens, ends, steps * replica.exchanges, *_at(at, len(counts), of)]

        for each in run.stretches[run.generator]:
            steps, tokens, busy_s = each.steps, each.tokens, each.busy_s
            for size in each.decoded:
                if size.steps:
                    x.append(row(size.steps, size.rollouts, 0.0, 0.0))
                    y.append(crowded * size.seconds)
                    steps, tokens, busy_s = steps - size.steps, tokens - size.rollouts, busy_s - size.seconds
            prompts = run.model.forward(each.rows_out / run.group_size * run.prompt_tokens, run.prompt_tokens / 2)
            prompts /= replica.ranks * kind.rate(replica.dtype)
            x.append(row(max(0.0, steps), max(0.0, tokens), each.rows_out, prompts))
            y.append(crowded * max(0.0, busy_s))
    (step_s, row_s, end_s, exchange_s, *found), left = _fit(x, y)
    if not any(int(run.placed[run.generator]["ranks"]) > 1 for run in runs):
        exchange_s = _unseen_exchange_s(kind)
    return {
        threads: replace(
            ASSUMED, step_s=step_s, row_s=row_s, end_s=end_s, exchange_s=exchange_s,
            compute=_share(found[2 * at]), memory=_share(found[2 * at + 1]),
        )
        for at, threads in enumerate(counts)
    }, left  # fmt: skip


def _learners(runs: Sequence[SeenRun], kind: DeviceKind, alone: float) -> tuple[dict[int, Rates], float]:
    """As `_generators`: of each step its passes, and what is done once."""
    counts = sorted({_threads(run, run.trainer) for run in runs})
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed, at = run.placed[run.trainer], counts.index(_threads(run, run.trainer))
        crowded = _crowded(run, run.trainer, run.generator, alone)
        ranks = int(placed["ranks"]) * int(placed["replicas"])
        learners = Learners(model=run.model, kind=kind, ranks=ranks, dtype=_dtype(kind))
        rollouts, exchanges = run.prompts_per_step * run.group_size, exchanges_of(learners)
        busy_s, made = (sum(getattr(each, name) for each in run.stretches[run.trainer]) for name in ("busy_s", "steps"))
        told_s = float(np.mean([sum(line[each] for each in (_PASSES, *_ONCE)) for line in run.steps]))
        untold_s = max(0.0, busy_s / made - told_s)
        for line in run.steps:
            tokens = line["computed_tokens"]
            passes = learners.passes(rollouts, tokens / rollouts, forward=1.0 + BACKWARD, sequences=1e9)
            x.append([1.0, learners.update().memory, exchanges, *_at(at, len(counts), [0.0, 0.0, 0.0])])
            y.append(crowded * sum(line[each] for each in _ONCE))
            of = [run.model.layers, learners.channels(tokens), passes.compute]
            x.append([0.0, 0.0, exchanges, *_at(at, len(counts), of)])
            y.append(crowded * (line[_PASSES] + untold_s))
    (step_s, memory, exchange_s, *found), left = _fit(x, y)
    if not any(int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"]) > 1 for run in runs):
        exchange_s = _unseen_exchange_s(kind)
    return {
        threads: replace(
            ASSUMED, step_s=step_s, exchange_s=exchange_s, memory=_share(memory), layer_s=found[3 * at],
            channel_s=found[3 * at + 1], compute=_share(found[3 * at + 2]),
        )
        for at, threads in enumerate(counts)
    }, left  # fmt: skip


def _at(number: int, of: int, found: Sequence[float]) -> list[float]:
    """Columns of one of so many numbers of threads: the others have nothing there."""
    return [each for at in range(of) for each in (found if at == number else [0.0] * len(found))]


def _unseen_exchange_s(kind: DeviceKind) -> float:
    """Where no run was cut over ranks."""
    return _CORES_EXCHANGE_S if kind.name == "cpu" else ASSUMED.exchange_s


_NOTHING = Rates(step_s=0.0)


def _fit(x: Sequence[Sequence[float]], y: Sequence[float]) -> tuple[Sequence[float], float]:
    """Ridge regression (Hoerl and Kennard, 1970) of seconds relative to their size, no coefficient below 0: what
    columns cannot be told apart by is shared out between them; and squares of what is left."""
    weights = 1 / np.sqrt(np.maximum(0.01 * np.mean(y), y))
    rows, there = np.array(x) * weights[:, None], np.array(y) * weights
    scale = np.maximum(np.sqrt((rows**2).sum(axis=0)), 1e-300)
    drawn = np.vstack([rows / scale, _RIDGE * np.eye(len(scale))])
    found, left = non_negative(drawn, np.concatenate([there, np.zeros(len(scale))]))
    return [float(each) for each in found / scale], left


def _share(seconds: float) -> float:
    """Of a full rate, from the seconds that one second at that rate takes."""
    return 1 / seconds if seconds > 1 / _FREE else _FREE


def _rows(runs: Sequence[SeenRun]) -> dict[str, float]:
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
    roles = (("generator", constants.generator), ("learner", constants.learner))
    every = [
        (role, many, of) for role, rates in roles for many, of in (constants.threaded.get(role) or {0: rates}).items()
    ]
    for role, many, rates in every:
        threads = f" with {many} thread{'s' if many > 1 else ''}" if many else ""
        each = "decode step" if role == "generator" else "step"
        spent = [f"{1e3 * rates.step_s:.3g} ms a {each}"]
        spent.append(
            f"{1e6 * rates.row_s:.3g} us a rollout in it" if role == "generator"
            else f"{1e3 * rates.layer_s:.3g} ms a layer, {1e9 * rates.channel_s:.3g} ns a channel of a token in a layer"
        )  # fmt: skip
        if rates.end_s:
            spent.append(f"{1e6 * rates.end_s:.3g} us a rollout that ends")
        for share, what in ((rates.compute, "of matrix products"), (rates.memory, "of memory's bandwidth")):
            spent.append(f"{share:.1%} {what}" if share < _FREE else f"nothing for {what.partition(' ')[2]}")
        spent.append(f"{1e6 * rates.exchange_s:.3g} us an exchange between ranks")
        found.append(f"{'generator' if role == 'generator' else 'trainer'}{threads}: {', '.join(spent)}")
    for node, row_s in constants.row_s.items():
        found.append(f"{node}: {1e6 * row_s:.3g} us a row")
    if constants.alone > 1:
        found.append(f"a process is {constants.alone:.2f} times as fast while no other computes")
    found.append(f"a trainer passes over {constants.computed:.0%} of the tokens")
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
        threaded = {
            role: {int(threads): Rates(**rates) for threads, rates in found.items()}
            for role, found in plain.pop("threaded", {}).items()
        }
        return Constants(generator=generator, learner=learner, threaded=threaded, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GraphError(
            f"'{path}' has no constants that `dataflow calibrate` wrote; found {type(error).__name__}: {error}; "
            f"calibrate again, with --out {path}, or take one of {', '.join(CONSTANTS)}, kernels:VERSION of vLLM"
        ) from None
