"""Constants that fit run folders: `dataflow calibrate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.generation import GeneratorReplica
from dataflow.foresight.least_squares import non_negative
from dataflow.foresight.rates import ASSUMED, ASSUMED_CONSTANTS, PARALLEL, Constants, Rates
from dataflow.foresight.scenarios import exchanges_of
from dataflow.foresight.seen import SeenRun
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.training import BACKWARD, Learners

_FREE = 1e6
"""Share of a rate that is reached where no seconds are seen to depend on it."""
_RIDGE = 0.01
"""Root of the penalty on coefficients of columns of length 1: little beside what tells columns apart."""
_NOISE = 0.015
"""Of seconds: two fits that differ by less than that are as good."""
_ALONE, _ALONE_IS, _ALONE_ABOUT = tuple(1 + number / 20 for number in range(17)), 1.15, 0.15
"""How much faster one process on cores may be while no other computes: what two share is caches and memory, or the
core itself, where both are its hardware threads. What it is where runs do not tell, give or take."""
_PARALLEL, _PARALLEL_ABOUT = tuple(number / 20 for number in range(6, 21)), 0.15
"""What several threads may reach of so many times the speed; give or take."""
_CORES_EXCHANGE_S = 150e-6
"""Of two processes on cores, assumed: about what gloo takes for few bytes."""
_PASSES = "seconds_forward_backward"
_ONCE = ("seconds_optimizer", "seconds_record", "seconds_publish")
"""What a line of metrics.jsonl has of a training step."""
_UNLIKE = 1.5
"""How many times as long completions of one run are in the mean as those of another, to tell tokens from rows."""
_MOST_HOP_S, _LITTLE = 0.02, 0.1
"""Between two operators. Share of a step that those between generator and trainer may take, for this to be seen."""


def calibrate(runs: Sequence[SeenRun], kind: str = "cpu") -> Constants:
    """Rates that come nearest to what these runs took, none below 0; what the runs do not tell apart is shared out.

    Runs of several sizes of models, steps and batches do; on cores one in which generator and trainer wait for each
    other, and one in which they do not. GraphError for no runs, or for runs on another kind of device."""
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
    row_s, row_token_s = _rows(runs)
    alone, (generator, learner) = _best((_generators(runs, device), _learners(runs, device)), on_cores=kind == "cpu")
    return Constants(
        generator=_generator_rates(generator.found, runs, device), learner=_learner_rates(learner.found, runs, device),
        parallel={
            role: fit.parallel for role, fit in (("generator", generator), ("learner", learner)) if fit.has_threads
        },
        row_s=row_s, row_token_s=row_token_s, alone=alone, hop_s=_hop_s(runs),
        computed=float(np.mean([run.computed for run in runs])),
        source=f"calibrated on {names}",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Coefficients of the columns of a table, where several threads are so much faster."""

    found: Sequence[float]
    parallel: float
    has_threads: bool
    missed: float
    """In units of noise, how far it is from what was seen, and from what is assumed."""


@dataclass(kw_only=True)
class _Table:
    """Seconds of one kind of operator, and what they were spent on."""

    serial: slice
    """Columns of what one thread does alone, of several."""
    shared: slice
    """Columns of what they share out. The last column is that of their waits for each other."""
    x: list[Sequence[float]] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    """Share of the time in which no other process computed, where that is seen in the seconds."""
    threads: list[int] = field(default_factory=list)

    def add(self, seconds: float, spent: Sequence[float], *, waits: float, idle: float, threads: int) -> None:
        """A row; waits: how often several threads would wait for each other."""
        self.x.append([*spent, waits if threads > 1 else 0.0])
        self.y.append(seconds)
        self.idle.append(idle if threads == 1 else 0.0)
        self.threads.append(threads)

    def fit(self, alone: float, parallel: float) -> _Fit:
        """Of seconds beside others, of one thread: `Constants.of` says what becomes of them."""
        x, threads = np.array(self.x), np.array(self.threads)
        x[:, self.serial] /= np.where(threads > 1, alone, 1.0)[:, None]
        x[:, self.shared] /= np.where(threads > 1, threads * parallel, 1.0)[:, None]
        found, left = _fit(x, np.array(self.y) * (1 + (alone - 1) * np.array(self.idle)))
        missed = left / _NOISE**2 + ((parallel - PARALLEL) / _PARALLEL_ABOUT) ** 2
        return _Fit(found=found, parallel=parallel, has_threads=bool((threads > 1).any()), missed=missed)


def _best(tables: Sequence[_Table], *, on_cores: bool) -> tuple[float, Sequence[_Fit]]:
    """How much faster a process is alone, and what fits each table then: where runs do not tell, what is assumed."""
    if not on_cores:
        return 1.0, [table.fit(1.0, PARALLEL) for table in tables]
    best: tuple[float, float, Sequence[_Fit]] | None = None
    for alone in _ALONE:
        fits = [
            min(
                (table.fit(alone, each) for each in (_PARALLEL if max(table.threads) > 1 else (PARALLEL,))),
                key=lambda fit: fit.missed,
            )
            for table in tables
        ]  # fmt: skip
        missed = sum(fit.missed for fit in fits) + ((alone - _ALONE_IS) / _ALONE_ABOUT) ** 2
        if best is None or missed < best[0]:
            best = missed, alone, fits
    assert best is not None, "some are tried"
    return best[1:]


def _busy(run: SeenRun, node: str) -> float:
    """Share of the time in which a node was at work, its replicas in the mean."""
    seconds = sum(each.seconds for each in run.stretches[node]) * int(run.placed[node]["replicas"])
    return min(1.0, sum(each.busy_s for each in run.stretches[node]) / seconds) if seconds else 0.0


def _beside(run: SeenRun, node: str, other: str) -> dict[str, Any]:
    """What a table is to know of a node's processes: their threads on cores, and how long they had these alone."""
    placed = run.placed[node]
    threads = 1 if placed.get("gpus") else int(placed.get("threads", 1))
    if int(placed["ranks"]) * int(placed["replicas"]) > 1:
        return {"threads": threads, "idle": 0.0}
    return {"threads": threads, "idle": 1 - _busy(run, other) if run.max_staleness else 1.0}


def _generators(runs: Sequence[SeenRun], kind: DeviceKind) -> _Table:
    """Of each stretch its decode steps that began nothing, by about how many rollouts they carried on, and the rest.

    Columns: steps, rollouts in them, those that end; exchanges, memory; products, numbers that are looked at."""
    table = _Table(serial=slice(0, 3), shared=slice(5, 7))
    for run in runs:
        beside = _beside(run, run.generator, run.trainer)
        ranks = int(run.placed[run.generator]["ranks"])
        replica = GeneratorReplica(model=run.model, kind=kind, tensor_parallel=ranks, dtype=_dtype(kind))
        once = replica.step(0.0, 0.0, _NOTHING).memory

        def spent(
            steps: float, tokens: float, context: float, ends: float = 0.0, prompts: float = 0.0,
            replica: GeneratorReplica = replica, once: float = once,
        ) -> list[float]:  # fmt: skip
            token = replica.step(1.0, context, _NOTHING)
            memory = steps * once + tokens * (token.memory - once)
            return [
                steps, tokens, ends, steps * replica.exchanges, memory, tokens * token.compute + prompts,
                replica.looks(tokens, context),
            ]  # fmt: skip

        for each in run.stretches[run.generator]:
            steps, tokens, busy_s = each.steps, each.tokens, each.busy_s
            for size in each.decoded:
                if size.steps:
                    context = _context(run, size.rollouts / size.steps)
                    waits = size.steps if size.rollouts > size.steps else 0.0
                    table.add(size.seconds, spent(size.steps, size.rollouts, context), waits=waits, **beside)
                    steps, tokens, busy_s = steps - size.steps, tokens - size.rollouts, busy_s - size.seconds
            prompts = run.model.forward(each.rows_out / run.group_size * run.prompt_tokens, run.prompt_tokens / 2)
            prompts /= replica.ranks * kind.rate(replica.dtype)
            steps, tokens = max(0.0, steps), max(0.0, tokens)
            rest = spent(steps, tokens, _context(run), each.rows_out, prompts)
            table.add(max(0.0, busy_s), rest, waits=steps, **beside)
    return table


def _generator_rates(found: Sequence[float], runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    step_s, row_s, end_s, exchange_s, memory, compute, look_s, wait_s = found
    if not any(int(run.placed[run.generator]["ranks"]) > 1 for run in runs):
        exchange_s = _unseen_exchange_s(kind)
    return replace(
        ASSUMED, step_s=step_s, row_s=row_s, end_s=end_s, exchange_s=exchange_s, compute=_share(compute),
        memory=_share(memory), look_s=look_s, wait_s=wait_s,
    )  # fmt: skip


def _context(run: SeenRun, rollouts: float | None = None) -> float:
    """Tokens that a decoded one looks back at, in the mean. rollouts: of the step; where all of a batch begin at once,
    those that are left say how far it has come."""
    if rollouts is None or run.max_staleness:
        return run.prompt_tokens + run.lengths.looks_back
    together = run.prompts_per_step * run.group_size / int(run.placed[run.generator]["replicas"])
    return run.prompt_tokens + float(np.quantile(run.lengths.tokens, max(0.0, 1 - rollouts / together)))


def _learners(runs: Sequence[SeenRun], kind: DeviceKind) -> _Table:
    """As `_generators`: of each step its passes, and what is done once.

    Columns: steps, layers; exchanges, memory; hidden states, products, numbers that are looked at."""
    table = _Table(serial=slice(0, 2), shared=slice(4, 7))
    for run in runs:
        beside = _beside(run, run.trainer, run.generator)
        ranks = int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"])
        learners = Learners(model=run.model, kind=kind, ranks=ranks, dtype=_dtype(kind))
        rollouts, exchanges = run.prompts_per_step * run.group_size, exchanges_of(learners)
        back = run.prompt_tokens + run.lengths.looks_back
        told_s = float(np.mean([sum(line[each] for each in (_PASSES, *_ONCE)) for line in run.steps]))
        untold_s = max(0.0, _busy(run, run.trainer) * run.step_s - told_s)
        for line in run.steps:
            tokens = line["computed_tokens"]
            passes = learners.passes(rollouts, tokens / rollouts, forward=1.0 + BACKWARD, sequences=1e9)
            times = learners.micro_batches(tokens, run.micro_batch_tokens)
            once = [1.0, 0.0, exchanges, learners.update().memory, 0.0, 0.0, 0.0]
            table.add(sum(line[each] for each in _ONCE), once, waits=0.0, **beside)
            layers = times * run.model.layers
            of = [0.0, layers, times * exchanges, 0.0, learners.channels(tokens), passes.compute]
            looks = learners.looks(tokens, back)
            table.add(line[_PASSES] + untold_s, [*of, looks], waits=layers, **beside)
    return table


def _learner_rates(found: Sequence[float], runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    step_s, layer_s, exchange_s, memory, channel_s, compute, look_s, wait_s = found
    if not any(int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"]) > 1 for run in runs):
        exchange_s = _unseen_exchange_s(kind)
    return replace(
        ASSUMED, step_s=step_s, exchange_s=exchange_s, memory=_share(memory), layer_s=layer_s, channel_s=channel_s,
        compute=_share(compute), look_s=look_s, wait_s=wait_s,
    )  # fmt: skip


def _hop_s(runs: Sequence[SeenRun]) -> float:
    """From one operator to the next: what is left of a step in which generator and trainer, of one replica each, are at
    work one after the other, and nobody else is for long."""
    found = []
    for run in runs:
        ends = (run.generator, run.trainer)
        between = [
            node for node, some in run.stretches.items() if node not in ends and any(each.rows_in > 0 for each in some)
        ]
        single = all(int(run.placed[node]["replicas"]) == 1 for node in ends)
        if run.max_staleness == 0 and single and sum(_busy(run, node) for node in between) <= _LITTLE:
            idle = max(0.0, 1 - sum(_busy(run, node) for node in ends))
            found.append(min(_MOST_HOP_S, idle * run.step_s / (len(between) + 1)))
    return float(np.median(found)) if found else ASSUMED_CONSTANTS.hop_s


def _unseen_exchange_s(kind: DeviceKind) -> float:
    """Where no run was cut over ranks."""
    return _CORES_EXCHANGE_S if kind.name == "cpu" else ASSUMED.exchange_s


_NOTHING = Rates(step_s=0.0)


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[Sequence[float], float]:
    """Ridge regression (Hoerl and Kennard, 1970) of seconds relative to their size, no coefficient below 0: what
    columns cannot be told apart by is shared out between them; and of all squares the share that is left."""
    weights = 1 / np.sqrt(np.maximum(0.01 * np.mean(y), y))
    rows, there = x * weights[:, None], y * weights
    scale = np.maximum(np.sqrt((rows**2).sum(axis=0)), 1e-300)
    drawn = np.vstack([rows / scale, _RIDGE * np.eye(len(scale))])
    found, left = non_negative(drawn, np.concatenate([there, np.zeros(len(scale))]))
    return [float(each) for each in found / scale], left / max(1e-300, float(there @ there))


def _share(seconds: float) -> float:
    """Of a full rate, from the seconds that one second at that rate takes."""
    return 1 / seconds if seconds > 1 / _FREE else _FREE


def _rows(runs: Sequence[SeenRun]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a row, and more for each token of its completion, by operator without a model: the processes of a
    scorer are at work with as many rows at once as they have calls.

    Runs whose lengths are alike do not tell the two apart: all is the row's."""
    spent: dict[str, list[tuple[float, float, float]]] = {}
    for run in runs:
        for node, stretches in run.stretches.items():
            if node in (run.generator, run.trainer):
                continue
            more = run.calls_at_once.get(node, 1) - 1
            busy_s = sum(each.busy_s + more * each.beside_s for each in stretches)
            rows = sum(each.rows_out if node in run.scorers else each.rows_in for each in stretches)
            if rows > 0:
                spent.setdefault(node, []).append((busy_s, rows, rows * run.lengths.mean))
    row_s, token_s = dict[str, float](), dict[str, float]()
    for node, found in spent.items():
        busy, rows, tokens = np.array(found).T
        means = tokens / rows
        if means.max() < _UNLIKE * means.min() or not busy.any():
            row_s[node] = float(busy.sum() / rows.sum())
            continue
        weights = 1 / np.maximum(busy, 0.01 * busy.mean())  # each run counts alike, by how far it is off
        (row, token), _ = non_negative(np.column_stack([rows, tokens]) * weights[:, None], busy * weights)
        row_s[node], token_s[node] = float(row), float(token)
    return row_s, token_s


def _dtype(kind: DeviceKind) -> str:
    return "float32" if kind.name == "cpu" else "bfloat16"


def described(constants: Constants) -> str:
    """For people: a line for each kind of operator."""
    found = []
    for role, rates in (("generator", constants.generator), ("learner", constants.learner)):
        each = "decode step" if role == "generator" else "step"
        spent = [f"{1e3 * rates.step_s:.3g} ms a {each}"]
        spent.append(
            f"{1e6 * rates.row_s:.3g} us a rollout in it" if role == "generator"
            else f"{1e3 * rates.layer_s:.3g} ms a layer, {1e9 * rates.channel_s:.3g} ns a channel of a token in a layer"
        )  # fmt: skip
        if rates.end_s:
            spent.append(f"{1e6 * rates.end_s:.3g} us a rollout that ends")
        if rates.look_s:
            spent.append(f"{1e9 * rates.look_s:.3g} ns a number that attention looks at")
        for share, what in ((rates.compute, "of matrix products"), (rates.memory, "of memory's bandwidth")):
            spent.append(f"{share:.1%} {what}" if share < _FREE else f"nothing for {what.partition(' ')[2]}")
        spent.append(f"{1e6 * rates.exchange_s:.3g} us an exchange between ranks")
        if role in constants.parallel:
            spent.append(
                f"n threads {constants.parallel[role]:.2f} n times as fast in what they share out, waiting "
                f"{1e6 * rates.wait_s:.3g} us for each other in a {'step' if role == 'generator' else 'layer'}"
            )
        found.append(f"{'generator' if role == 'generator' else 'trainer'}: {', '.join(spent)}")
    for node, row_s in constants.row_s.items():
        token_s = constants.row_token_s.get(node, 0.0)
        more = f", {1e6 * token_s:.3g} us a token" if token_s else ""
        found.append(f"{node}: {1e6 * row_s:.3g} us a row{more}")
    if constants.alone > 1:
        found.append(f"a process is {constants.alone:.2f} times as fast while no other computes")
    found.append(f"{1e3 * constants.hop_s:.3g} ms from one operator to the next")
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
        return Constants(generator=generator, learner=learner, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GraphError(
            f"'{path}' has no constants that `dataflow calibrate` wrote; found {type(error).__name__}: {error}; "
            f"calibrate again, with --out {path}, or take one of {', '.join(CONSTANTS)}, kernels:VERSION of vLLM"
        ) from None
