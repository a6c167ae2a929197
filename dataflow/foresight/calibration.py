"""Constants that fit run folders: `dataflow calibrate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    generators = _by_threads(runs, lambda run: run.generator, lambda some: _generator(some, device))
    learners = _by_threads(runs, lambda run: run.trainer, lambda some: _learner(some, device))
    several = {"generator": generators, "learner": learners}
    return Constants(
        generator=generators[min(generators)], learner=learners[min(learners)], row_s=_rows(runs),
        threaded={role: found for role, found in several.items() if len(found) > 1},
        computed=float(np.mean([run.computed for run in runs])), source=f"calibrated on {names}",
    )  # fmt: skip


def _by_threads(
    runs: Sequence[SeenRun], node: Callable[[SeenRun], str], fitted: Callable[[Sequence[SeenRun]], Rates]
) -> dict[int, Rates]:
    """Rates by the threads of a process: with more of them products are faster and small steps are not. Where none of
    the runs that had so many was cut over ranks, an exchange takes what it takes with others."""
    groups: dict[int, list[SeenRun]] = {}
    for run in runs:
        groups.setdefault(int(run.placed[node(run)].get("threads", 1)), []).append(run)
    found = {threads: fitted(groups[threads]) for threads in sorted(groups)}
    cut = [threads for threads, some in groups.items() if any(_ranks(run, node(run)) > 1 for run in some)]
    return {
        threads: rates if threads in cut or not cut else replace(rates, exchange_s=found[min(cut)].exchange_s)
        for threads, rates in found.items()
    }


def _ranks(run: SeenRun, node: str) -> int:
    return int(run.placed[node]["ranks"])


def _generator(runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    """Of each stretch its decode steps that began nothing, by about how many rollouts they carried on, and the rest."""
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed = run.placed[run.generator]
        replica = GeneratorReplica(
            model=run.model, kind=kind, tensor_parallel=int(placed["ranks"]), dtype=_dtype(kind)
        )  # fmt: skip
        context = run.prompt_tokens + 0.6 * run.lengths.mean
        once, token = replica.step(0.0, 0.0, _NOTHING), replica.step(1.0, context, _NOTHING)

        def decoding(
            steps: float, tokens: float, replica: GeneratorReplica = replica, once: Parts = once, token: Parts = token
        ) -> list[float]:
            memory = steps * once.memory + tokens * (token.memory - once.memory)
            return [steps, tokens, 0.0, tokens * token.compute, memory, steps * replica.exchanges]

        for each in run.stretches[run.generator]:
            steps, tokens, busy_s = each.steps, each.tokens, each.busy_s
            for size in each.decoded:
                if size.steps:
                    x.append(decoding(size.steps, size.rollouts))
                    y.append(size.seconds)
                    steps, tokens, busy_s = steps - size.steps, tokens - size.rollouts, busy_s - size.seconds
            rest, rollouts = decoding(max(0.0, steps), max(0.0, tokens)), each.rows_out
            rest[2] = rollouts
            prompts = run.model.forward(rollouts / run.group_size * run.prompt_tokens, run.prompt_tokens / 2)
            rest[3] += prompts / (replica.ranks * kind.rate(replica.dtype))
            x.append(rest)
            y.append(max(0.0, busy_s))
    step_s, row_s, end_s, compute, memory, exchange_s = _fit(x, y)
    cut = any(int(run.placed[run.generator]["ranks"]) > 1 for run in runs)
    return replace(
        ASSUMED, step_s=step_s, row_s=row_s, end_s=end_s, compute=_share(compute), memory=_share(memory),
        exchange_s=exchange_s if cut else _unseen_exchange_s(kind),
    )  # fmt: skip


def _learner(runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    """As `_generator`: of each step its passes, and what is done once."""
    x: list[list[float]] = []
    y: list[float] = []
    for run in runs:
        placed = run.placed[run.trainer]
        ranks = int(placed["ranks"]) * int(placed["replicas"])
        learners = Learners(model=run.model, kind=kind, ranks=ranks, dtype=_dtype(kind))
        rollouts = run.prompts_per_step * run.group_size
        busy_s, made = (sum(getattr(each, name) for each in run.stretches[run.trainer]) for name in ("busy_s", "steps"))
        told_s = float(np.mean([sum(line[each] for each in (_PASSES, *_ONCE)) for line in run.steps]))
        untold_s = max(0.0, busy_s / made - told_s)
        for line in run.steps:
            passes = learners.passes(
                rollouts, line["computed_tokens"] / rollouts, forward=1.0 + BACKWARD, sequences=1e9
            )  # fmt: skip
            x.append([1.0, learners.update().memory, 0.0, 0.0, 0.0, 0.0])
            y.append(sum(line[each] for each in _ONCE))
            x.append([0.0, 0.0, 1.0, line["computed_tokens"], passes.compute, exchanges_of(learners)])
            y.append(line[_PASSES] + untold_s)
    step_s, memory, passes_s, token_s, compute, exchange_s = _fit(x, y)
    cut = any(int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"]) > 1 for run in runs)
    return replace(
        ASSUMED, step_s=step_s + passes_s, token_s=token_s, compute=_share(compute), memory=_share(memory),
        exchange_s=exchange_s if cut else _unseen_exchange_s(kind),
    )  # fmt: skip


def _unseen_exchange_s(kind: DeviceKind) -> float:
    """Where no run was cut over ranks."""
    return _CORES_EXCHANGE_S if kind.name == "cpu" else ASSUMED.exchange_s


_NOTHING = Rates(step_s=0.0)


def _fit(x: Sequence[Sequence[float]], y: Sequence[float]) -> Sequence[float]:
    """Ridge regression (Hoerl and Kennard, 1970) of seconds relative to their size, no coefficient below 0: what
    columns cannot be told apart by is shared out between them."""
    weights = 1 / np.sqrt(np.maximum(0.01 * np.mean(y), y))
    rows, there = np.array(x) * weights[:, None], np.array(y) * weights
    scale = np.maximum(np.sqrt((rows**2).sum(axis=0)), 1e-300)
    drawn = np.vstack([rows / scale, _RIDGE * np.eye(len(scale))])
    found, _ = non_negative(drawn, np.concatenate([there, np.zeros(len(scale))]))
    return [float(each) for each in found / scale]


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
        of = (rates.row_s, "rollout") if role == "generator" else (rates.token_s, "token")
        spent = [f"{1e3 * rates.step_s:.3g} ms a {each}", f"{1e6 * of[0]:.3g} us a {of[1]} in it"]
        if rates.end_s:
            spent.append(f"{1e6 * rates.end_s:.3g} us a rollout that ends")
        for share, what in ((rates.compute, "of matrix products"), (rates.memory, "of memory's bandwidth")):
            spent.append(f"{share:.1%} {what}" if share < _FREE else f"nothing for {what.partition(' ')[2]}")
        spent.append(f"{1e6 * rates.exchange_s:.3g} us an exchange between ranks")
        found.append(f"{'generator' if role == 'generator' else 'trainer'}{threads}: {', '.join(spent)}")
    for node, row_s in constants.row_s.items():
        found.append(f"{node}: {1e6 * row_s:.3g} us a row")
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
