"""`Generator`: turns prompts into rollouts of a language model whose weights may change midway.
Its knobs, and what can be wrong with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa

from dataflow.errors import is_number, is_whole, nearest
from dataflow.model import Model, holds_adapters
from dataflow.model_files import template_fault
from dataflow.node import CapacityTraits, Generate, SamplingTraits, Split, Traits
from dataflow.records import RAW_COMPLETION, SAMPLED_COLUMNS, SAMPLING_MASK, TEMPERATURE, Columns
from dataflow.runtime import Context, Runtime
from dataflow.settable import GROUP, settable
from operators.engine.pages import AHEAD, PREFILL_TOKENS

WEIGHTS = ("model", "bfloat16", "int8", "int8_dynamic", "fp8")
"""How a generator's linear layers may compute."""
_LEFT_OUT = "leave it out"
OURS = {
    "model": "name it in Model(...)",
    "dtype": 'give Model(dtype="...")',
    "trust_remote_code": "give Model(trust_remote_code=True)",
    "max_model_len": "give context_tokens=",
    "max_num_seqs": "give slots=",
    "tensor_parallel_size": "give tensor_parallel=",
    "pipeline_parallel_size": f"a replica has one stage here; {_LEFT_OUT}",
    "data_parallel_size": f"replicas of a node do that; {_LEFT_OUT}",
    "kv_cache_memory_bytes": "give cache_bytes=",
    "distributed_executor_backend": _LEFT_OUT,
    "worker_extension_cls": _LEFT_OUT,
    "weight_transfer_config": _LEFT_OUT,
    "logprobs_mode": f"they are those of the distribution that was sampled; {_LEFT_OUT}",
    "skip_tokenizer_init": _LEFT_OUT,
    "async_scheduling": f"weights change between two steps; {_LEFT_OUT}",
    "disable_log_stats": _LEFT_OUT,
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules"),
        "give Model(lora=LoRA(...))",
    ),
    "lora_dtype": f"adapters are of the model's dtype; {_LEFT_OUT}",
    "fully_sharded_loras": f"each rank has whole adapters; {_LEFT_OUT}",
    "speculative_config": f"its log-probabilities are the draft's at times; {_LEFT_OUT}",
}
"""vLLM's arguments that follow from other knobs, or from what a run promises, and what to do."""
TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Knobs that leave tokens out, with the values at which they do not."""


@dataclass(frozen=True, eq=False)
class GeneratorKnobs(Generate):
    """What `operators.Generator` declares; the engine's ranks build from it, too."""

    answers_turns: ClassVar[bool] = True

    model: Model
    """The policy."""
    group_size: int = 8
    """Rollouts of a prompt that does not say."""
    max_tokens: int = settable(256, at=GROUP)
    """Most tokens of a completion."""
    segment_tokens: int = 32
    """Decode steps between two returns to the worker's loop; a rollout that has grown by so many
    tokens is kept in the run folder, and goes on from there after a crash."""
    temperature: float = settable(1.0, at=GROUP)
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = settable(0, at=GROUP)
    """Only the k likeliest tokens; 0: all."""
    top_p: float = settable(1.0, at=GROUP)
    """Only the likeliest tokens that together reach this probability; 1: all."""
    min_p: float = settable(0.0, at=GROUP)
    """Only tokens at least this share as likely as the likeliest; 0: all."""
    repetition_penalty: float = settable(1.0, at=GROUP)
    """Tokens that occurred in prompt or completion have positive logits divided by this, negative
    ones multiplied; 1: none."""
    stop: tuple[str | int, ...] = ()
    """Strings, or ids of tokens, at which a completion ends; they are not part of its text."""
    slots: int = 256
    """Rollouts that are decoded together."""
    cache_bytes: int | None = None
    """Memory of the KV-cache; None: a share of what is free. Where it runs short, the youngest
    rollouts are parked and go on later."""
    prefill_tokens: int = PREFILL_TOKENS
    """Most prompt tokens that are computed in one step, so that rollouts under way do not wait
    long; a longer prompt takes several steps."""
    tensor_parallel: int = 1
    """Ranks that share out the model: each holds a slice of the weights and its heads' keys and
    values, on a GPU of its own where there are any. Divides the model's attention and key/value
    heads; `slots` and `cache_bytes` are each rank's."""
    in_flight: int | None = None
    """Most prompts between admission and training; None: as many as the staleness bound allows."""
    context_tokens: int | None = None
    """Most tokens of prompt and completion together; None: the model's own limit."""
    on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of unfinished rollouts when weights change: keep (go on from their keys and
    values) or recompute (prefill what they have under the new weights, then go on). Neither throws
    a token away."""
    weights: Literal["model", "bfloat16", "int8", "int8_dynamic", "fp8"] = "model"
    """How layers compute: as the model, bfloat16 (all of it, beside a trainer in float32: twice as
    fast on a CPU with AVX512-BF16), int8 (weights only: half the memory of bfloat16), int8_dynamic
    (inputs too: faster on a CPU from about width 512), fp8 (GPUs from compute capability 8.9,
    bfloat16 models)."""
    compile: bool = False
    """Compile each layer (torch.compile) where this runs on a GPU: steps take a fifth to a quarter
    less, the start ten seconds more. On a CPU kernels of this project compute either way. With
    weights="model", on one rank, and on devices that are its own."""
    arrives_in: Literal["device", "host"] | None = None
    """Where a version of a trainer of several ranks arrives while GPUs compute with another one: on
    these, or in main memory, from which it is copied to them between two steps. None: on them,
    where two versions fit."""
    engine: Literal["native", "vllm"] = "native"
    """Who makes the forward passes: this project's own engine, or vLLM in processes and, if need
    be, an environment of its own (the interpreter that DATAFLOW_VLLM_PYTHON names)."""
    vllm: Mapping[str, Any] | None = None
    """Further arguments of vLLM's engine, by its own names, as {"quantization": "fp8"}."""
    sampling_mask: bool | None = None
    """Add the column sampling_mask: for each token, the ids that top_k, top_p and min_p left, for
    the trainer; None: where one of them is given, and this project's engine samples."""
    raw_completion: bool = False
    """Add the column raw_completion: the completion with its special tokens, for rewards that look
    for them."""
    chat: bool = False
    """Prompts are chat messages as JSON, laid out by the tokenizer's chat template."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """The chat template's own options, as {"enable_thinking": False}; a row's column of this name
    goes before."""

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts in a group, where the prompt does not say."""
        return self.group_size

    @property
    def traits(self) -> Traits:
        """What graphs are checked for, and what a replica takes."""
        return Traits(
            split=Split(tensor_parallel=self.tensor_parallel, apart=self.engine == "vllm"),
            sampling=SamplingTraits(
                temperature=self.temperature,
                unrecorded=self._unrecorded,
                top_k=self.top_k,
                stop=self.stop,
                max_tokens=self.max_tokens,
                context_tokens=self.context_tokens or getattr(self.model, "context_tokens", None),
            ),
            capacity=CapacityTraits(
                in_flight=self.in_flight,
                slots=self.slots,
                cache_bytes=self.cache_bytes,
                prefill_tokens=self.prefill_tokens,
                ahead_tokens=AHEAD,
            ),
            chat=self.chat,
            chat_options=self.chat_template_kwargs or {},
            sleeps=self.engine == "native" and not self.compile,
            arrives_in_host=self.arrives_in == "host",
            ways=({}, {"arrives_in": "host"})
            if self.arrives_in is None and self.engine == "native"
            else (),
        )

    @property
    def records_mask(self) -> bool:
        """Whether its rows have the column sampling_mask."""
        if self.sampling_mask is None:
            return self.engine == "native" and bool(self._truncation)
        return self.sampling_mask

    @property
    def _truncation(self) -> list[str]:
        return [knob for knob, none in TRUNCATION.items() if getattr(self, knob) != none]

    @property
    def _unrecorded(self) -> tuple[str, str] | None:
        if self.repetition_penalty != 1:
            return (
                f"repetition_penalty={self.repetition_penalty!r}",
                "leave it out, or take a loss without a ratio",
            )
        if self.records_mask or not self._truncation:
            return None
        knob = self._truncation[0]
        way_out = (
            "give it sampling_mask=True from the start"
            if self.engine == "native"
            else "leave it out"
        )
        return (
            f"{knob}={getattr(self, knob)!r} and no sampling_mask",
            f"{way_out}, or take a loss without a ratio",
        )

    def _with(self, knob: str, value: Any) -> Self:
        """Rows keep the columns that they have while a run goes on."""
        changed = super()._with(knob, value)
        return changed._with("sampling_mask", self.records_mask) if knob in TRUNCATION else changed

    @property
    def quantized(self) -> str | None:
        """Quantised layers take their weights as they compute with them."""
        return (
            None if self.weights in ("model", "bfloat16") else self.weights.removesuffix("_dynamic")
        )

    def quantized_tensors(self) -> frozenset[str]:
        """The weights of the linear layers. Raises ModelError when the model's config cannot be
        read.
        """
        from operators.engine.precision.intake import quantized_names

        return quantized_names(self.model)

    def missing(self) -> str | None:
        """Also a template, where prompts are chats."""
        return super().missing() or (template_fault(self.model) if self.chat else None)

    def provides(self, columns: Columns) -> Columns:
        """The prompt's columns, the rollout's, its temperature and, where asked for, the raw text
        and the mask.
        """
        is_asked = {RAW_COMPLETION: self.raw_completion, SAMPLING_MASK: self.records_mask}
        optional = {name: kind for name, kind in SAMPLED_COLUMNS.items() if is_asked[name]}
        return {**super().provides(columns), TEMPERATURE: pa.float64(), **optional}

    def faults(self) -> list[str]:
        """Knobs that cannot be right, each as: what is wrong, what was found, what to do."""
        faults = [
            f"'{self.name}' needs {knob} of at least {least}, but got {value!r}; raise it"
            for knob, least, value in (
                ("group_size", 1, self.group_size),
                ("max_tokens", 1, self.max_tokens),
                ("segment_tokens", 1, self.segment_tokens),
                ("slots", 1, self.slots),
                ("prefill_tokens", 16, self.prefill_tokens),
                ("tensor_parallel", 1, self.tensor_parallel),
                ("in_flight", 1, 1 if self.in_flight is None else self.in_flight),
                ("context_tokens", 2, 2 if self.context_tokens is None else self.context_tokens),
                ("top_k", 0, self.top_k),
                ("cache_bytes", 1, 1 if self.cache_bytes is None else self.cache_bytes),
            )
            if not is_whole(value, least)
        ]
        if not is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            faults.append(
                f"'{self.name}' needs a temperature of 0 or more, but got {self.temperature!r}; "
                "use 1.0 to sample from the policy itself, 0 for the likeliest token"
            )
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            faults.append(
                f"'{self.name}' needs top_p above 0 and at most 1, but got {self.top_p!r}; use 1.0"
                " for all"
            )
        if not is_number(self.min_p) or not 0 <= self.min_p <= 1:
            faults.append(
                f"'{self.name}' needs min_p from 0 to 1, but got {self.min_p!r}; use 0.0 for all"
                " tokens"
            )
        if not is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < float("inf"):
            faults.append(
                f"'{self.name}' needs a repetition_penalty above 0, but got"
                f" {self.repetition_penalty!r}; use 1.0 for none"
            )
        if not isinstance(self.stop, tuple) or not all(_is_stop(word) for word in self.stop):
            faults.append(
                f"'{self.name}' needs stop as a tuple of token ids and strings that are not empty, "
                f'but got {self.stop!r}; give it as stop=("END",)'
            )
        faults += options_faults(self.name, self.chat, self.chat_template_kwargs)
        if self.on_update not in ("keep", "recompute"):
            faults.append(
                f"'{self.name}' got on_update={self.on_update!r}, which is not known; use \"keep\""
                ' or "recompute"'
            )
        if self.arrives_in not in (None, "device", "host"):
            faults.append(
                f"'{self.name}' got arrives_in={self.arrives_in!r}, which is not known; use"
                ' "device" or "host", or leave it out'
            )
        if self.engine not in ("native", "vllm"):
            faults.append(
                f"'{self.name}' got engine={self.engine!r}, which is not known; use \"native\" or"
                ' "vllm"'
            )
        own = {
            "sampling_mask": False,
            "weights": "model",
            "compile": False,
            "arrives_in": None,
            "prefill_tokens": GeneratorKnobs.prefill_tokens,
        }
        unlike = [knob for knob, value in own.items() if (getattr(self, knob) or value) != value]
        faults += self._vllm_faults()
        if self.engine == "vllm" and unlike:
            faults.append(
                f"'{self.name}' runs on vLLM, which does not serve {unlike[0]}, but got"
                f" {unlike[0]}="
                f'{getattr(self, unlike[0])!r}; leave it out, or use engine="native"'
            )
        own = {"weights": "model", "tensor_parallel": 1}
        unlike = [knob for knob, value in own.items() if getattr(self, knob) != value]
        if self.compile and unlike and self.engine == "native":
            faults.append(
                f"'{self.name}' compiles layers of whole models that compute as they are, but got"
                f" {unlike[0]}={getattr(self, unlike[0])!r}; leave it out, or compile"
            )
        if (
            isinstance(self.model, Model)
            and self.engine == "vllm"
            and self.model.lora is None
            and holds_adapters(self.model.source)
        ):
            faults.append(
                f"'{self.name}' runs on vLLM, which is given whole models, but {self.model.source}"
                " holds adapters alone; give Model(..., lora=LoRA()) to go on from them, or use"
                ' engine="native"'
            )
        if isinstance(self.model, Model) and self.model.lora and self.weights != "model":
            faults.append(
                f"'{self.name}' merges adapters (lora=) into weights of its own, but got"
                f" weights={self.weights!r}; use weights='model', or a Model without lora"
            )
        if self.weights == "bfloat16" and self.tensor_parallel > 1:
            faults.append(
                f"'{self.name}' casts whole models with weights='bfloat16', but got"
                " tensor_parallel="
                f'{self.tensor_parallel}; use Model(dtype="bfloat16"), or one rank'
            )
        if self.weights not in WEIGHTS:
            faults.append(
                f"'{self.name}' got weights={self.weights!r}, which is not known; use one of"
                f" {list(WEIGHTS)}"
            )
        if isinstance(self.model, Model) and self.model.head != "lm":
            faults.append(
                f"'{self.name}' generates with model '{self.model.name}', whose head is"
                f" {self.model.head!r}; "
                f'give it a Model with head="lm"'
            )
        return faults

    def _vllm_faults(self) -> list[str]:
        """What is wrong with vLLM's own arguments."""
        if self.vllm is None:
            return []
        if self.engine != "vllm":
            return [
                f"'{self.name}' has arguments for vLLM, but runs on engine={self.engine!r}; found"
                f' vllm={dict(self.vllm)!r}; leave it out, or use engine="vllm"'
            ]
        faults = []
        known = None
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:  # more than a folder of that name
            from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]

            known = {field.name for field in fields(EngineArgs)}
        for name in self.vllm:
            if name in OURS:
                faults.append(
                    f"'{self.name}' gives vLLM {name!r}, which this project decides; found"
                    f" {self.vllm[name]!r}; {OURS[name]}"
                )
            elif known is not None and name not in known:
                faults.append(
                    f"'{self.name}' gives vLLM {name!r}, which is none of its arguments"
                    f"{nearest(name, sorted(known))}; see vLLM's EngineArgs"
                )
        return faults


def options_faults(name: str, chat: bool, options: object) -> list[str]:
    """What is wrong with options of a chat template."""
    if options is None or (
        chat and isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
    ):
        return []
    do = (
        'give an object, as {"enable_thinking": False}'
        if chat
        else "set chat=True, or leave them out"
    )
    return [f"'{name}' has chat_template_kwargs={options!r}, which no chat template is given; {do}"]


def _is_stop(value: object) -> bool:
    return bool(value) if isinstance(value, str) else is_whole(value, 0)


@dataclass(frozen=True, eq=False)
class Generator(GeneratorKnobs):
    """Samples `group_size` rollouts of every prompt with the model's newest weights.

    Rollouts are decoded together, one token each per step, from a KV-cache in pages; a slot that a
    finished rollout leaves is refilled at the next step, and the rollouts of a group share the
    pages of their prompt.

    Its knobs: `operators.generator.GeneratorKnobs`.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts
    >>> generator = Generator(Model("policies/sums"), group_size=8, max_tokens=64)
    >>> rollouts = generator(Graph("sums").source(Prompts(["2+2=", "3+4="])))
    >>> {"completion", "tokens", "logprobs", "versions"} <= set(rollouts.columns)
    True
    """

    def preload(self) -> None:
        """Import torch, the model's code and the runtime."""
        import operators.engine.build
        import operators.generation.runtime
        from operators.models.loading import preload

        if self.engine == "vllm":
            import operators.engine.vllm.engine
        elif self.tensor_parallel > 1:
            import operators.engine.parallel.lockstep  # noqa: F401
        preload(self.model)

    def build(self, context: Context) -> Runtime:
        """Load the model and make the engine. Raises ModelError when either cannot be."""
        from operators.generation.runtime import GeneratorRuntime

        return GeneratorRuntime(self, context)
