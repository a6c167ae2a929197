"""Builds this project's own engine: model, tokenizer, stops, and the self-test that they fit
together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from dataflow.runtime import Context
from dataflow.weight_ends import WeightsIn
from operators.engine.cuda.fuse import fuse_layers
from operators.engine.decode import Engine
from operators.engine.interface import DecodingEngine
from operators.engine.knobs import GeneratorKnobs
from operators.engine.precision import Sliced, cast, quantise
from operators.engine.precision.intake import Intake
from operators.engine.sampling_params import Sampling
from operators.engine.self_test import adapt
from operators.engine.stop_strings import StopStrings, stops_of
from operators.models.borders import longest
from operators.models.loading import load_merged, load_tokenizer
from operators.models.merged_adapters import Merged

if TYPE_CHECKING:
    from operators.ranks.exchange import Exchange

CONTEXT_TOKENS = 4096
"""Of a model that does not say how many it takes."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, and what is needed to speak with it in text."""

    engine: DecodingEngine
    tokenizer: Any
    ends: frozenset[int]
    """Tokens at which a completion ends, which are not part of its text."""
    reader: Callable[[], WeightsIn] | None = None
    """Opens its end of the weight plane, where it is more than the engine's `tensors`, attached to
    the context's."""
    native: Engine | None = None
    """This process's engine, where this project's own makes the forward passes: of several ranks,
    this one's alone."""
    ranks: Exchange | None = None
    """What this rank does with the others, where there are some."""


def build_native(
    declaration: GeneratorKnobs,
    context: Context,
    model: torch.nn.Module | None = None,
    sliced: Sliced | None = None,
    merged: Merged | None = None,
) -> BuiltEngine:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be
    used.

    `model`: loaded already. `sliced`: where it is one rank's slices, how they are quantised.
    `merged`: what brings adapters into it.
    """
    if context.device == "cpu":
        torch.set_num_threads(context.threads)
    intake: Merged | Intake | None = merged
    if model is None:
        model, intake = load_merged(declaration.model, device=context.device)
    context_tokens = context_tokens_of(declaration, model.config)
    tokenizer = load_tokenizer(declaration.model)
    adopt: Literal["view", "copy"] = (
        "view" if context.device == "cpu" and sliced is None else "copy"
    )
    if declaration.weights == "bfloat16":
        intake = cast(model, torch.bfloat16, adopt=adopt)
    tested = adapt(model, declaration.model.name, context_tokens)
    if declaration.compile and context.device != "cpu":
        fuse_layers(model)
    if declaration.weights != "model" and declaration.weights != "bfloat16":
        intake = quantise(
            model,
            declaration.weights,
            adopt=adopt,
            arrives_quantised=context.quantized is not None,
            sliced=sliced,
        )
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    ends, stop = stops_of(tokenizer, model, declaration.stop, vocabulary, chat=declaration.chat)
    engine = Engine(
        model,
        slots=declaration.slots,
        context_tokens=context_tokens,
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=StopStrings(tokenizer, stop) if stop else None,
        kernel=tested.kernel,
        fused=tested.fused if declaration.weights in ("model", "bfloat16") else None,
        token_bytes=tested.token_bytes,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        record_mask=declaration.records_mask,
        tensors=None if intake is None else intake.tensors,
        on_adopt=None if intake is None else intake.adopted,
    )
    return BuiltEngine(engine, tokenizer, ends, native=engine)


def sampling_of(declaration: GeneratorKnobs) -> Sampling:
    """The sampling knobs of a Generator."""
    return Sampling(
        temperature=declaration.temperature,
        top_k=declaration.top_k,
        top_p=declaration.top_p,
        min_p=declaration.min_p,
        repetition_penalty=declaration.repetition_penalty,
    )


def context_tokens_of(declaration: GeneratorKnobs, config: Any) -> int:
    """Most tokens of prompt and completion together. ModelError as `longest`."""
    return longest(declaration.model, config, declaration.context_tokens) or CONTEXT_TOKENS
