"""A whole graph that shares one GPU: generator and trainer as two processes, asynchronous and
synchronous.

    python -m bench.gpu --only shared

max_staleness 4 (async) and 0 (sync); rollouts_per_s over the steps after the first ones, of a model
of random weights whose completions are all as long as they may be. Each graph is run by a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.systems import QWEN3_06B, TINY, Shape, make_model
from bench.gpu.trainer import LEAST_S
from bench.report import Figure, Report

SHARED_S = 120.0
"""Most seconds of one whole graph."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The whole graph."""

    shape: Shape
    steps: int = 6
    warm: int = 4
    """Steps before the first that counts: the asynchronous graph fills its pipeline."""
    prompts_per_step: int = 8
    group_size: int = 8
    max_tokens: int = 256


SHARED = Sharing(shape=QWEN3_06B)
"""Qwen3-0.6B's sizes: a tokenizer of words beside a Qwen 2 is read as that family's own, which
knows none of them."""
TINY_SHARED = Sharing(
    shape=TINY["tiny"], steps=3, warm=1, prompts_per_step=2, group_size=2, max_tokens=8
)
STALENESS = {"async": 4, "sync": 0}


def measure_shared(
    report: Report, system: str, seconds: float, device: torch.device, tiny: bool = False
) -> bool:
    """A row for the graph of this staleness, in a process of its own, within `seconds`; whether it
    did not fail.
    """
    if seconds < LEAST_S:
        report.add(case="shared", system=system, skipped="too little time is left")
        return True
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "bench.gpu.shared",
            system,
            device.type,
            str(int(tiny)),
            str(out),
        ]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                timeout=min(SHARED_S, seconds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr)
            failed = {"skipped": f"failed: {done.stdout[-400:]}"}
            figures = failed if done.returncode else json.loads(out.read_text())
        except subprocess.TimeoutExpired:
            figures = {"skipped": f"failed: did not end within {min(SHARED_S, seconds):.0f} s"}
    report.add(case="shared", system=system, **figures)
    return "skipped" not in figures


def run_shared(system: str, device: str, sharing: Sharing) -> dict[str, Figure]:
    """The figures of one graph, run in processes."""
    from dataflow import Graph, Model, run, scorer
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo

    @scorer(isolate=False)
    def reward(tokens: list[int]) -> float:
        return float(tokens[-1] % 2)

    with tempfile.TemporaryDirectory() as folder:
        g = Graph(f"shared-{system}")
        policy = save_policy(Path(folder) / "policy", sharing.shape)
        model = Model(str(policy), dtype="bfloat16" if device == "cuda" else "float32")
        most = sharing.max_tokens + 16
        generator = Generator(
            model,
            group_size=sharing.group_size,
            max_tokens=sharing.max_tokens,
            context_tokens=most,
            cache_bytes=8 * 2**30 if device == "cuda" else None,
        )
        trainer = Trainer(
            model, loss=partial(aipo, rho=4.0), prompts_per_step=sharing.prompts_per_step, lr=1e-6
        )
        prompts = Prompts([{"prompt": f"w{1 + n % 50} w{1 + n % 31}"} for n in range(1_000)])
        trainer(advantage(reward(generator(g.source(prompts)))))
        g.feedback(trainer.weights, generator, max_staleness=STALENESS[system])
        total = sharing.warm + sharing.steps + STALENESS[system] + 1
        gpus: dict[str, int | str] | None = (
            {"generator": 1, "trainer": "generator"} if device == "cuda" else None
        )
        result = run(g, gpus=gpus, steps=total, runs=Path(folder) / "runs", quiet=True)
        return shared_figures(result.metrics, sharing, result.efficiency)


def shared_figures(
    metrics: Sequence[dict[str, Any]], sharing: Sharing, efficiency: float
) -> dict[str, Figure]:
    """Over the steps that count: without the first, and those for which nothing is generated any
    more meanwhile.
    """
    counted = metrics[sharing.warm - 1 : sharing.warm + sharing.steps]
    seconds = counted[-1]["seconds"] - counted[0]["seconds"]
    return {
        "rollouts_per_s": sum(line["rollouts"] for line in counted[1:]) / seconds,
        "seconds": seconds,
        "staleness": float(np.mean([line["staleness_mean"] for line in counted[1:]])),
        "efficiency": efficiency,
    }


def save_policy(folder: Path, shape: Shape) -> Path:
    """The model of random weights with a tokenizer of words, as a Hugging Face folder."""
    from bench.generator.cases import save_words

    make_model(shape, torch.device("cpu"), torch.bfloat16).save_pretrained(folder)
    save_words(folder, min(1_000, shape.sizes["vocab_size"]))
    return folder


def main() -> None:
    """One graph, for `measure_shared`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=STALENESS)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("tiny", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    figures = run_shared(options.system, options.device, TINY_SHARED if options.tiny else SHARED)
    options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
