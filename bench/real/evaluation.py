"""Held-out accuracy of a model in a folder: greedy, and sampled as it was trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.real.task import Task
from bench.report import Figure
from dataflow import Graph, collect
from operators.rewards import find


def accuracies(task: Task, folder: str, *, samples: int, seed: int = 0) -> dict[str, Figure]:
    """`accuracy`: mean over the held-out questions of so many samples at temperature 1; `greedy`:
    of the likeliest.

    `question_error`: standard error of `accuracy` over the questions; runs that answer the same
    questions share most of it.
    """
    held_out_task = replace(task, policy=folder)
    rewards = {}
    for name, count, temperature in (("accuracy", samples, 1.0), ("greedy", 1, 0.0)):
        g = Graph(name)
        prompts = task.prompts(task.held_out, name="held_out", epochs=1, group_size=count)
        stream = find("number")(held_out_task.generator(temperature=temperature)(g.source(prompts)))
        table = collect(stream, rows=count * len(task.held_out), seed=seed)
        rewards[name] = (
            np.array(table.column("reward").to_pylist(), float).reshape(-1, count).mean(1)
        )
    sampled = rewards["accuracy"]
    return {
        "accuracy": float(sampled.mean()),
        "question_error": float(sampled.std(ddof=1) / len(sampled) ** 0.5),
        "greedy": float(rewards["greedy"].mean()),
        "questions": len(sampled),
        "samples": samples,
    }
