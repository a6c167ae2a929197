"""Where the seconds of a step go, and which share of what the processor can do is reached."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from bench.learning.algorithms import budget
from bench.peaks import matmul_peak, read_bandwidth
from bench.real.generation import EngineStep, paced, stages
from bench.real.runs import Line, chosen, made_once, setting_of
from bench.real.task import Task, task_of
from bench.report import Figure, Report

CASE = "seconds"
RUN, PEAKS = "run", "peaks"
TRAINERS = {"trainer-float32": "float32", "trainer-bfloat16": "bfloat16"}
"""In which its products are."""
GENERATORS: dict[str, dict[str, str]] = {
    "generator-float32": {"dtype": "float32", "weights": "model"},
    "generator-bfloat16": {"dtype": "bfloat16", "weights": "model"},
    "generator-int8": {"dtype": "float32", "weights": "int8_dynamic"},
    "generator-int8-bfloat16": {"dtype": "bfloat16", "weights": "int8_dynamic"},
}
"""What the task's generator is given."""
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Of a number."""
PARTS = (PEAKS, RUN, *TRAINERS, *GENERATORS)
REPEATS = 3
STAGES = ("wait", "forward_backward", "optimizer", "settle", "record", "publish")
"""Of a trainer's step, as metrics.jsonl names them."""


def seconds(
    options: argparse.Namespace, flags: Sequence[str], about: Mapping[str, Figure]
) -> list[Line]:
    """Every part once, in a process of its own, and a table of each kind."""
    lines = made_once(
        options,
        CASE,
        [(part, 0) for part in chosen(options, PARTS)],
        flags=flags,
        about=about,
        describe=told,
    )
    hidden = {"case", "setting", "seed", "failed", *about}
    table = Report("real")
    for kind in (PEAKS, RUN, "trainer", "generator"):
        for line in lines:
            if line["system"].startswith(kind):
                shown = {
                    key: value
                    for key, value in line.items()
                    if key not in hidden and key != "system"
                }
                table.add(case=f"{kind}: {setting_of(options)}", system=line["system"], **shown)
    table.show(Console(width=max(170, Console().width)))
    return lines


def told(line: Line) -> str:
    """One part in a line."""
    figures = [
        (name, value)
        for name, value in line.items()
        if isinstance(value, float) and name != "peak_mib"
    ]
    return ", ".join(f"{name} {value:.3g}" for name, value in figures[:8])


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one part, in this process."""
    task = task_of(options)
    if name == PEAKS:
        return peaks(options.threads)
    if name == RUN:
        return of_run(task, options)
    if name in TRAINERS:
        return of_trainer(replace(task, dtype=TRAINERS[name]), options.threads)
    changed: Any = GENERATORS[name]
    return of_generator(replace(task, **changed), options.threads)


def peaks(threads: int) -> dict[str, Figure]:
    """1e9 operations per second of products, and GB per second read."""
    by_name: dict[str, Figure] = {
        f"{dtype}_gflops": matmul_peak(dtype, threads) / 1e9 for dtype in BYTES
    }
    return by_name | {"read_gb_per_s": read_bandwidth(threads) / 1e9}


def of_run(task: Task, options: argparse.Namespace) -> dict[str, Figure]:
    """Medians over the steps of a whole run after the first, by what the trainer was at; nothing
    but what runs record.

    generating: seconds that the generator was at work, a step. exchange: that it took new weights
    over, beside the trainer's `publish`. `signal`: share of the groups that had any.
    """
    from dataflow import run

    prompts = task.prompts(budget(task.train, options.steps * task.prompts_per_step, 0), epochs=1)
    graph = task.graph("seconds", prompts, max_staleness=options.max_staleness)
    with tempfile.TemporaryDirectory() as runs:
        result = run(graph, runs=runs, quiet=True)
        steps = [line for line in result.metrics if line.get("node") == "trainer"]
    counted = steps[1:] or steps
    ends = [line["seconds"] for line in steps]

    def median(name: str) -> float:
        return statistics.median(float(line.get(name) or 0.0) for line in counted)

    return {
        "max_staleness": options.max_staleness,
        "step_s": (ends[-1] - ends[0]) / max(1, len(ends) - 1),
        **{f"{stage}_s": median(f"seconds_{stage}") for stage in STAGES},
        "exchange_s": median("weights_reader_seconds"),
        "generating_s": result.busy_seconds.get("generator", 0.0) / max(1, len(steps)),
        "efficiency": result.efficiency,
        "signal": median("signal_share"),
        "computed_tokens": median("computed_tokens"),
        "rollouts_per_s": task.rollouts_per_step * (len(ends) - 1) / (ends[-1] - ends[0])
        if len(ends) > 1
        else None,
        "staleness": statistics.mean(line["staleness_mean"] for line in steps),
    }


def of_trainer(task: Task, threads: int) -> dict[str, Figure]:
    """A step of the learner on rollouts of the policy, all of which have a signal; medians over the
    repeats.

    gflops: multiplications and additions of the model's matrices, forward once and backward twice,
    per second of forward and backward. share: of the peak in the format of its products.
    """
    from operators import Trainer
    from operators.training.learner import learner as learning
    from operators.training.learner.build import make_learner
    from operators.training.learner.rows import pack, step_rows

    torch.set_num_threads(threads)
    batches = signalling(task)
    trainer = Trainer(task.model, prompts_per_step=task.prompts_per_step, lr=task.lr)
    learner = make_learner(trainer, trainer.model, node="trainer", device="cpu")
    spent: dict[str, float] = {}

    def counting(*arguments: Any, **knobs: Any) -> Any:
        packed = pack(*arguments, **knobs)
        spent["nodes"] = spent.get("nodes", 0.0) + packed.nodes
        spent["heads"] = spent.get("heads", 0.0) + len(packed.heads_U)
        return packed

    turns = []
    for _ in range(REPEATS + 1):
        spent.clear()
        with (
            mock.patch.object(learning, "pack", counting),
            mock.patch.object(
                learner.forward, "computed", timed(learner.forward.computed, spent, "forward_s")
            ),
            mock.patch.object(
                torch.autograd, "backward", timed(torch.autograd.backward, spent, "backward_s")
            ),
        ):
            began = time.perf_counter()
            rows = step_rows(batches, learner.loss.columns)
            for part in learner.begin(rows, 0):
                learner.micro(part)
            computed = time.perf_counter()
            learner.end(task.lr)
        ended = time.perf_counter()
        spent |= {"update_s": ended - computed, "step_s": ended - began}
        spent["rest_s"] = computed - began - spent["forward_s"] - spent["backward_s"]
        turns.append(dict(spent))
    middle = {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[-1]}
    layers, head = matrices(learner.module)
    operations = 6 * (layers * middle["nodes"] + head * middle["heads"])
    flops = operations / (middle["forward_s"] + middle["backward_s"])
    return {
        "step_s": middle["step_s"],
        "forward_s": middle["forward_s"],
        "backward_s": middle["backward_s"],
        "update_s": middle["update_s"],
        "rest_s": middle["rest_s"],
        "positions": middle["nodes"],
        "heads": middle["heads"],
        "positions_per_s": middle["nodes"] / middle["step_s"],
        "gflops": flops / 1e9,
        "share": flops / matmul_peak(task.dtype, threads),
    }


def timed(function: Any, spent: dict[str, float], name: str) -> Any:
    """The function, its seconds added up under that name."""

    def call(*arguments: Any, **knobs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **knobs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    return call


def signalling(task: Task) -> list[pa.RecordBatch]:
    """A step's groups as a trainer gets them, every other rollout with advantage 1, the others with
    -1.
    """
    from dataflow import Graph, collect
    from operators.credit import advantage
    from operators.rewards import find

    g = Graph("rollouts")
    stream = advantage(find("number")(task.generator()(g.source(task.prompts(task.train)))))
    table = collect(stream, rows=task.rollouts_per_step)
    signs = pa.array(
        np.where(np.arange(len(table)) % 2, 1.0, -1.0), table.schema.field("advantage").type
    )
    table = table.set_column(
        table.schema.get_field_index("advantage"), "advantage", signs
    ).drop_columns(["reward"])
    first = range(0, len(table), task.group_size)
    return [table.slice(begin, task.group_size).combine_chunks().to_batches()[0] for begin in first]


def of_generator(task: Task, threads: int) -> dict[str, Figure]:
    """A step's rollouts by our engine alone: its stages, and what share of the peaks they reach.

    The head is what remains when the layers are taken away: from the time of a decoding step with
    half of them. Shares are of the peak of the layers' number format. bandwidth_share: bytes of the
    weights, read once a step of decoding, of what memory gives.
    """
    from operators.models.loading import load_merged

    with opened(task, threads) as step:
        figures = paced(step, task, REPEATS)
        spent = stages(step)
        count = step.engine.model.config.num_hidden_layers
    fewer = max(1, count // 2)
    with opened(task, threads, layers=fewer) as step:
        step.run(0)
        half = stages(step)
    layers, head = matrices(load_merged(task.model, device="cpu")[0])
    a_step, a_half = (measure["decode_s"] / measure["decode_steps"] for measure in (spent, half))
    a_layer = (a_step - a_half) / max(1, count - fewer)
    head_s = max(0.0, a_step - count * a_layer) if count > fewer else None
    prefilled = (
        2 * (layers * spent["prefill_tokens"] + head * spent["prefill_rows"]) / spent["prefill_s"]
    )
    decoded = 2 * (layers + head) * spent["decode_computed"] / spent["decode_s"]
    products = "int8" if task.weights == "int8_dynamic" else task.dtype
    peak, read = matmul_peak(products, threads), read_bandwidth(threads)
    weights = layers * BYTES[products] + head * BYTES[task.dtype]
    return figures | {
        "prefill_s": spent["prefill_s"],
        "decode_s": spent["decode_s"],
        "draw_s": spent["draw_s"],
        "rest_s": spent["seconds"] - spent["prefill_s"] - spent["decode_s"] - spent["draw_s"],
        "head_s": None if head_s is None else head_s * spent["decode_steps"],
        "prefill_tokens": spent["prefill_tokens"],
        "rows": spent["decode_rows"] / spent["decode_steps"],
        "computed_rows": spent["decode_computed"] / spent["decode_steps"],
        "prefill_gflops": prefilled / 1e9,
        "prefill_share": prefilled / peak,
        "decode_gflops": decoded / 1e9,
        "decode_share": decoded / peak,
        "bandwidth_share": weights / a_step / read,
    }


@contextlib.contextmanager
def opened(task: Task, threads: int, layers: int | None = None) -> Iterator[EngineStep]:
    """Our engine with the task's prompts, ended afterwards."""
    step = EngineStep(task, task.generator(), threads, layers)
    try:
        yield step
    finally:
        step.close()


def matrices(model: Any) -> tuple[int, int]:
    """Numbers in the matrices of the layers, and in the head's, which an embedding may share."""
    head = int(model.get_output_embeddings().weight.numel())
    layers = sum(
        int(weight.numel()) for weight in model.model.layers.parameters() if weight.dim() == 2
    )
    return layers, head
