"""Builds the engine that a generator declares: this project's own, on one rank or several, with
the self-test that its parts fit together, or vLLM's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dataflow.records import AnyArray
from dataflow.runtime import Context
from dataflow.weight_ends import OpensWeights, WeightsIn
from operators.engine import attention
from operators.engine.attention import AttentionLayout, Kernel, KVCache
from operators.engine.budget import default_budget
from operators.engine.cuda import available
from operators.engine.cuda.fuse import fuse_layers
from operators.engine.decode import Engine
from operators.engine.interface import DecodingEngine
from operators.engine.native import attention as native
from operators.engine.native.fused import FusedStep, supports
from operators.engine.pages import PAGE, Prefix, pages_for
from operators.engine.precision import Sliced, cast, quantise, unrounded
from operators.engine.precision.intake import Intake
from operators.engine.prefill import lay_out
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings, stops_of
from operators.generator import GeneratorKnobs
from operators.models.adapters import Merged
from operators.models.borders import late_borders, longest, moved_borders, settle_rope
from operators.models.folders import ModelError
from operators.models.loading import load_merged, load_tokenizer

if TYPE_CHECKING:
    from operators.ranks.team import Exchange

# Proves, once, that a model decodes from pages as it does by itself: a few tokens both ways.

TOKENS, DECODED = 35, 5
"""Of the whole, and of those after the prompt: it fills one page and begins another, and they begin
a third."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference between logits, relative to the largest logit."""


@dataclass(frozen=True)
class SelfTest:
    """What was found out about a model."""

    kernel: Kernel | None
    """What attends for its decoded rows; None: torch's operators."""
    fused: FusedStep | None
    """What computes the whole model; None: its own forward pass."""
    token_bytes: int
    """Bytes of keys and values that one position takes in all layers."""


@torch.inference_mode()
def adapt(model: torch.nn.Module, name: str, context_tokens: int | None = None) -> SelfTest:
    """Switch `model` to attention over pages and prove it on a short sequence, before trained
    weights reach it.

    Where something begins at a later position of `context_tokens` (None: at any), it is proved once
    more with that position moved into the sequence. Pages and kernels are proved, not the rounding
    of inputs that layers may do: it is left out meanwhile.

    Raises:
        ModelError: it does not use transformers' attention interface, keeps state beside keys and
            values, gives other logits from pages, or `settle_rope` refuses it.
    """
    settle_rope(model, name, None)
    with unrounded(model):
        return _adapt(model, name, late_borders(model, context_tokens))


def _adapt(model: torch.nn.Module, name: str, late: Mapping[str, float]) -> SelfTest:
    attention.register()
    device = next(model.parameters()).device
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    length = min(TOKENS, int(getattr(config, "max_position_embeddings", None) or TOKENS))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, int(config.vocab_size), length)).to(
        device
    )
    allowed = TOLERANCE.get(next(model.parameters()).dtype, 1e-3)

    def with_borders(logits: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """With borders where they are and, where there are late ones, with those moved."""
        outputs = [logits()]
        if late:
            with moved_borders(model, late):
                outputs.append(logits())
        return outputs

    expected = with_borders(
        lambda: model(input_ids=ids[None], use_cache=False).logits[0, 1:].float()
    )
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    sizes: list[int] = []
    try:
        outputs = with_borders(lambda: _from_pages(model, ids, None, sizes))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model '{name}' cannot generate from slots: {type(error).__name__}: {error}; "
            "use a decoder of transformers whose layers attend through its attention interface"
        ) from error
    worst = _differences(outputs, expected)
    if not worst[0] <= allowed and torch.isfinite(expected[0]).all():
        raise ModelError(
            f"model '{name}' cannot generate from slots: its logits differ by {worst[0]:.2g}"
            f" (relative) from its own forward pass, more than {allowed}; use a decoder whose only"
            " state is keys and values"
        )
    if not worst[-1] <= allowed and torch.isfinite(expected[-1]).all():
        begins = ", ".join(f"{border} {value}" for border, value in late.items())
        raise ModelError(
            f"model '{name}' cannot generate from slots where {begins} begins: its logits differ"
            f" there by {worst[-1]:.2g} (relative) from its own forward pass, more than {allowed};"
            f" give context_tokens below {min(late.values())}, or use a decoder whose attention is"
            " causal, full or with a sliding window"
        )
    kernel = native_kernel(model)
    if kernel is not None:
        try:
            outputs = with_borders(lambda: _from_pages(model, ids, kernel, sizes))
            kernel = (
                kernel
                if all(difference <= allowed for difference in _differences(outputs, expected))
                else None
            )
        except ModelError:
            kernel = None
    fused = None
    if kernel is not None and supports(model):
        fused = FusedStep(model)
        outputs = with_borders(functools.partial(_from_fused, fused, ids))
        fused.read_windows()
        last = [logits[-len(outputs[0]) :] for logits in expected]
        fused = (
            fused
            if all(difference <= allowed for difference in _differences(outputs, last))
            else None
        )
    return SelfTest(kernel, fused, sizes[0])


def _from_fused(fused: FusedStep, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the prompt's last token and of those after it, by the fused step."""
    fused.read_windows()
    first = max(1, len(ids) - DECODED)
    cache, table = KVCache(pages_for(len(ids))), list(range(pages_for(len(ids))))
    prompt = Prefix(tokens=ids[:first].numpy(), cached=0, tables=[table])
    pages, none = torch.tensor([table], dtype=torch.int32), ids[:0]
    logits = [fused(none, none, cache, AttentionLayout(cache, none, 0, pages[:0]), [prompt])]
    for place in range(first, len(ids)):
        positions = torch.tensor([place])
        logits.append(
            fused(
                ids[place : place + 1],
                positions,
                cache,
                AttentionLayout(cache, positions, place + 1, pages),
                [],
            )
        )
    return torch.cat(logits)


def native_kernel(model: torch.nn.Module) -> Kernel | None:
    """What could attend for this model's decoded rows on its device, beside torch's operators."""
    on_gpu = available.attention_kernel(model)
    if on_gpu is not None:
        return on_gpu
    compiled = native.kernel() if native.serves(model) else None
    return None if compiled is None else functools.partial(native.decode_attention, compiled)


def _differences(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """Largest difference of each, relative to the largest that was expected."""
    return [
        float((logits.float() - own).abs().max() / own.abs().max().clamp(min=1e-6))
        for logits, own in zip(outputs, expected, strict=True)
    ]


def _from_pages(
    model: torch.nn.Module, ids: torch.Tensor, kernel: Kernel | None, sizes: list[int]
) -> torch.Tensor:
    """Logits [tokens - 1, V] of the sequence from its second token on: its first page in one pass,
    its beginning behind that in another, and the rest token by token; to `sizes`, the bytes of a
    position.
    """
    pages = list(range(pages_for(len(ids))))
    cache = KVCache(len(pages))

    def put(values: AnyArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(ids.device)

    table = put(np.array([pages], np.int32))
    prompt = ids[: max(1, len(ids) - DECODED)]
    whole = Prefix(tokens=prompt.cpu().numpy(), cached=0, tables=[pages])
    passes = []
    for part in filter(None, whole.cut(PAGE)):
        fresh = lay_out([part], put)
        layout = AttentionLayout(cache, prompt[:0], 0, table[:0], new=fresh.layout)
        passes.append((fresh.tokens, fresh.positions, layout))
    for place in range(len(prompt), len(ids)):
        positions = put(np.array([place]))
        passes.append(
            (
                ids[place : place + 1],
                positions,
                AttentionLayout(cache, positions, place + 1, table, kernel=kernel),
            )
        )
    first = torch.arange(1, len(passes[0][0]), device=ids.device)
    keeps: list[torch.Tensor | int] = [first, *[0] * (len(passes) - 1)]
    logits = [
        model(
            input_ids=tokens[None],
            position_ids=at[None],
            use_cache=False,
            logits_to_keep=keep,
            slot_layout=layout,
        ).logits[0]
        for keep, (tokens, at, layout) in zip(keeps, passes, strict=True)
    ]
    if len(logits[0]) != len(first):
        raise ModelError(
            f"{type(model).__name__} cannot generate from slots: it gave {len(logits[0])} rows of"
            f" logits where {len(first)} were asked for (logits_to_keep); use a decoder that gives"
            " those"
        )
    if not cache.layers:
        raise ModelError(
            f"{type(model).__name__} cannot generate from slots: none of its layers called the"
            " attention interface of transformers; use a decoder that does"
        )
    sizes.append(cache.token_bytes)
    return torch.cat(logits)


CONTEXT_TOKENS = 4096
"""Of a model that does not say how many it takes."""

CAPTURE_S = 30.0
"""Longest time for which steps are captured at the start; what is left is captured in the run."""


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
    agreed: Callable[[int], int] = int,
) -> BuiltEngine:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be
    used.

    `model`: loaded already. `sliced`: where it is one rank's slices, how they are quantised.
    `merged`: what brings adapters into it. `agreed`: the cache's bytes that all ranks of the model
    take, of those that this one has.
    """
    if context.devices.device == "cpu":
        torch.set_num_threads(context.devices.threads)
    intake: Merged | Intake | None = merged
    if model is None:
        model, intake = load_merged(declaration.model, device=context.devices.device)
    context_tokens = context_tokens_of(declaration, model.config)
    tokenizer = load_tokenizer(declaration.model)
    adopt: Literal["view", "copy"] = (
        "view" if context.devices.device == "cpu" and sliced is None else "copy"
    )
    if declaration.weights == "bfloat16":
        intake = cast(model, torch.bfloat16, adopt=adopt)
    tested = adapt(model, declaration.model.name, context_tokens)
    if declaration.compile and context.devices.device != "cpu":
        fuse_layers(model)
    if declaration.weights != "model" and declaration.weights != "bfloat16":
        intake = quantise(
            model,
            declaration.weights,
            adopt=adopt,
            arrives_quantised=context.graph.quantized is not None,
            sliced=sliced,
        )
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    ends, stop = stops_of(tokenizer, model, declaration.stop, vocabulary, chat=declaration.chat)
    tensors = dict(model.named_parameters()) if intake is None else intake.tensors
    arriving = arriving_bytes(context, tensors)
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
        budget=lambda engine: agreed(default_budget(engine, arriving=arriving)),
        prefill_tokens=declaration.prefill_tokens,
        on_update=declaration.on_update,
        record_mask=declaration.records_mask,
        is_checked=sliced is not None,
        tensors=tensors,
        on_adopt=None if intake is None else intake.adopted,
    )
    engine.capture(_lasting(CAPTURE_S, context.clock, sliced))
    return BuiltEngine(engine, tokenizer, ends, native=engine)


def arriving_bytes(context: Context, tensors: Mapping[str, torch.Tensor]) -> int:
    """Of the engine's device, what a version of these tensors takes while it arrives: nothing where
    none comes, or where it lies in main memory, or in that of a trainer of one rank on another
    device.
    """
    reader, share = context.weights.reader, context.devices
    site = reader.site if isinstance(reader, OpensWeights) else None
    if reader is None or (site is not None and site.in_host):
        return 0
    if site is not None and not site.is_sharded and share.aside is None:
        return 0
    distinct = {id(tensor): tensor.nbytes for tensor in tensors.values()}
    return sum(distinct.values())


def _lasting(
    limit_s: float, clock: Callable[[], float], sliced: Sliced | None
) -> Callable[[], bool]:
    """Whether this limit has not passed; of several ranks, on none."""
    end = clock() + limit_s

    def goes_on() -> bool:
        late = torch.tensor([float(clock() >= end)])
        if sliced is not None:
            sliced.largest(late)
        return not late.item()

    return goes_on


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


def make_engine(declaration: GeneratorKnobs, context: Context) -> BuiltEngine:
    """Load model and tokenizer onto the device of `context`; with `tensor_parallel` above 1 this
    process is rank 0, unless it is vLLM that has ranks.

    Raises ModelError when they cannot be used.
    """
    if declaration.engine == "vllm":
        from operators.engine.vllm.engine import build_vllm

        return build_vllm(declaration, context)
    if declaration.tensor_parallel > 1:
        from operators.engine.parallel.lockstep import make_parallel

        return make_parallel(declaration, context, declaration.tensor_parallel)
    return build_native(declaration, context)
