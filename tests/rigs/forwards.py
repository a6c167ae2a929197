"""What tests of forward operators share: folders of tiny models, rollouts with a text, a runtime
among fakes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from dataflow.records import (
    PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    schema,
)
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from operators.forward import ForwardOperator
from operators.forward_pass.build import ForwardRuntime
from operators.forward_pass.reading import reading_of
from operators.models.loading import load_model
from operators.warm_start.train import character_tokenizer
from rigs.columns import whole
from rigs.heads import SIZES
from rigs.operators import make_context
from rigs.policy import ALPHABET

COLUMNS = {**PROMPT_COLUMNS, **ROLLOUT_COLUMNS}
LANE = "prompts"


def tokenizer_of(alphabet: str = ALPHABET) -> Any:
    """A token per letter."""
    return character_tokenizer(alphabet, 64)


def saved(module: Any, folder: Path, tokenizer: Any | None = None) -> Path:
    """A module and a tokenizer as a Hugging Face folder."""
    module.save_pretrained(folder)
    (tokenizer or tokenizer_of()).save_pretrained(folder)
    return folder


def language_model(family: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """`family`ForCausalLM with random weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def rollouts(
    group_id: int,
    texts: Sequence[str] = ("b2=c", "x", "19"),
    *,
    prompt: str = "a1=",
    version: int = 0,
    errors: Mapping[int, str] | None = None,
    drop: str | None = None,
    masks: Mapping[int, list[int]] | None = None,
    tokenizer: Any | None = None,
) -> pa.RecordBatch:
    """A group: the prompt's tokens, the completion's, and the end token.

    errors: by row. drop: the reason of the group. masks: by token of the completion the ids that
    truncation left.
    """
    tokenizer = tokenizer or tokenizer_of()
    rows = []
    for position, text in enumerate(texts):
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        new = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        row: dict[str, Any] = {
            "group_id": group_id,
            "prompt_id": f"p{group_id}",
            "prompt": prompt,
            "group_size": len(texts),
            "min_version": 0,
            "round_size": 0,
            "rollout_id": group_id * len(texts) + position,
            "position": position,
            "completion": text,
            "tokens": asked + new,
            "mask": [False] * len(asked) + [True] * len(new),
            "logprobs": [0.0] * len(asked) + [-1.0] * len(new),
            "versions": [-1] * len(asked) + [version] * len(new),
            "finish_reason": "stop",
            "error": (errors or {}).get(position),
        }
        if masks is not None:
            left = [[*masks[at], token] if at in masks else None for at, token in enumerate(new)]
            row[SAMPLING_MASK] = [None] * len(asked) + left
        if drop is not None:
            row["drop_reason"] = drop
        rows.append(row)
    columns: dict[str, pa.DataType] = dict(COLUMNS)
    columns |= {SAMPLING_MASK: SAMPLING_MASK_TYPE} if masks is not None else {}
    columns |= {"drop_reason": pa.string()} if drop is not None else {}
    return pa.RecordBatch.from_pylist(rows, schema=schema(columns))


def together(*groups: pa.RecordBatch) -> pa.RecordBatch:
    """Groups in one batch."""
    return pa.Table.from_batches(groups).combine_chunks().to_batches()[0]


def plain_logprobs(module: Any, row: Mapping[str, Any], temperature: float = 1.0) -> list[float]:
    """Of one rollout's chosen tokens by the model's own forward, 0 elsewhere."""
    logits = module(input_ids=torch.tensor([row["tokens"]])).logits[0] / temperature
    found = torch.zeros(len(row["tokens"]))
    for at in range(1, len(row["tokens"])):
        if row["mask"][at]:
            found[at] = logits[at - 1].log_softmax(-1)[row["tokens"][at]]
    return found.tolist()


@dataclass
class Versions:
    """A weight plane's end: versions that the test offers, and the trainer's note."""

    offers: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    note: dict[str, int] = field(default_factory=dict)
    version: int = -1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> "Versions":
        self.tensors = tensors
        return self

    def offer(
        self, version: int, weights: Mapping[str, torch.Tensor] | None = None, dropped: int = 0
    ) -> None:
        """Publish a version, and say so."""
        self.offers[version] = self.tensors if weights is None else weights
        self.note = {"version": version, "dropped": dropped}

    def poll(self) -> SimpleNamespace | None:
        newest = max(self.offers, default=-1)
        return SimpleNamespace(version=newest) if newest > self.version else None

    def adopt(self) -> int:
        self.version = max(self.offers)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(self.offers[self.version][name])
        return self.version


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Forwarding:
    """A forward operator's runtime among fakes."""

    runtime: ForwardRuntime
    clock: Clock
    acks: list[int] = field(default_factory=list)
    out: list[pa.RecordBatch] = field(default_factory=list)

    def push(self, *groups: pa.RecordBatch, source: str = LANE) -> None:
        """One batch; its ack is written down by its first group."""
        records = together(*groups)
        first = records.column("group_id")[0].as_py()
        self.runtime.push(
            Batch(source, records, "generator", whole(records, lambda: self.acks.append(first)))
        )

    def step(self) -> bool:
        """One slice; whether anything was done."""
        made = self.runtime.work()
        self.out += [batch.records for batch in made or ()]
        return made is not None

    def run(self, *groups: pa.RecordBatch) -> pa.Table:
        """Push, work until there is nothing to do; all rows that came out."""
        if groups:
            self.push(*groups)
        while self.step():
            pass
        return pa.Table.from_batches(self.out, self.out[0].schema if self.out else schema(COLUMNS))


def forwarding(
    declaration: ForwardOperator,
    *,
    plane: Versions | None = None,
    max_staleness: int = 0,
    every: int | None = None,
    prompts_per_step: int = 2,
    source_prompts: int | None = None,
    module: Any | None = None,
) -> Forwarding:
    """source_prompts: groups per step of the policy's trainer; prompts_per_step: of the operator's
    own.
    """
    clock = Clock()
    facts: dict[str, Any] = {}
    if plane is not None:
        source = Bound(max_staleness=4, prompts_per_step=source_prompts or prompts_per_step)
        facts = {
            "reader": plane,
            "bounds": {LANE: source},
            "feedback": Bound(
                max_staleness=max_staleness, prompts_per_step=prompts_per_step, every=every
            ),
        }
    context = make_context(node=declaration.name, columns={LANE: COLUMNS}, clock=clock, **facts)
    loaded = load_model(declaration.model).requires_grad_(False) if module is None else module
    reading = reading_of(declaration, declaration.name, loaded, is_alone=True)
    return Forwarding(ForwardRuntime(declaration, context, reading), clock)


def lists_of(table: pa.Table, name: str) -> list[Any]:
    """A column as plain values."""
    return table.column(name).to_pylist()


def flat(values: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """Lists end to end."""
    return np.concatenate([np.asarray(each, np.float64) for each in values])
