"""One training step of a 1.7 B model on a GPU, made in several ways.

4 rollouts of 2,048 tokens by a Qwen-shaped model of random weights, float32 master weights and
bfloat16 compute, through the learner that a Trainer makes. Systems: sliced, as it comes
(log-probabilities a slice of the vocabulary at a time); all_logits, with all logits at once;
recomputed, with gradient_checkpointing; compiled, with compile. tokens_per_s and seconds are those
of forward and backward; step_s is clip and update besides; warm_s the first two steps.

matrix_share: (6 * N * T + 6 * l * d * sum of L^2) / seconds / flops_per_s, which is the rate of a
bfloat16 product of two 8,192 x 8,192 matrices in the same run. N: parameters, the embedding once
(it is the head); T: tokens; l: layers; d: heads times their width; L: tokens of a rollout: causal
attention's half of the square, forward and twice backward. What is computed again is not counted.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.systems import MODELS, TINY, Shape, make_model
from bench.gpu.timing import clear, seconds_of, wait
from bench.report import Figure, Report

TRAINER_S, LEAST_S = 150.0, 30.0
"""Most seconds of all steps; no row is begun with less than LEAST_S."""
WARM, REPEATS = 2, 5
"""Steps that fill memory and compile, and steps that count."""
MATRIX = 8192


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the step is made."""

    gradient_checkpointing: bool = False
    compile: bool = False
    all_logits: bool = False


WAYS = {
    "sliced": Way(),
    "all_logits": Way(all_logits=True),
    "recomputed": Way(gradient_checkpointing=True),
    "compiled": Way(compile=True),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step trains."""

    rollouts: int = 4
    tokens: int = 2048
    """Of each, prompt and completion."""
    prompt: int = 64


TINY_LOAD = Load(tokens=24, prompt=4)


def measure_trainer(
    report: Report, seconds: float, device: torch.device, tiny: bool = False
) -> bool:
    """A row for each way; whether none failed."""
    until, whole = time.monotonic() + seconds, True
    name = "tiny" if tiny else "qwen3-1.7b"
    shape, load = (TINY if tiny else MODELS)[name], TINY_LOAD if tiny else Load()
    rate = 0.0
    for system in served(device):
        if until - time.monotonic() < LEAST_S:
            report.add(case=f"trainer {name}", system=system, skipped="too little time is left")
            continue
        try:
            rate = rate or matrix_rate(device, 64 if tiny else MATRIX)
            figures = step_figures(shape, WAYS[system], load, device, rate)
            report.add(case=f"trainer {name}", system=system, **figures)
        except Exception as error:
            whole = False
            traceback.print_exc()
            text = f"failed: {type(error).__name__}: {str(error)[:200]}"
            report.add(case=f"trainer {name}", system=system, skipped=text)
        finally:
            clear(device)
    return whole


def served(device: torch.device) -> list[str]:
    """Ways that are tried here: layers are compiled for a GPU only."""
    return [system for system, way in WAYS.items() if device.type == "cuda" or not way.compile]


def step_figures(
    shape: Shape, way: Way, load: Load, device: torch.device, rate: float
) -> dict[str, Figure]:
    """The figures of one way."""
    from dataflow import Model
    from operators import Trainer
    from operators.losses import aipo
    from operators.training.learner import policy
    from operators.training.learner.build import forward_of, learner_of

    limit = load.rollouts * load.tokens
    trainer = Trainer(
        Model("random", dtype="bfloat16"),
        loss=partial(aipo, rho=4.0),
        micro_batch_tokens=limit,
        gradient_checkpointing=way.gradient_checkpointing,
        compile=way.compile,
    )
    module = make_model(shape, device, torch.float32)
    learner = learner_of(trainer, forward_of(trainer, module), node="trainer")
    rows = make_rows(load, module.config.vocab_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    passes, ends = [], []
    began = time.monotonic()
    with mock.patch.object(policy, "MOST_LOGITS", 1 << 62 if way.all_logits else 0):
        for turn in range(WARM + REPEATS):
            if turn == WARM:
                warm = time.monotonic() - began
            parts = learner.begin(rows, 0)
            wait(device)
            first = time.perf_counter()
            for part in parts:
                learner.micro(part)
            wait(device)
            second = time.perf_counter()
            outcome = learner.end(1e-6)
            wait(device)
            passes.append(second - first)
            ends.append(time.perf_counter() - second)
            if outcome.culprit is not None:
                raise RuntimeError(f"the step is not finite: {outcome.culprit}")
    seconds = float(np.median(passes[WARM:]))
    figures: dict[str, Figure] = {
        "tokens_per_s": load.rollouts * load.tokens / seconds,
        "matrix_share": flops(module, load) / seconds / rate,
        "flops_per_s": rate,
        "seconds": seconds,
        "step_s": float(np.median(ends[WARM:])),
        "warm_s": warm,
    }
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return figures


def flops(module: Any, load: Load) -> int:
    """Of one forward and backward; see the module."""
    config = module.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = config.num_attention_heads * width
    tokens = load.rollouts * load.tokens
    parameters = sum(weight.numel() for weight in module.parameters())
    return (
        6 * parameters * tokens
        + 6 * config.num_hidden_layers * inner * load.rollouts * load.tokens**2
    )


def matrix_rate(device: torch.device, size: int) -> float:
    """Flops per second of a product of two square bfloat16 matrices."""
    first, two = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: first @ two, device, 10)


def make_rows(load: Load, vocabulary: int) -> Any:
    """Rollouts that have nothing in common, as a step's rows."""
    from dataflow.tokens.rollout_tokens import RolloutTokens
    from operators.training.learner.rows import StepRows

    draw = np.random.default_rng(0)
    count, total = load.rollouts, load.rollouts * load.tokens
    mask = np.tile(np.arange(load.tokens) >= load.prompt, count)
    return StepRows(
        tokens=RolloutTokens(
            draw.integers(1, vocabulary, total).astype(np.int32),
            mask,
            np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
            np.where(mask, 0, -1).astype(np.int32),
        ),
        offsets=np.arange(count + 1) * load.tokens,
        cuts_S=np.zeros(total, bool),
        groups_R=np.arange(count),
        rollout_ids_R=np.arange(count),
        oldest_R=np.zeros(count, np.int64),
        columns_R={"advantage": np.where(np.arange(count) % 2, 1.0, -1.0)},
        columns_S={},
    )
