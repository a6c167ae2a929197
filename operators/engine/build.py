"""Makes the engine that a Generator declares: model, tokenizer, stops, and the proof that they fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dataflow.node import Context
from dataflow.weight_ends import WeightsIn
from operators.engine.decode import Engine
from operators.engine.interface import DecodingEngine
from operators.engine.precision import quantise
from operators.engine.precision.intake import Intake
from operators.engine.sampler import Sampling
from operators.engine.self_test import adapt
from operators.engine.stops import StopStrings, end_tokens, split
from operators.models.loading import load_configs, load_tokenizer
from operators.models.merged_adapters import Merged, load_merged

if TYPE_CHECKING:
    from operators.generator import Generator

CONTEXT_TOKENS = 4096
"""Of a model that does not say how many it takes."""


@dataclass(frozen=True)
class Built:
    """An engine, and what is needed to speak with it in text."""

    engine: DecodingEngine
    tokenizer: Any
    ends: frozenset[int]
    """Tokens at which a completion ends, which are not part of its text."""
    reader: Callable[[], WeightsIn] | None = None
    """Opens its end of the weight plane, where it is more than the engine's `tensors`, attached to the context's."""


def make_engine(declaration: Generator, context: Context, model: torch.nn.Module | None = None) -> Built:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be used.

    `model`: loaded already, such as one rank's slices; else with `tensor_parallel` above 1 this process is rank 0.
    """
    if model is None and declaration.tensor_parallel > 1:
        from operators.engine.parallel.launch import make_parallel

        return make_parallel(declaration, context, declaration.tensor_parallel)
    if declaration.engine == "vllm":
        return _with_vllm(declaration, context)
    if context.device == "cpu":
        torch.set_num_threads(context.threads)
    intake: Merged | Intake | None = None
    if model is None:
        model, intake = load_merged(declaration.model, device=context.device)
    tokenizer = load_tokenizer(declaration.model)
    proof = adapt(model, declaration.model.name)
    if declaration.weights != "model":
        intake = quantise(model, declaration.weights, narrow=context.narrow is not None)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    ends, stop = _stops(declaration, tokenizer, model, vocabulary)
    engine = Engine(
        model,
        slots=declaration.slots,
        context_tokens=_context_tokens(declaration, model.config),
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=stop,
        kernel=proof.kernel,
        fused=proof.fused if declaration.weights == "model" else None,
        token_bytes=proof.token_bytes,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        record_mask=declaration.sampling_mask,
        tensors=None if intake is None else intake.tensors,
        on_adopt=None if intake is None else intake.adopted,
    )
    return Built(engine, tokenizer, ends)


def sampling_of(declaration: Generator) -> Sampling:
    """The sampling knobs of a Generator."""
    return Sampling(
        temperature=declaration.temperature,
        top_k=declaration.top_k,
        top_p=declaration.top_p,
        min_p=declaration.min_p,
        repetition_penalty=declaration.repetition_penalty,
    )


def _with_vllm(declaration: Generator, context: Context) -> Built:
    """The same with vLLM, in a process and an environment of its own."""
    from operators.engine.vllm.engine import VllmEngine

    config, generation = load_configs(declaration.model)
    tokenizer = load_tokenizer(declaration.model)
    holder = SimpleNamespace(config=config, generation_config=generation)
    ends, stop = _stops(declaration, tokenizer, holder, int(config.get_text_config().vocab_size))
    engine = VllmEngine(
        declaration.model,
        slots=declaration.slots,
        context_tokens=_context_tokens(declaration, config),
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=stop,
        threads=context.threads,
        device=context.device,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        start_s=context.limits.start_s,
        deadline_s=context.limits.stuck_s,
    )
    return Built(engine, tokenizer, ends)


def _stops(
    declaration: Generator, tokenizer: Any, model: Any, vocabulary: int
) -> tuple[frozenset[int], StopStrings | None]:
    """Tokens, and strings, at which a completion ends."""
    special, strings = split(tokenizer, declaration.stop, vocabulary)
    ends = frozenset([*special, *end_tokens(model, tokenizer)])
    return ends, StopStrings(tokenizer, strings) if strings else None


def _context_tokens(declaration: Generator, config: Any) -> int:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return declaration.context_tokens or most or CONTEXT_TOKENS
