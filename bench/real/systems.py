"""The same model, prompts, batch and steps by other systems: whole loops, and generators alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.end_to_end.cases import Case
from bench.real.runs import Line, chosen, made_once, setting_of
from bench.real.task import Task, folder_of, task_of
from bench.report import Figure, Report

CASE = "systems"
NARROW = "-bfloat16"
"""Ends the name of a system that multiplies in it; the others do in float32."""
LOOPS = ("async", "sync", "async-bfloat16", "sync-bfloat16", "plain", "trl")
GENERATORS = (
    "ours",
    "ours-bfloat16",
    "hf_generate",
    "hf_generate-bfloat16",
    "vllm_cpu",
    "vllm_cpu-bfloat16",
)
SYSTEMS = (*LOOPS, *GENERATORS)
WARMUP = {"async": 6, "sync": 1, "plain": 1, "trl": 1}
"""Steps of a loop that do not count; the asynchronous one's fill its queues."""
PACE_CASE = "asynchronous"
PACE = ("sync", "async")
REPEATS = 3
SHOWN = {
    "step_s": "s a step",
    "seconds": "s for its rollouts",
    "rollouts_per_s": "rollouts/s",
    "tokens_per_s": "tokens/s",
    "efficiency": "efficiency",
    "peak_mib": "peak MiB",
    "startup_s": "start s",
    "steps": "steps",
    "tokens": "tokens",
    "skipped": "skipped",
    "failed": "failed",
}


def systems(
    options: argparse.Namespace, flags: Sequence[str], about: Mapping[str, Figure]
) -> list[Line]:
    """Every system once, in a process of its own; a table of loops and one of generators."""
    runs = [(name, 0) for name in chosen(options, SYSTEMS)]
    lines = made_once(options, CASE, runs, flags=flags, about=about, describe=told)
    show(lines, {"whole loops": LOOPS, "generators alone": GENERATORS}, setting_of(options))
    return lines


def asynchronous(
    options: argparse.Namespace, flags: Sequence[str], about: Mapping[str, Figure]
) -> list[Line]:
    """Our graph with max_staleness 0 and 4, in turns over the seeds."""
    runs = [(name, seed) for seed in range(options.seeds) for name in chosen(options, PACE)]
    lines = made_once(options, PACE_CASE, runs, flags=flags, about=about, describe=told)
    show(lines, {"asynchronous beside synchronous": PACE}, setting_of(options))
    return lines


def show(lines: Sequence[Line], tables: Mapping[str, Sequence[str]], setting: str) -> None:
    """A table of each kind; several runs of a system as their medians."""
    from bench.end_to_end.pace import medians

    table = Report("real")
    for title, names in tables.items():
        for name in names:
            mine = [line for line in lines if line["system"] == name]
            good = [line for line in mine if "failed" not in line and "skipped" not in line]
            if mine:
                middle: dict[str, Any] = dict(medians(good)) if good else dict(mine[0])
                shown = {
                    SHOWN[key]: middle.get(key) for key in SHOWN if middle.get(key) is not None
                }
                table.add(case=f"{title}: {setting}", system=name, runs=len(good), **shown)
    table.show(Console(width=max(140, Console().width)))


def told(line: Line) -> str:
    """One run in a line."""
    seconds = line.get("step_s") or line.get("seconds") or 0.0
    return (
        f"{seconds:.2f} s, {line['rollouts_per_s']:.1f} rollouts/s, {line['tokens_per_s']:,.0f}"
        " tokens/s"
    )


def run_system(name: str, _: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one system, in this process."""
    kind = name.removesuffix(NARROW)
    task = replace(task_of(options), dtype="float32" if kind == name else "bfloat16")
    return run_loop(kind, task, 0, options) if name in LOOPS else run_generator(kind, task, options)


def run_paced(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of our graph, which multiplies as the flags say."""
    return run_loop(name, task_of(options), seed, options)


def run_loop(name: str, task: Task, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and rates of a whole loop, over the steps that count."""
    from bench.end_to_end.__main__ import has_trl
    from bench.end_to_end.pace import figures
    from bench.end_to_end.systems import cooldown
    from bench.end_to_end.systems import run_system as run_loop

    born = time.time()
    if name == "trl" and not has_trl():
        return {"skipped": "TRL is not installed; pip install 'dataflow-rl[bench]'"}
    case = case_of(task, options)
    measured = run_loop(name, case, seed=seed, threads=options.threads, born=born)
    return figures(measured, warmup=case.warmup[name], cooldown=cooldown(name), level=None)


def case_of(task: Task, options: argparse.Namespace) -> Case:
    """The task as the end-to-end bench has it: prompts laid out by the model's template beforehand,
    as text.
    """
    from transformers import AutoTokenizer

    from bench.end_to_end.pace import GROUP_SIZE
    from bench.real.generation import laid_out
    from operators.rewards.match import number

    if task.group_size != GROUP_SIZE:
        raise SystemExit(
            f"--systems compares groups of {GROUP_SIZE}, but --group-size is {task.group_size}"
        )
    folder = folder_of(task.policy)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lay = (lambda prompt: laid_out(tokenizer, prompt)) if task.chat else str
    few = {"plain": options.few_steps, "trl": options.few_steps}
    return Case(
        name="real",
        policy=folder,
        rows=tuple(row | {"prompt": lay(row["prompt"])} for row in task.train),
        reward=number,
        max_tokens=task.max_tokens,
        lr=task.lr,
        prompts_per_step=task.prompts_per_step,
        dtype=task.dtype,
        steps=dict.fromkeys(WARMUP, options.steps) | few,
        warmup=WARMUP,
    )


def run_generator(name: str, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of one step's rollouts by a generator alone."""
    from bench.real.generation import EngineStep, HfStep, paced
    from operators.models.folders import ModelError

    if name == "hf_generate":
        return paced(HfStep(task, str(folder_of(task.policy)), options.threads), task, REPEATS)
    try:
        step = EngineStep(
            task, task.generator(engine="vllm" if name == "vllm_cpu" else "native"), options.threads
        )
    except ModelError as error:
        if name == "ours":
            raise
        return {"skipped": str(error)}
    try:
        return paced(step, task, REPEATS)
    finally:
        step.close()
