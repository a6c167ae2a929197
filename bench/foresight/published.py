"""Published runs as the cost model sees them: what their sources say, and one stated assumption per system."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.generation import Replica, generate, sustain
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.links import exchange
from dataflow.foresight.parts import Parts
from dataflow.foresight.rates import ASSUMED, Rates
from dataflow.foresight.training import BACKWARD, Learners
from transport.weights.costs.decoder import Decoder, Experts, Latent


@dataclass(frozen=True, kw_only=True)
class Practice:
    """How a system makes its step, and what it does not publish."""

    assumption: str
    """The one that is made, in a sentence."""
    prompt_tokens: float
    forward: float
    """Forward passes of a step, a backward pass as two: also of log-probabilities, and what is computed again."""
    forward_overlapping: float | None = None
    """The same of an asynchronous step, where it is published as another."""
    generates: str = "bfloat16"
    """Dtype of an asynchronous generator."""
    gathers: bool = True
    """Whether an asynchronous generator's devices take in whole tensors, and not their shares alone."""
    mean_holds_prompt: bool = False
    """Whether the published mean length is of prompt and answer."""
    rollouts: int = 0
    """Of a step, where they are not in the rows."""
    mean_tokens: float = 0.0
    """Of an answer, where it is not in the rows."""
    max_tokens: float = 0.0
    sigma: float = 0.8
    """Of the logarithm of lengths."""


PRACTICES = {
    "NeMo-RL-0.6": Practice(
        assumption="half of the devices generate", prompt_tokens=110, forward=1 + 1 + 1 + BACKWARD,
    ),
    "NeMo-RL-0.4": Practice(
        assumption="half of the devices generate", prompt_tokens=110, mean_holds_prompt=True,
        forward=1 + 1 + 1 + BACKWARD,
    ),
    "verl": Practice(
        assumption="answers of 800 tokens in the mean (searched)", prompt_tokens=150, rollouts=512 * 16,
        mean_tokens=800, sigma=0.5, max_tokens=28000, forward=1 + 1 + 1 + BACKWARD,
        forward_overlapping=1 + 1 + BACKWARD,
    ),
    "LlamaRL": Practice(
        assumption="1,024 answers of 500 tokens in the mean, of at most 2,048 (searched)", prompt_tokens=150,
        rollouts=1024, mean_tokens=500, sigma=0.4, max_tokens=2048, forward=1 + 1 + BACKWARD, generates="fp8",
        gathers=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row, in seconds at the full rates of data sheets."""

    row: Mapping[str, str]
    generation: Parts
    training: Parts
    exchange: Parts
    overlaps: bool
    """Whether generation and training go on at once."""

    @property
    def step_s(self) -> float:
        """As published."""
        return float(self.row["step_s"])

    def predicted_s(self, rates: Rates) -> float:
        """With these constants: the longer of both where they overlap, or their sum; weights after either."""
        both = self.generation.seconds(rates), self.training.seconds(rates)
        return (max(both) if self.overlaps else sum(both)) + self.exchange.seconds(rates)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of a table with the columns of rl_steps.csv."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_models(path: Path) -> dict[str, Counts]:
    """Of models.json."""
    return {name: counts(_decoder(each)) for name, each in json.loads(path.read_text()).items()}


def _decoder(each: Mapping[str, Any]) -> Decoder:
    experts = latent = None
    if "experts" in each:
        experts = Experts(
            number=each["experts"], per_token=each["experts_per_token"], inner=each["expert_ffn"],
            shared=each.get("shared_experts", 0), dense_layers=each.get("dense_layers", 0),
        )  # fmt: skip
    if "kv_lora_rank" in each:
        latent = Latent(
            queries=each["q_lora_rank"], keys=each["kv_lora_rank"], plain=each["qk_nope_head_dim"],
            rotated=each["qk_rope_head_dim"], values=each["v_head_dim"],
        )  # fmt: skip
    return Decoder(
        layers=each["layers"], width=each["hidden"], inner=each.get("ffn", 0), heads=each["heads"],
        kv_heads=each.get("kv_heads", each["heads"]), vocabulary=each["vocab"],
        head_width=each.get("head_dim", each.get("v_head_dim", 0)), experts=experts, latent=latent,
    )  # fmt: skip


def seen(row: Mapping[str, str], models: Mapping[str, Counts], practice: Practice, rates: Rates = ASSUMED) -> Run:
    """A row by the cost model. KeyError for a model that `models` lacks."""

    def number(column: str, otherwise: float) -> float:
        return float(row[column]) if row.get(column) else otherwise

    kind, model = device_kind(row["gpu"]), models[row["model"]]
    devices, overlaps = int(row["gpus"]), row["mode"] == "async"
    trains = int(number("gpus_trainer", devices / 2 if overlaps else devices))
    makes = int(number("gpus_generator", devices - trains if overlaps else devices))
    rollouts = number("rollouts_per_generation", practice.rollouts)
    mean = number("mean_tokens", practice.mean_tokens) - practice.prompt_tokens * practice.mean_holds_prompt
    lengths = Lengths.drawn(mean, number("max_tokens", practice.max_tokens), practice.sigma)
    forward = (practice.forward_overlapping if overlaps else None) or practice.forward
    shares = overlaps and not practice.gathers
    replica = fitting(Replica(
        model=model, kind=kind, dtype=practice.generates if overlaps else "bfloat16",
        tensor_parallel=int(number("generator_tp", 0)), pipeline_parallel=int(number("generator_pp", 1)),
    ), practice.prompt_tokens + mean, rates)  # fmt: skip
    learners = Learners(
        model=model, kind=kind, ranks=trains, tensor_parallel=int(number("trainer_tp", 1)),
        context_parallel=int(number("trainer_cp", 1)), pipeline_parallel=int(number("trainer_pp", 1)),
        expert_parallel=int(number("trainer_ep", 1)),
    )  # fmt: skip
    each = rollouts / max(1, makes // replica.ranks)
    return Run(
        row=row,
        generation=sustain(replica, lengths, practice.prompt_tokens, each, rates, at_once=each) if overlaps
        else generate(replica, lengths, practice.prompt_tokens, each, rates),
        training=learners.passes(
            rollouts, practice.prompt_tokens + mean, forward=forward,
            sequences=number("rollouts_per_step", rollouts),
        ),
        exchange=Parts(links=exchange(model, kind, makes) / (replica.ranks if shares else 1)), overlaps=overlaps,
    )  # fmt: skip


def fitting(replica: Replica, tokens: float, rates: Rates) -> Replica:
    """Itself, or, where its tensor parallelism is not known (0), the least whose cache holds 32 rollouts."""
    if replica.tensor_parallel:
        return replica
    for ranks in (1, 2, 4, 8, 16, 32):
        found = replace(replica, tensor_parallel=ranks)
        free = rates.cache_share * found.kind.memory_bytes * found.ranks - found.weight_bytes
        if free > 32 * tokens * found.cache_bytes:
            return found
    return found


def by_system(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Rows of each."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return found
