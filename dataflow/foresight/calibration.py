"""Constants that fit run folders: `dataflow calibrate`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.fitting import Beside, CostTable, best, non_negative
from dataflow.foresight.generation import GeneratorReplica
from dataflow.foresight.rates import ASSUMED, ASSUMED_CONSTANTS, PARALLEL, Constants, Rates
from dataflow.foresight.scenarios import exchanges_of
from dataflow.foresight.seen import ActivitySpan, Decoded, SeenRun
from dataflow.foresight.simulation.clock import Processors
from dataflow.foresight.steps import CONSTANTS
from dataflow.foresight.training import BACKWARD, Learners

_FREE = 1e6
"""The share of a rate that is reached where the runs' seconds do not depend on it."""
_GENERATOR_ON_CORES = (0.275e-3, 4.6e-6, 17e-6, 5.5e-6, 2.0e-3, 0.25, 0.9, 0.36e-9, 0.1e-3)
_LEARNER_ON_CORES = (5e-3, 2.3e-3, 1.75e-3, 1.0, 105e-9, 1.1, 0.5e-9, 0.2e-3)
"""Seconds of each column on two cores of an AMD EPYC with AVX-512, by some forty runs of small
models together: what runs do not tell apart is in proportion to these."""
_PASSES = "seconds_forward_backward"
_ONCE = ("seconds_optimizer", "seconds_record", "seconds_publish")
"""What a line of metrics.jsonl has of a training step."""
_UNLIKE = 1.5
"""Completions of one run must be this many times as long as another's, to tell tokens from rows."""
_MOST_HOP_S, _LITTLE = 0.02, 0.1
"""The longest hop between two operators; and the share of a step that the operators between
generator and trainer may take for it to be measured."""


def calibrate(runs: Sequence[SeenRun], kind: str = "cpu") -> Constants:
    """Rates that come nearest to what these runs took, none below 0; what the runs do not tell
    apart is shared out.

    Runs of several sizes of models, steps and batches do; on cores one in which generator and
    trainer wait for each other, and one in which they do not. GraphError for no runs, or for runs
    on another kind of device.
    """
    if not runs:
        raise GraphError("a calibration needs run folders; name one or more")
    for run in runs:
        on_cpu = not any(placement.get("gpus") for placement in run.placed.values())
        if on_cpu != (kind == "cpu"):
            raise GraphError(
                f"run '{run.path}' computed {'on cores' if on_cpu else 'on accelerators'}, but kind"
                f" is '{kind}'; say which kind it was by --kind"
            )
    device = device_kind(kind)
    names = ", ".join(run.path.resolve().name for run in runs)
    alone, (generator, learner) = best(
        (_generators(runs, device), _learners(runs, device)), on_cores=kind == "cpu"
    )
    row_s, row_token_s = _rows(runs, alone)
    return Constants(
        generator=_generator_rates(generator.rates, runs, device),
        learner=_learner_rates(learner.rates, runs, device),
        parallel={
            role: fit.parallel
            for role, fit in (("generator", generator), ("learner", learner))
            if fit.has_threads
        },
        row_s=row_s,
        row_token_s=row_token_s,
        alone=alone,
        hop_s=_hop_s(runs),
        computed=float(np.mean([run.computed for run in runs])),
        source=f"calibrated on {names}",
    )


def _busy(run: SeenRun, node: str) -> float:
    """Share of the time in which a node is busy, in the mean of its replicas."""
    seconds = sum(stretch.seconds for stretch in run.stretches[node]) * int(
        run.placed[node]["replicas"]
    )
    return (
        min(1.0, sum(stretch.busy_s for stretch in run.stretches[node]) / seconds)
        if seconds
        else 0.0
    )


def _beside(run: SeenRun, node: str) -> Beside:
    """What else of a run computes on the cores while a process of this node does. Each other node
    counts by itself: by its busy share, or its share of the time that a trainer in turn leaves.
    """
    placed = run.placed[node]
    if placed.get("gpus"):
        return Beside()
    idle_share = (
        1.0 if run.max_staleness or node == run.trainer else max(1e-6, 1 - _busy(run, run.trainer))
    )
    shares = {_threads(placed): 1.0}
    """The probability of each number of busy threads."""
    for neighbour in (
        node_beside for node_beside in run.stretches if _meets(run, node, node_beside)
    ):
        busy, more = min(1.0, _busy(run, neighbour) / idle_share), _threads(run.placed[neighbour])
        for _ in range(int(run.placed[neighbour]["replicas"]) - (neighbour == node)):
            shares = _sum(shares, {0: 1 - busy, more: busy})
    full, fast = (Processors(cores=run.cores, alone=alone) for alone in (1.0, 2.0))
    share = sum(part * full.speed(many) for many, part in shares.items())
    faster = sum(part * fast.speed(many) for many, part in shares.items())
    return Beside(threads=int(placed.get("threads", 1)), share=share, idle=faster - share)


def _meets(run: SeenRun, node: str, other: str) -> bool:
    """Whether the other node computes on the same cores, at times at once. Sources (little to do),
    nodes that wait for something elsewhere, and a trainer in turn do not.
    """
    if run.placed[other].get("gpus") or run.calls_at_once.get(other, 1) > 1:
        return False
    if run.trainer in (node, other):
        return run.max_staleness > 0
    return any(stretch.rows_in or stretch.tokens for stretch in run.stretches[other])


def _threads(placed: Mapping[str, Any]) -> int:
    """Threads of all processes of a replica."""
    return int(placed.get("ranks", 1)) * int(placed.get("threads", 1))


def _sum(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The distribution of the sum of two independent numbers."""
    distribution = defaultdict[int, float](float)
    for (a, p), (b, q) in itertools.product(one.items(), other.items()):
        distribution[a + b] += p * q
    return distribution


def _generators(runs: Sequence[SeenRun], kind: DeviceKind) -> CostTable:
    """Of each run its decode steps that began nothing, by about how many rollouts they carried on,
    and the rest.

    Columns: steps, rollouts in them, those that end, their tokens; exchanges, memory; products,
    numbers that are looked at.
    """
    table = CostTable(
        serial=slice(0, 4),
        shared=slice(6, 8),
        parallel=PARALLEL["generator"],
        assumed=_GENERATOR_ON_CORES if kind.name == "cpu" else None,
    )
    for number, run in enumerate(runs):
        beside = _beside(run, run.generator)
        ranks = int(run.placed[run.generator]["ranks"])
        replica = GeneratorReplica(
            model=run.model, kind=kind, tensor_parallel=ranks, dtype=_dtype(kind)
        )
        weights_read = replica.step(0.0, 0.0, _NOTHING).memory

        def spent(
            steps: float,
            tokens: float,
            context: float,
            ends: float = 0.0,
            prompts: float = 0.0,
            run: SeenRun = run,
            replica: GeneratorReplica = replica,
            weights_read: float = weights_read,
        ) -> list[float]:
            token = replica.step(1.0, context, _NOTHING)
            memory = steps * weights_read + tokens * (token.memory - weights_read)
            return [
                steps,
                tokens,
                ends,
                ends * run.lengths.mean,
                steps * replica.exchanges,
                memory,
                tokens * token.compute + prompts,
                replica.looks(tokens, context),
            ]

        spans = run.stretches[run.generator]
        steps, tokens, looked, ends, busy_s = (
            sum(getattr(span, name) for span in spans)
            for name in ("steps", "tokens", "looked", "rows_out", "busy_s")
        )
        for size in _sizes(spans):
            context = _context(run, size.looked, size.rollouts)
            waits = size.steps if size.rollouts > size.steps else 0.0
            table.add(
                number,
                size.seconds,
                spent(size.steps, size.rollouts, context),
                waits=waits,
                beside=beside,
            )
            steps, tokens, looked = steps - size.steps, tokens - size.rollouts, looked - size.looked
            busy_s -= size.seconds
        prompts = run.model.forward(
            ends / run.group_size * run.prompt_tokens, run.prompt_tokens / 2
        )
        prompts /= replica.ranks * kind.rate(replica.dtype)
        steps, tokens = max(0.0, steps), max(0.0, tokens)
        amounts = spent(steps, tokens, _context(run, looked, tokens), ends, prompts)
        table.add(number, max(0.0, busy_s), amounts, waits=steps, beside=beside)
    return table


def _sizes(spans: Sequence[ActivitySpan]) -> list[Decoded]:
    """Decode steps of a whole run, by about how many rollouts they carried on, to a power of 2."""
    by_size = defaultdict[int, list[Decoded]](list)
    for decoded in (size for span in spans for size in span.decoded if size.steps):
        by_size[round(math.log2(max(1.0, decoded.rollouts / decoded.steps)))].append(decoded)
    names = ("steps", "rollouts", "looked", "seconds")
    return [
        Decoded(**{name: sum(getattr(size, name) for size in alike) for name in names})
        for alike in by_size.values()
    ]


def _context(run: SeenRun, looked: float, tokens: float) -> float:
    """Tokens that each rollout looks back at, in the mean; over all rollouts where the run does not
    say.
    """
    return (
        looked / tokens if min(looked, tokens) > 0 else run.prompt_tokens + run.lengths.looks_back
    )


def _generator_rates(fitted: Sequence[float], runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    step_s, row_s, end_s, end_token_s, exchange_s, memory, compute, look_s, wait_s = fitted
    if kind.name != "cpu" and not any(int(run.placed[run.generator]["ranks"]) > 1 for run in runs):
        exchange_s = ASSUMED.exchange_s
    return replace(
        ASSUMED,
        step_s=step_s,
        row_s=row_s,
        end_s=end_s,
        end_token_s=end_token_s,
        exchange_s=exchange_s,
        compute=_share(compute),
        memory=_share(memory),
        look_s=look_s,
        wait_s=wait_s,
    )


def _learners(runs: Sequence[SeenRun], kind: DeviceKind) -> CostTable:
    """As `_generators`: of each step its passes, and what is done once.

    Columns: steps, layers; exchanges, memory; hidden states, products, numbers that are looked
    at.
    """
    table = CostTable(
        serial=slice(0, 2),
        shared=slice(4, 7),
        parallel=PARALLEL["learner"],
        assumed=_LEARNER_ON_CORES if kind.name == "cpu" else None,
    )
    for number, run in enumerate(runs):
        beside = _beside(run, run.trainer)
        ranks = int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"])
        learners = Learners(model=run.model, kind=kind, ranks=ranks, dtype=_dtype(kind))
        rollouts, exchanges = run.prompts_per_step * run.group_size, exchanges_of(learners)
        back = run.prompt_tokens + run.lengths.looks_back
        told_s = float(
            np.mean([sum(line[column] for column in (_PASSES, *_ONCE)) for line in run.steps])
        )
        untold_s = max(0.0, _busy(run, run.trainer) * run.step_s - told_s)
        for line in run.steps:
            tokens = line["computed_tokens"]
            passes = learners.passes(
                rollouts, tokens / rollouts, forward=1.0 + BACKWARD, sequences=1e9
            )
            times = learners.micro_batches(tokens, run.micro_batch_tokens)
            amounts = [1.0, 0.0, exchanges, learners.update().memory, 0.0, 0.0, 0.0]
            table.add(
                number, sum(line[column] for column in _ONCE), amounts, waits=0.0, beside=beside
            )
            layers = times * run.model.layers
            of = [0.0, layers, times * exchanges, 0.0, learners.channels(tokens), passes.compute]
            looks = learners.looks(tokens, back)
            table.add(number, line[_PASSES] + untold_s, [*of, looks], waits=layers, beside=beside)
    return table


def _learner_rates(fitted: Sequence[float], runs: Sequence[SeenRun], kind: DeviceKind) -> Rates:
    step_s, layer_s, exchange_s, memory, channel_s, compute, look_s, wait_s = fitted
    ranks = max(
        int(run.placed[run.trainer]["ranks"]) * int(run.placed[run.trainer]["replicas"])
        for run in runs
    )
    if kind.name != "cpu" and ranks == 1:
        exchange_s = ASSUMED.exchange_s
    return replace(
        ASSUMED,
        step_s=step_s,
        exchange_s=exchange_s,
        memory=_share(memory),
        layer_s=layer_s,
        channel_s=channel_s,
        compute=_share(compute),
        look_s=look_s,
        wait_s=wait_s,
    )


def _hop_s(runs: Sequence[SeenRun]) -> float:
    """From one operator to the next: what is left of a step in which generator and trainer, of one
    replica each, are at work one after the other, and nobody else is for long.
    """
    hops_s = []
    for run in runs:
        ends = (run.generator, run.trainer)
        between = [
            node
            for node, some in run.stretches.items()
            if node not in ends and any(stretch.rows_in > 0 for stretch in some)
        ]
        single = all(int(run.placed[node]["replicas"]) == 1 for node in ends)
        if (
            run.max_staleness == 0
            and single
            and sum(_busy(run, node) for node in between) <= _LITTLE
        ):
            idle = max(0.0, 1 - sum(_busy(run, node) for node in ends))
            hops_s.append(min(_MOST_HOP_S, idle * run.step_s / (len(between) + 1)))
    return float(np.median(hops_s)) if hops_s else ASSUMED_CONSTANTS.hop_s


_NOTHING = Rates(step_s=0.0)


def _share(seconds: float) -> float:
    """Share of a full rate, from the seconds that a second at the full rate takes."""
    return 1 / seconds if seconds > 1 / _FREE else _FREE


def _rows(runs: Sequence[SeenRun], alone: float) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a row, and more for each token of its completion, by operator without a model: the
    processes of a scorer are at work with as many rows at once as they have calls.

    Runs whose lengths are alike do not tell the two apart: all is the row's.
    """
    spent: dict[str, list[tuple[float, float, float]]] = {}
    for run in runs:
        for node, stretches in run.stretches.items():
            if node in (run.generator, run.trainer):
                continue
            more = run.calls_at_once.get(node, 1) - 1
            busy_s = sum(stretch.busy_s + more * stretch.beside_s for stretch in stretches)
            rows = sum(
                stretch.rows_out if node in run.scorers else stretch.rows_in
                for stretch in stretches
            )
            if more == 0:
                busy_s *= _beside(run, node).speed(alone)
            if rows > 0:
                spent.setdefault(node, []).append((busy_s, rows, rows * run.lengths.mean))
    row_s, token_s = dict[str, float](), dict[str, float]()
    for node, amounts in spent.items():
        busy, rows, tokens = np.array(amounts).T
        means = tokens / rows
        if means.max() < _UNLIKE * means.min() or not busy.any():
            row_s[node] = float(busy.sum() / rows.sum())
            continue
        # each run counts alike, by how far it is off
        weights = 1 / np.maximum(busy, 0.01 * busy.mean())
        (row, token), _ = non_negative(
            np.column_stack([rows, tokens]) * weights[:, None], busy * weights
        )
        row_s[node], token_s[node] = float(row), float(token)
    return row_s, token_s


def _dtype(kind: DeviceKind) -> str:
    return "float32" if kind.name == "cpu" else "bfloat16"


def described(constants: Constants) -> str:
    """Text: a line for each kind of operator."""
    lines = []
    for role, rates in (("generator", constants.generator), ("learner", constants.learner)):
        unit = "decode step" if role == "generator" else "step"
        spent = [f"{1e3 * rates.step_s:.3g} ms a {unit}"]
        spent.append(
            f"{1e6 * rates.row_s:.3g} us a rollout in it"
            if role == "generator"
            else (
                f"{1e3 * rates.layer_s:.3g} ms a layer, {1e9 * rates.channel_s:.3g} ns a channel of"
                " a token in a layer"
            )
        )
        if rates.end_s or rates.end_token_s:
            spent.append(
                f"{1e6 * rates.end_s:.3g} us a rollout that ends and {1e6 * rates.end_token_s:.3g}"
                " us its token"
            )
        if rates.look_s:
            spent.append(f"{1e9 * rates.look_s:.3g} ns a number that attention looks at")
        for share, operation in (
            (rates.compute, "of matrix products"),
            (rates.memory, "of memory's bandwidth"),
        ):
            spent.append(
                f"{share:.1%} {operation}"
                if share < _FREE
                else f"nothing for {operation.partition(' ')[2]}"
            )
        spent.append(f"{1e6 * rates.exchange_s:.3g} us an exchange between ranks")
        if role in constants.parallel:
            spent.append(
                f"n threads {constants.parallel[role]:.2f} n times as fast in what they share out,"
                f" waiting {1e6 * rates.wait_s:.3g} us for each other in a"
                f" {'step' if role == 'generator' else 'layer'}"
            )
        lines.append(f"{'generator' if role == 'generator' else 'trainer'}: {', '.join(spent)}")
    for node, row_s in constants.row_s.items():
        token_s = constants.row_token_s.get(node, 0.0)
        more = f", {1e6 * token_s:.3g} us a token" if token_s else ""
        lines.append(f"{node}: {1e6 * row_s:.3g} us a row{more}")
    if constants.alone > 1:
        lines.append(f"a process is {constants.alone:.2f} times as fast while no other computes")
    lines.append(f"{1e3 * constants.hop_s:.3g} ms from one operator to the next")
    lines.append(f"a trainer passes over {constants.computed:.0%} of the tokens")
    return "\n".join(lines)


def to_plain(constants: Constants) -> dict[str, Any]:
    """JSON values."""
    return dataclasses.asdict(constants)


def read_constants(text: str) -> Constants:
    """What `dataflow calibrate` wrote into a file of that name; or one of `steps.CONSTANTS`, for a
    generator's seconds.

    GraphError where it is something else.
    """
    if text.partition(":")[0] in CONSTANTS:
        return replace(ASSUMED_CONSTANTS, decode=text)
    path = Path(text)
    try:
        plain = json.loads(path.read_text("utf-8"))
        generator, learner = (Rates(**plain.pop(role)) for role in ("generator", "learner"))
        return Constants(generator=generator, learner=learner, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise GraphError(
            f"'{path}' has no constants that `dataflow calibrate` wrote; found"
            f" {type(error).__name__}: {error}; calibrate again, with --out {path}, or take one of"
            f" {', '.join(CONSTANTS)}, kernels:VERSION of vLLM"
        ) from None
