"""nano-vllm's public benchmark on our engine, with log-probabilities and without.

    python -m bench.gpu --only public

256 requests at once, of 100 to 1,024 random tokens and as many more to draw, by python's random
numbers of seed 0 as in its bench.py; temperature 0.6, no token ends a request. Models of random
weights in bfloat16. logprobs: the engine as it is; bare: a draw as nano-vllm's, exponential noise
over the probabilities and no log-probability, in the place of ours.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.systems import MODELS, QWEN3_06B, TINY, Shape, engine_of, make_model, serve
from bench.gpu.timing import clear
from bench.report import Figure, Report

if TYPE_CHECKING:  # so that the command line is there at once
    from operators.engine.sampler import Draw

SYSTEMS = ("logprobs", "bare")
ROW_S, LEAST_S = 20.0, 25.0
"""Most seconds of what is timed, and of capturing before it; no row is begun with less than
LEAST_S."""
TEMPERATURE = 0.6
LEAST_NOISE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What is asked for."""

    count: int = 256
    least: int = 100
    most: int = 1024
    """Tokens of a prompt, and of a completion."""
    largest: int = 10_000
    """Token."""

    def drawn(self) -> tuple[list[list[int]], list[int]]:
        """The prompts, and how many tokens follow each, in the order in which its bench.py draws
        them.
        """
        draw = random.Random(0)
        prompts = [
            [draw.randint(0, self.largest) for _ in range(draw.randint(self.least, self.most))]
            for _ in range(self.count)
        ]
        return prompts, [draw.randint(self.least, self.most) for _ in range(self.count)]


SHAPES = {
    "qwen2.5-0.5b": MODELS["qwen2.5-0.5b"],
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-1.7b": MODELS["qwen3-1.7b"],
}
GOALS = {"qwen2.5-0.5b": 70_000, "qwen3-0.6b": 28_000, "qwen3-1.7b": 21_000}
"""Tokens a second on an H200."""
TINY_REQUESTS = Requests(count=8, least=4, most=20, largest=100)


def measure_public(
    report: Report, remaining_s: Callable[[], float], device: torch.device, tiny: bool = False
) -> bool:
    """A row for each model, with log-probabilities and without; whether none failed.

    remaining_s: seconds for everything that is still to come.
    """
    shapes, requests = (TINY, TINY_REQUESTS) if tiny else (SHAPES, Requests())
    whole = True
    for name, shape in shapes.items():
        for system in SYSTEMS:
            case = f"public {name}"
            if remaining_s() < LEAST_S:
                report.add(case=case, system=system, skipped="too little time is left")
                continue
            try:
                figures = public_figures(shape, system, requests, min(ROW_S, remaining_s()), device)
                if (goal := GOALS.get(name)) is not None and device.type == "cuda":
                    figures |= {"goal": goal, "of_goal": figures["tokens_per_s"] / goal}
                report.add(case=case, system=system, **figures)
            except Exception as error:
                whole = False
                traceback.print_exc()
                text = f"failed: {type(error).__name__}: {str(error)[:200]}"
                report.add(case=case, system=system, skipped=text)
            finally:
                clear(device)
    return whole


def public_figures(
    shape: Shape, system: str, requests: Requests, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Of one model and way to draw, after at most `seconds` to capture and as many to warm up;
    RuntimeError where the requests are not done in another `seconds`.
    """
    from operators.engine import decode
    from operators.engine.cuda.available import drawing
    from operators.engine.interface import PromptStart
    from operators.engine.sampler import Sampling

    begun = time.monotonic()
    cuda = device.type == "cuda"
    model = make_model(shape, device, torch.bfloat16 if cuda else torch.float32)
    draw = drawing(device) if system == "logprobs" else bare_draw
    prompts, counts = requests.drawn()
    with mock.patch.object(decode, "drawing", lambda _: draw):
        engine = engine_of(
            model.requires_grad_(False),
            "fused" if cuda else "graphs",
            requests.count,
            2 * requests.most,
            Sampling(temperature=TEMPERATURE),
            begun + seconds,
        )

    def starts(most: int) -> list[PromptStart]:
        return [
            PromptStart(
                prompt=np.array(prompt),
                limit=len(prompt) + min(count, most),
                tickets=[at],
                seeds=[at],
            )
            for at, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]

    serve(engine, starts(1)[:1], begun + 2 * seconds)
    steps, replayed = engine.steps, engine.counts["replayed_steps"]
    started = time.monotonic()
    tokens = sum(serve(engine, starts(requests.most), started + seconds))
    taken = time.monotonic() - started
    if tokens != sum(counts):
        raise RuntimeError(f"{tokens:,} of {sum(counts):,} tokens after {taken:.1f} s")
    figures: dict[str, Figure] = {
        "tokens_per_s": tokens / taken,
        "tokens": tokens,
        "seconds": taken,
        "warm_s": started - begun,
        "replayed": (engine.counts["replayed_steps"] - replayed) / (engine.steps - steps),
    }
    if cuda:
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return figures


def bare_draw(logits: torch.Tensor, sampling: Any, *_: object, **__: object) -> Draw:
    """The next token of each row as nano-vllm draws it, by noise of the device; as its
    log-probability 0.
    """
    from operators.engine import sampler

    temperature = sampler.columns_of(sampling, logits).temperature
    assert temperature is not None, "every row has one"
    shares = torch.softmax(logits.float() / temperature, dim=-1)
    noise = torch.empty_like(shares).exponential_(1).clamp_min_(LEAST_NOISE)
    tokens = shares.div_(noise).argmax(dim=-1)
    return sampler.Draw(tokens, torch.zeros(len(tokens), device=logits.device), None)
