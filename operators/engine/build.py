"""Makes the engine that a Generator declares: model, tokenizer, stops, and the proof that they fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dataflow.node import Context
from operators.engine.decode import Engine
from operators.engine.precision import quantise
from operators.engine.proof import adapt
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings, end_tokens, split
from operators.models import load_model, load_tokenizer

if TYPE_CHECKING:
    from operators.generator import Generator

CONTEXT_TOKENS = 4096
"""Of a model that does not say how many it takes."""


@dataclass(frozen=True)
class Built:
    """An engine, and what is needed to speak with it in text."""

    engine: Engine
    tokenizer: Any
    ends: frozenset[int]
    """Tokens at which a completion ends, which are not part of its text."""


def make_engine(declaration: Generator, context: Context, model: torch.nn.Module | None = None) -> Built:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be used.

    `model`: loaded already, such as one rank's slices; else with `tensor_parallel` above 1 this process is rank 0.
    """
    if model is None and declaration.tensor_parallel > 1:
        from operators.engine.parallel.launch import make_parallel

        return make_parallel(declaration, context, declaration.tensor_parallel)
    if context.device == "cpu":
        torch.set_num_threads(context.threads)
    if model is None:
        model = load_model(declaration.model, device=context.device).requires_grad_(False)
    tokenizer = load_tokenizer(declaration.model)
    proof = adapt(model, declaration.model.name)
    intake = None if declaration.weights == "model" else quantise(model, declaration.weights)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    special, strings = split(tokenizer, declaration.stop, vocabulary)
    ends = frozenset([*special, *end_tokens(model, tokenizer)])
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr, operator]
    engine = Engine(
        model,
        slots=declaration.slots,
        context_tokens=declaration.context_tokens or most or CONTEXT_TOKENS,
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=StopStrings(tokenizer, strings) if strings else None,
        kernel=proof.kernel,
        fused=proof.fused if intake is None else None,
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
