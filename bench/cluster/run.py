"""A stage's run, in a process of its own: the graph, and the figures that its metrics give."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench.cluster.stages import Stage
from bench.gpu.systems import Shape
from bench.report import Figure

ASK_S = 10.0
"""Longest that nvidia-smi takes."""


def policy_of(shape: Shape, folder: Path) -> Path:
    """The model of random weights in bfloat16 with a tokenizer of words; made once."""
    if not (folder / "tokenizer.json").exists():
        from bench.gpu.shared import save_policy

        aside = folder.with_suffix(".part")
        shutil.rmtree(aside, ignore_errors=True)
        save_policy(aside, shape)
        aside.rename(folder)
    return folder


def graph_of(stage: Stage, policy: Path, dtype: str) -> Any:
    """The stage's graph."""
    from dataflow import Graph, LoRA, Model, scorer
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo

    @scorer(isolate=False)
    def reward(tokens: list[int]) -> float:
        return float(tokens[-1] % 2)

    lora = LoRA(rank=stage.lora_rank) if stage.lora_rank else None
    g, model = Graph(stage.name), Model(str(policy), dtype=dtype, lora=lora)
    rows = [
        {"prompt": " ".join(f"w{1 + (n * 7 + i) % 97}" for i in range(stage.prompt_tokens))}
        for n in range(1_000)
    ]
    generator = Generator(
        model,
        group_size=stage.group_size,
        max_tokens=stage.max_tokens,
        context_tokens=stage.prompt_tokens + stage.max_tokens + 16,
        tensor_parallel=stage.tensor_parallel,
        engine=stage.engine,
    )
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=stage.prompts_per_step,
        lr=1e-6,
        tensor_parallel=stage.trainer_tensor_parallel,
    )
    trainer(advantage(reward(generator(g.source(Prompts(rows))))))
    g.feedback(trainer.weights, generator, max_staleness=stage.max_staleness)
    return g


def placed(stage: Stage, device: str) -> dict[str, Any]:
    """Where its nodes go, as `run` has it."""
    if device == "cuda":
        generators = stage.replicas * stage.tensor_parallel
        return {"gpus": {"generator": generators, "trainer": stage.trainer_ranks}}
    return {
        "replicas": {"generator": stage.replicas},
        "ranks": {"trainer": stage.trainer_ranks},
    }


def run_stage(stage: Stage, policy: Path, device: str, folder: Path) -> dict[str, Figure]:
    """Run it; figures over the steps that count, or why it is skipped."""
    from dataflow import run
    from dataflow.folder.run_folder import RunFolder
    from operators.engine.vllm.process import interpreter
    from operators.models.folders import ModelError

    if stage.engine == "vllm":
        try:
            interpreter(None, os.environ)
        except ModelError as error:
            return {"skipped": str(error)}
    result = run(
        graph_of(stage, policy, "bfloat16" if device == "cuda" else "float32"),
        steps=stage.total_steps,
        weights=stage.executor,
        runs=folder,
        quiet=True,
        **placed(stage, device),
    )
    return {
        "clean": int(result.verdict.clean),
        "efficiency": result.efficiency,
        **figures_of_metrics(result.metrics, stage),
        **replayed_share(RunFolder.open(result.folder).read_activity()),
    }


def figures_of_metrics(metrics: Sequence[Mapping[str, Any]], stage: Stage) -> dict[str, Figure]:
    """What the trainer's lines of metrics say of the steps that count; the steps before fill the
    pipeline, and for those after them nothing is generated any more.
    """
    lines = [line for line in metrics if "loss" in line]
    counted = lines[stage.warm - 1 : stage.warm + stage.steps]
    seconds = counted[-1]["seconds"] - counted[0]["seconds"]
    sent = {
        update["version"]: update
        for line in counted
        for update in (line.get("weights_sent") or {}).values()
    }
    figures: dict[str, Figure] = {
        "step_s": seconds / (len(counted) - 1),
        "rollouts_per_s": sum(line["rollouts"] for line in counted[1:]) / seconds,
        "staleness_over": max(line["staleness_max"] for line in lines) - stage.max_staleness,
        "settle_s": max(line.get("seconds_settle") or 0.0 for line in counted),
    }
    if sent:
        figures |= {
            "weights_s": statistics.median(update["seconds"] for update in sent.values()),
            "held_ms": 1e3 * max(update["held_seconds"] for update in sent.values()),
            "weights_gb": max(update["nbytes"] for update in sent.values()) / 1e9,
        }
    return figures


def replayed_share(activity: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Of all decode steps of the generator, those that replayed a graph, by the run's activity;
    none where it counts no step.
    """
    for line in reversed(activity):
        generator = line["nodes"].get("generator", {})
        if steps := generator.get("decode_steps"):
            return {"replayed_share": generator.get("replayed_steps", 0) / steps}
    return {}


def foreseen(stage: Stage, policy: str, devices: str) -> dict[str, Figure]:
    """What the plan on such devices takes of a step, on paper; or why it is refused."""
    from dataflow.errors import GraphError
    from dataflow.foresight.command import read_devices
    from dataflow.foresight.foresee import foresee
    from dataflow.foresight.workload import read_workload

    try:
        paper = foresee(
            graph_of(stage, Path(policy), "bfloat16"),
            read_devices(devices),
            gpus=placed(stage, "cuda")["gpus"],
            workload=read_workload(f"mean={stage.max_tokens},prompt={stage.prompt_tokens}"),
            steps=stage.total_steps,
        )
    except GraphError as error:
        return {"failed": str(error)}
    return {
        "foreseen_step_s": paper.step_s,
        "foreseen_weights_s": paper.weights_s,
        "foreseen_efficiency": paper.efficiency,
    }


class PeakOfGpus:
    """The most memory that any GPU of this machine held, for `figures_of`'s watch."""

    def __init__(self) -> None:
        self.most = 0
        """Bytes; 0: nvidia-smi says nothing."""

    def look(self, _pid: int) -> None:
        """Ask nvidia-smi once."""
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=ASK_S,
                check=True,
            )
            self.most = max(self.most, *(int(line) << 20 for line in answer.stdout.split()))
