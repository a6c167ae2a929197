"""vLLM on nano-vllm's public benchmark, with versions that come from another process's memory.

    python -m bench.gpu --only vllm

The requests of `bench.gpu.public`, with log-probabilities. A writer of this process, on the same
GPU, offers the model's weights as a trainer of one rank does; vLLM's process takes them. held_ms:
how long one update holds decoding up, the median, while all requests are under way. mismatch: the
mean difference between the log-probabilities of some completions and those of transformers' forward
pass with the same weights, which are all times 1.01 by then. Bounds, written before it ever ran on
a GPU: half of the goals of `public` in tokens per second, updates below 150 ms, mismatch below
2e-2. Where vLLM is not installed, the part is skipped.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import torch

from bench.gpu.public import GOALS, SHAPES, TEMPERATURE, TINY_REQUESTS, Requests
from bench.gpu.systems import Shape, make_model
from bench.gpu.timing import clear
from bench.report import Figure, Report

LEAST_S = 120.0
"""No model is begun with less time than this; most of it is vLLM's start."""
UPDATES = 3
CHECKED = 4
"""Completions that transformers computes again."""
HELD_S, MISMATCH, OF_GOAL = 0.15, 2e-2, 0.5
"""The bounds."""
WIDE = Shape(
    family="Qwen3Config",
    sizes={
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
)
"""To rehearse: vLLM's kernels for processors ask for heads so wide."""


def measure_vllm(
    report: Report, remaining_s: Callable[[], float], device: torch.device, tiny: bool = False
) -> bool:
    """A row for each model; whether none failed. remaining_s: as for `measure_public`."""
    from operators.engine.vllm.process import interpreter
    from operators.models.folders import ModelError

    shapes, requests = ({"tiny": WIDE}, TINY_REQUESTS) if tiny else (SHAPES, Requests())
    try:
        python = interpreter(None, os.environ)
    except ModelError as error:
        report.add(case="vllm", system="vllm", skipped=str(error)[:200])
        return True
    whole = True
    for name, shape in shapes.items():
        case = f"vllm {name}"
        if remaining_s() < LEAST_S:
            report.add(case=case, system="vllm", skipped="too little time is left")
            continue
        try:
            figures = vllm_figures(shape, requests, python, remaining_s(), device)
            if (goal := GOALS.get(name)) is not None and device.type == "cuda":
                figures |= {"of_goal": figures["tokens_per_s"] / goal}
                figures |= {"holds": _holds(figures)}
            report.add(case=case, system="vllm", **figures)
        except Exception as error:
            whole = False
            traceback.print_exc()
            text = f"failed: {type(error).__name__}: {str(error)[:200]}"
            report.add(case=case, system="vllm", skipped=text)
        finally:
            clear(device)
    return whole


def vllm_figures(
    shape: Shape, requests: Requests, python: str, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Of one model; RuntimeError where the requests are not done in `seconds`."""
    from operators.engine.interface import EndedRollout, PromptStart

    until = time.monotonic() + seconds
    cuda = device.type == "cuda"
    model = make_model(shape, device, torch.bfloat16 if cuda else torch.float32)
    prompts, counts = requests.drawn()
    if not cuda:
        prompts = [[token % shape.sizes["vocab_size"] for token in prompt] for prompt in prompts]
    starts = [
        PromptStart(prompt=np.array(prompt), limit=len(prompt) + count, tickets=[at], seeds=[at])
        for at, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    begun = time.monotonic()
    with served(model, requests, python, device) as (engine, publish):
        publish(1.0, until)
        started = time.monotonic()

        def finished(wanted: Sequence[PromptStart], at_step: Callable[[int], None]) -> Any:
            ended: list[EndedRollout] = engine.step(wanted)
            step = 0
            while engine.live:
                at_step(step)
                ended += engine.step()
                step += 1
                if time.monotonic() > until:
                    raise RuntimeError(f"{len(ended)} of {len(wanted)} requests were done in time")
            return ended

        ended = finished(starts, lambda step: None)
        taken = time.monotonic() - started
        tokens = sum(len(row.tokens) - row.start for row in ended)
        every = max(1, max(counts) // (UPDATES + 1))

        def update(step: int) -> None:
            if step % every == every - 1:
                publish(1.01, until)

        engine.held_s.clear()
        finished(starts, update)
        held = list(engine.held_s)
        publish(1.01, until)
        checked = finished(starts[:CHECKED], lambda step: None)
    figures: dict[str, Figure] = {
        "tokens_per_s": tokens / taken,
        "tokens": tokens,
        "seconds": taken,
        "start_s": started - begun,
        "updates": len(held),
        "held_ms": 1000 * statistics.median(held),
        "mismatch": mismatch(model, checked, 1.01),
    }
    return dict(figures)


@contextmanager
def served(
    model: Any, requests: Requests, python: str, device: torch.device
) -> Iterator[tuple[Any, Callable[[float, float], None]]]:
    """vLLM with this model's files, and what offers its weights, all times so much, until vLLM has
    taken them; before a moment of the clock.
    """
    from dataflow.limits import Limits
    from dataflow.weight_ends import WeightSite
    from dataflow.worker.weight_ports import open_writer
    from operators.engine.sampler import Sampling
    from operators.engine.vllm.engine import VllmEngine, VllmWeights
    from transport.weights.encoding import Encoding

    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    cuda = device.type == "cuda"
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        model.save_pretrained(folder)
        site = WeightSite(
            executor="cuda_ipc" if cuda else "shared_memory",
            is_sharded=False,
            address=f"ipc://{folder}/w.sock",
            folder=folder,
            name="generator-0",
            encoding=Encoding(dtype=str(model.dtype).removeprefix("torch.")).to_plain(),
        )
        writer = ends.enter_context(
            closing(
                open_writer(
                    [site], 0, 1, str(device), tensors, largest=None, limits=Limits(), attempt=0
                )
            )
        )
        engine = ends.enter_context(
            closing(
                VllmEngine(
                    folder,
                    slots=requests.count,
                    context_tokens=2 * requests.most,
                    sampling=Sampling(temperature=TEMPERATURE),
                    end_tokens=(),
                    python=python,
                    device=str(device),
                    site=site,
                )
            )
        )
        weights = VllmWeights(engine)

        def publish(scale: float, until: float) -> None:
            version = weights.version + 1
            writer.publish(version, {name: tensor * scale for name, tensor in tensors.items()})
            while weights.version < version:
                if time.monotonic() > until:
                    raise RuntimeError(f"version {version} was not taken in time")
                writer.poll()
                if weights.poll() is not None:
                    engine.adopted(weights.adopt())

        yield engine, publish


@torch.no_grad()
def mismatch(model: Any, rows: Sequence[Any], scale: float) -> float:
    """Mean difference of log-probabilities to the forward pass of the model, times so much."""
    for weight in model.parameters():
        weight.mul_(scale)
    differences = []
    for row in rows:
        ids = torch.as_tensor(row.tokens.ids.astype(np.int64), device=model.device)
        logits = model(input_ids=ids[None]).logits[0, row.start - 1 : -1].float() / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, ids[row.start :, None])[:, 0].cpu().numpy()
        differences.append(np.abs(row.tokens.logprobs[row.start :] - expected))
    return float(np.concatenate(differences).mean())


def _holds(figures: dict[str, Any]) -> bool:
    return bool(
        figures["of_goal"] >= OF_GOAL
        and figures["held_ms"] <= 1000 * HELD_S
        and figures["mismatch"] <= MISMATCH
    )
