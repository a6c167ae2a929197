"""Published runs as the cost model sees them: what their sources say, and one stated assumption per
system.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from bench.foresight.rows import number as number_of
from dataflow.foresight.catalogue import DeviceKind, device_kind
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.generation import GeneratorReplica, generate, sustain
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.rates import ASSUMED, Parts, Rates
from dataflow.foresight.training import BACKWARD, STATE_BYTES, Learners
from transport.weights.costs.decoder import Decoder, Experts, Latent

_SAMPLES = 1 << 14
"""Lengths: more than the rollouts of any step here, of which the longest matters."""
_DTYPE_BYTES = 2
_UPDATE = 1 + 1 + BACKWARD
"""Forward passes that an update comes to, with activations that are computed again."""
_HALVES, _EIGHTHS = (4 / 8,), tuple(part / 8 for part in range(1, 8))


@dataclass(frozen=True, kw_only=True)
class Practice:
    """How a system makes its step, and what it does not publish."""

    assumption: str
    """The one that is made, in a sentence."""
    prompt_tokens: float
    forward: float
    """Forward passes of a step, a backward pass as two: also of log-probabilities, and what is
    computed again."""
    forward_overlapping: float | None = None
    """The same of an asynchronous step, where it is published as another."""
    generates: str = "bfloat16"
    """Dtype of an asynchronous generator."""
    gathers: bool = True
    """Whether an asynchronous generator's devices take in whole tensors, and not their shares
    alone."""
    mean_holds_prompt: bool = False
    """Whether the published mean length is of prompt and answer."""
    rollouts: int = 0
    """Of a step, where they are not in the rows."""
    updates: int = 1
    """Of a step, where the rows do not say how many rollouts each has."""
    mean_tokens: float = 0.0
    """Of an answer, where it is not in the rows."""
    max_tokens: float = 0.0
    sigma: float = 0.8
    """Of the logarithm of lengths."""
    splits: tuple[float, ...] = _HALVES
    """Shares of the devices that train in an asynchronous step, of which the fastest at assumed
    rates is taken."""
    group: int = 16
    """Rollouts of a prompt, which are trained together."""
    ahead: float = 1.0
    """Steps' worth of prompts that may begin early, where the rows do not say."""
    fetches: int = 1
    """Parts in which an asynchronous trainer takes the rollouts of a step."""
    generator_tp: int = 0
    """0: within a node, the fastest at assumed rates."""
    trainer_cp: int = 1
    dealt: bool = False
    """Whether ranks have as many rollouts of an update each, however long these are."""
    resides: bool = False
    """Whether a synchronous trainer's optimizer stays where rollouts are generated, with the
    trainer's cuts; else it makes room."""


PRACTICES = {
    # Half of the devices generate: examples/configs/recipes/llm/performance of NeMo-RL.
    "NeMo-RL-0.6": Practice(
        assumption="lengths are log-normal with a sigma of 0.8",
        prompt_tokens=110,
        forward=1 + _UPDATE,
    ),
    "NeMo-RL-0.4": Practice(
        assumption="lengths are log-normal with a sigma of 0.8",
        prompt_tokens=110,
        mean_holds_prompt=True,
        forward=1 + _UPDATE,
    ),
    # Cuts and mini-batches: its scripts, recipe/fully_async_policy. Ranks are balanced over a step,
    # not over an update.
    "verl": Practice(
        assumption="answers are log-normal, 800 tokens in the mean with a sigma of 1.8 (searched)",
        prompt_tokens=150,
        rollouts=512 * 16,
        updates=16,
        mean_tokens=800,
        sigma=1.8,
        max_tokens=28 * 1024,
        forward=1 + _UPDATE,
        forward_overlapping=_UPDATE,
        ahead=0.5,
        fetches=4,
        generator_tp=4,
        trainer_cp=4,
        dealt=True,
    ),
    # The baseline is the setting of its theorem: both sides share devices, cuts and a memory bound.
    "LlamaRL": Practice(
        assumption=(
            "512 answers, log-normal, 1,500 tokens in the mean with a sigma of 0.6, of at most"
            " 4,096 (searched)"
        ),
        prompt_tokens=150,
        rollouts=512,
        mean_tokens=1500,
        sigma=0.6,
        max_tokens=4096,
        forward=_UPDATE,
        generates="fp8",
        gathers=False,
        splits=_EIGHTHS,
        resides=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row, in seconds at the full rates of data sheets."""

    row: Mapping[str, str]
    generation: Parts
    training: Parts
    exchange: Parts
    overlaps: bool
    """Whether generation and training go on at once."""
    waits: Parts = Parts()
    """Where they do: from a version on, for the groups that its step needs, and to train the last
    of them."""

    @property
    def step_s(self) -> float:
        """As published."""
        return float(self.row["step_s"])

    def predicted_s(self, rates: Rates) -> float:
        """With these constants: the longest where they overlap, or their sum; weights after
        either.
        """
        both = self.generation.seconds(rates), self.training.seconds(rates)
        busy = max(*both, self.waits.seconds(rates)) if self.overlaps else sum(both)
        return busy + self.exchange.seconds(rates)


def read_models(path: Path) -> dict[str, Counts]:
    """Of models.json."""
    return {name: counts(_decoder(facts)) for name, facts in json.loads(path.read_text()).items()}


def _decoder(facts: Mapping[str, Any]) -> Decoder:
    experts = latent = None
    if "experts" in facts:
        experts = Experts(
            number=facts["experts"],
            per_token=facts["experts_per_token"],
            inner=facts["expert_ffn"],
            shared=facts.get("shared_experts", 0),
            dense_layers=facts.get("dense_layers", 0),
        )
    if "kv_lora_rank" in facts:
        latent = Latent(
            queries=facts["q_lora_rank"],
            keys=facts["kv_lora_rank"],
            plain=facts["qk_nope_head_dim"],
            rotated=facts["qk_rope_head_dim"],
            values=facts["v_head_dim"],
        )
    return Decoder(
        layers=facts["layers"],
        width=facts["hidden"],
        inner=facts.get("ffn", 0),
        heads=facts["heads"],
        kv_heads=facts.get("kv_heads", facts["heads"]),
        vocabulary=facts["vocab"],
        head_width=facts.get("head_dim", facts.get("v_head_dim", 0)),
        experts=experts,
        latent=latent,
    )


def seen(
    row: Mapping[str, str], models: Mapping[str, Counts], practice: Practice, rates: Rates = ASSUMED
) -> Run:
    """A row that is understood by the cost model: of the ways that its source leaves open, the
    fastest at these rates.

    KeyError for a model that `models` lacks.
    """

    def number(column: str, otherwise: float) -> float:
        return number_of(row, column, otherwise)

    kind, model = device_kind(row["gpu"]), models[row["model"]]
    devices, overlaps = int(number("gpus", 1)), row["mode"] == "async"
    prompt, together = practice.prompt_tokens, practice.resides and not overlaps
    unknown = together and not row.get("generator_tp")  # how the sides' common cuts are
    rollouts = number("rollouts_per_generation", practice.rollouts or 1024)
    updated = number("rollouts_per_step", rollouts / practice.updates)
    mean = max(
        1.0,
        number("mean_tokens", practice.mean_tokens or 1500) - prompt * practice.mean_holds_prompt,
    )
    ahead = number("staleness", practice.ahead)
    lengths = Lengths.drawn(
        mean,
        max(1.01 * mean, number("max_tokens", practice.max_tokens or 8192)),
        practice.sigma,
        _SAMPLES,
    )
    forward = (practice.forward_overlapping if overlaps else None) or practice.forward
    readings = []
    for split, (tensor, stages) in itertools.product(
        practice.splits if overlaps else _HALVES,
        cuts(model, kind) if practice.resides else [(1, 1)],
    ):
        trains = int(number("gpus_trainer", max(1.0, devices * split) if overlaps else devices))
        makes = int(number("gpus_generator", max(1, devices - trains) if overlaps else devices))
        learners = Learners(
            model=model,
            kind=kind,
            ranks=trains,
            tensor_parallel=int(number("trainer_tp", tensor)),
            context_parallel=int(number("trainer_cp", practice.trainer_cp)),
            pipeline_parallel=int(number("trainer_pp", stages)),
            expert_parallel=int(number("trainer_ep", 1)),
        )
        passes = learners.passes(rollouts, prompt + mean, forward=1.0, sequences=updated)
        unequal = slowest(learners, lengths, updated) if practice.dealt else 1.0
        replica = GeneratorReplica(
            model=model,
            kind=kind,
            dtype=practice.generates if overlaps else "bfloat16",
            tensor_parallel=int(
                number("generator_tp", tensor if unknown else practice.generator_tp)
            ),
            pipeline_parallel=int(number("generator_pp", stages if unknown else 1)),
            interleaves=not together,
            reserved_bytes=STATE_BYTES * model.parameters if unknown else 0.0,
        )
        for choice in (
            [replica] if replica.tensor_parallel else fitting(replica, prompt + mean, rates)
        ):
            share = rollouts / max(1, makes // choice.ranks)
            # devices that take in a version together
            takes = choice.ranks if overlaps and not practice.gathers else 1
            training = passes * (forward - _UPDATE + _UPDATE * unequal) + learners.sums() * (
                rollouts / updated
            )
            late = stragglers(
                choice, lengths, prompt, share, rates, group=practice.group, ahead=ahead
            )
            readings.append(
                Run(
                    row=row,
                    overlaps=overlaps,
                    training=training,
                    waits=late + training * (1 / practice.fetches),
                    generation=(
                        sustain(choice, lengths, prompt, share, rates, at_once=share)
                        if overlaps
                        else generate(choice, lengths, prompt, share, rates, of=rollouts)
                    ),
                    exchange=Parts(
                        links=0.0 if together else _exchange(model, kind, makes) / takes
                    ),
                )
            )
    return min(readings, key=lambda run: run.predicted_s(rates))


def _exchange(model: Counts, kind: DeviceKind, devices: int) -> float:
    """Of a version by which every device takes in each tensor whole, as where ranks gather and then
    broadcast.
    """
    nodes = max(1, -(-devices // kind.per_node))
    nbytes = model.parameters * _DTYPE_BYTES
    return (
        nbytes / kind.within_bytes_per_s
        if nodes == 1
        else nbytes * (1 - 1 / nodes) / kind.between_bytes_per_s
    )


def slowest(learners: Learners, lengths: Lengths, sequences: float) -> float:
    """Tokens of the replica that has most of them between two updates, over their mean, where
    rollouts are dealt out whatever their length.

    A sum of n lengths is about normal, with their spread over the root of n; the largest of r
    normal numbers is (r - 3/8) / (r + 1/4) of the way up in the mean (Blom, 1958).
    """
    if learners.replicas <= 1:
        return 1.0
    furthest = NormalDist().inv_cdf((learners.replicas - 0.375) / (learners.replicas + 0.25))
    return 1 + furthest * lengths.spread / math.sqrt(max(1.0, sequences / learners.replicas))


def stragglers(
    replica: GeneratorReplica,
    lengths: Lengths,
    prompt_tokens: float,
    rollouts: float,
    rates: Rates,
    *,
    group: int,
    ahead: float,
) -> Parts:
    """Seconds from a new version of the weights until the groups that its step needs are whole.

    rollouts: of a step. ahead: steps' worth of groups that may begin before it does. With none, the
    step needs all groups that begin with its version; with a tenth, all but the slowest tenth; with
    one, nobody who began with it.
    """
    if ahead >= 1:
        return Parts()
    tokens = lengths.longest_of(group, 1 - ahead)
    alive = max(1.0, rollouts * min(1.0, lengths.mean / tokens))  # while they last, in the mean
    return replica.step(alive, prompt_tokens + tokens / 2, rates) * tokens


def cuts(model: Counts, kind: DeviceKind) -> list[tuple[int, int]]:
    """Ranks of tensor parallelism within a node, and stages, that hold what is trained: the fewest,
    and up to a node.

    Weights and gradients in two bytes, and the optimizer's state.
    """
    need = (2 + 2 + STATE_BYTES) * model.parameters
    within = [
        ranks
        for ranks in (1, 2, 4, 8)
        if ranks <= kind.per_node and ranks * kind.memory_bytes >= need
    ]
    if within:
        return [(ranks, 1) for ranks in within]
    stages = 2
    while stages * kind.per_node * kind.memory_bytes < need:
        stages *= 2
    return [(kind.per_node, stages)]


def fitting(replica: GeneratorReplica, tokens: float, rates: Rates) -> list[GeneratorReplica]:
    """With each tensor parallelism within a node, or the least beyond, whose cache holds 32
    rollouts.
    """
    fitting_replicas: list[GeneratorReplica] = []
    for ranks in (1, 2, 4, 8, 16, 32):
        candidate = replace(replica, tensor_parallel=ranks)
        room = (
            rates.cache_share * candidate.kind.memory_bytes * candidate.ranks
            - candidate.weight_bytes
            - candidate.reserved_bytes
        )
        if room > 32 * tokens * candidate.cache_bytes and (
            ranks <= candidate.kind.per_node or not fitting_replicas
        ):
            fitting_replicas.append(candidate)
    return fitting_replicas or [replace(replica, tensor_parallel=32)]


def by_system(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Rows of each."""
    by_name: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        by_name.setdefault(row["system"], []).append(row)
    return by_name
