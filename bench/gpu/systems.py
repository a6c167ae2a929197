"""What the GPU bench generates, and by whom: our engine in several ways, and `model.generate`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu.timing import wait

if TYPE_CHECKING:  # so that the command line is there at once
    from operators.engine.decode import Engine
    from operators.engine.interface import PromptStart
    from operators.engine.sampler import Sampling

STEP_TOKENS = 4096
"""Prompt tokens that start in one step, as in the generator."""
WARM_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every system generates."""

    rollouts: int = 256
    group: int = 8
    prompt: int = 200
    tokens: int = 1024
    """Of each completion."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a model's public config."""

    family: str
    sizes: dict[str, Any]

    @property
    def digest(self) -> str:
        """A name for a folder that holds such a model."""
        text = json.dumps([self.family, self.sizes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


QWEN3_06B = Shape(
    family="Qwen3Config",
    sizes={
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
MODELS = {
    "qwen2.5-0.5b": Shape(
        family="Qwen2Config",
        sizes={
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "qwen3-1.7b": Shape(
        family="Qwen3Config",
        sizes={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
TINY = {
    "tiny": Shape(
        family="Qwen3Config",
        sizes={
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    )
}
TINY_LOAD = Load(rollouts=8, group=4, prompt=20, tokens=12)

OURS = {
    "fused": {"kernels": True, "graphs": True, "fused": True},
    "graphs": {"kernels": True, "graphs": True, "fused": False},
    "triton": {"kernels": True, "graphs": False, "fused": False},
    "eager": {"kernels": False, "graphs": False, "fused": False},
}
HF = {"hf_dynamic": "dynamic", "hf_static": "static"}


@dataclass(kw_only=True)
class Run:
    """What a system did."""

    lengths: list[int]
    """Tokens of each completion."""
    seconds: float
    warm_s: float
    note: str | None = None


def config_of(shape: Shape) -> Any:
    """Its config; embedding and head are shared unless the shape says otherwise, no token ends."""
    import transformers

    common = {
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return getattr(transformers, shape.family)(**(common | shape.sizes))


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of random weights."""
    import transformers

    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype).eval()


def prompts(load: Load, vocabulary: int) -> list[Any]:
    """One for each group, int64 [prompt]."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, vocabulary, load.prompt) for _ in range(load.rollouts // load.group)]


def ours(model: Any, system: str, load: Load, seconds: float) -> Run:
    """Our engine, driven as the generator drives it."""
    from operators.engine.interface import PromptStart
    from operators.engine.sampler import Sampling

    begun = time.monotonic()
    context_tokens = load.prompt + load.tokens
    engine = engine_of(model, system, load.rollouts, context_tokens, Sampling(), begun + seconds)
    groups = prompts(load, engine.vocabulary)

    def starts(tokens: int) -> list[PromptStart]:
        tickets = [range(at * load.group, (at + 1) * load.group) for at in range(len(groups))]
        return [
            PromptStart(prompt=prompt, limit=load.prompt + tokens, tickets=rows, seeds=rows)
            for prompt, rows in zip(groups, tickets, strict=True)
        ]

    serve(engine, starts(min(WARM_TOKENS, load.tokens)), begun + 4 * seconds)
    started = time.monotonic()
    lengths = serve(engine, starts(load.tokens), started + seconds)
    note = engine.graphed.replays.refused if engine.graphed is not None else None
    return Run(
        lengths=lengths, seconds=time.monotonic() - started, warm_s=started - begun, note=note
    )


def engine_of(
    model: Any, system: str, slots: int, context_tokens: int, sampling: Sampling, until: float
) -> Engine:
    """Our engine in one of `OURS`, its steps captured as far as there is time."""
    from operators.engine.build import adapt
    from operators.engine.cuda.fuse import fuse_layers
    from operators.engine.decode import Engine

    choice = OURS[system]
    proof = adapt(model, system)
    cuda = next(model.parameters()).device.type == "cuda"
    if cuda and choice["kernels"] and proof.kernel is None:
        raise RuntimeError(
            "the Triton kernel does not serve this model, or gave other logits; see"
            " operators.engine.build"
        )
    if choice["fused"]:
        fuse_layers(model)
    engine = Engine(
        model,
        slots=slots,
        context_tokens=context_tokens,
        sampling=sampling,
        end_tokens=[],
        kernel=proof.kernel if choice["kernels"] else None,
        token_bytes=proof.token_bytes,
        graphs=choice["graphs"],
        lag=int(cuda and choice["kernels"]),
    )
    engine.capture(lambda: time.monotonic() < until)
    return engine


def serve(engine: Engine, starts: Sequence[PromptStart], until: float) -> list[int]:
    """Tokens of each completion, in the order in which they end; cut short when time is up."""
    waiting, lengths = list(starts), []
    tickets = [ticket for start in starts for ticket in start.tickets]
    while waiting or engine.live:
        now: list[PromptStart] = []
        while waiting and sum(len(start.prompt) for start in now) < STEP_TOKENS:
            now.append(waiting.pop(0))
        ended = engine.step(now)
        if time.monotonic() > until:
            ended, waiting = [*ended, *engine.abort(tickets)], []
        lengths += [len(row.tokens) - row.start for row in ended]
    wait(engine.device)
    return lengths


def hf(model: Any, system: str, load: Load, seconds: float) -> Run:
    """`model.generate` on one batch of all rollouts."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(
        np.repeat(np.stack(prompts(load, model.config.vocab_size)), load.group, 0)
    ).to(device)

    def run(tokens: int, most: float) -> int:
        tokens_out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            max_time=most,
            cache_implementation=HF[system],
        )
        wait(device)
        return tokens_out.shape[1] - load.prompt

    begun = time.monotonic()
    run(min(WARM_TOKENS, load.tokens), seconds)
    started = time.monotonic()
    tokens = run(load.tokens, seconds)
    return Run(
        lengths=[tokens] * load.rollouts, seconds=time.monotonic() - started, warm_s=started - begun
    )


def bytes_read(
    lengths: list[int], load: Load, weights: int, token_bytes: int, *, shared: bool
) -> int:
    """Bytes that making these completions must read: the weights once a step, each position's keys
    and values once.

    shared: full pages of a group's prompt count once per group. The first token of each comes from
    its prefill.
    """
    steps = max(lengths, default=0)
    common = load.prompt // 16 * 16 if shared else 0
    positions = sum(
        (load.prompt - common) * (length - 1) + length * (length - 1) // 2 for length in lengths
    )
    groups = sum(max(lengths[i : i + load.group]) - 1 for i in range(0, len(lengths), load.group))
    return steps * weights + (positions + common * groups) * token_bytes
