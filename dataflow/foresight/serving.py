"""A decode step of a server that takes in prompts between its steps: its work at full rates, and
seven constants."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts
from dataflow.foresight.links import PER_LAYER

BITS = {"bfloat16": 16, "fp8": 8, "fp4": 4.5, "mxfp4": 4.25, "int4": 4.5}
"""Of a weight and its share of a scale: one of 8 bits for 16 or 32 weights, one of 16 for 32
(int4)."""
_CACHE_BYTES = 2
_TILE, _NARROW_TILE = 64, 8
"""Rows that a product computes at least: of Hopper's matrix instructions; where 4 bits are native,
tokens lie on their narrow side."""
_OPERATIONS = {"A100": 2048, "H100": 4096, "H200": 4096, "B200": 8192}
"""Of a multiprocessor in a cycle, in bfloat16, by the device's best instructions."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """Formats of a checkpoint's weights; embedding and output layer are bfloat16."""

    dense: str = "bfloat16"
    """Of attention, MLPs and shared experts."""
    experts: str = "bfloat16"
    """Of routed ones."""


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """What one token of a batch takes, in its own unit each; a time is their product with
    `ServerConstants`."""

    memory: float
    """Seconds at the full bandwidth: weights once, and the cache."""
    products: float
    """Seconds at full rates, for the batch's tokens and for the prompts that come in meanwhile."""
    tiles: float
    """Seconds at full rates of experts' products, which are computed in whole tiles, mostly empty
    for small batches."""
    links: float
    """Seconds of all-reduces at the links' full rates."""
    hops: float
    """All-reduces, times the binary logarithm of their ranks."""
    layers: float
    mixtures: float
    """Layers that have experts."""

    @property
    def busy(self) -> float:
        """Seconds in which memory and products are busy at full rates: no server does better by
        much."""
        return self.memory + self.products


@dataclass(frozen=True, kw_only=True)
class ServerConstants:
    """Of a server, for all devices alike."""

    memory: float
    """How many times as long as at the full rate, as in the next three."""
    products: float
    tiles: float
    links: float
    hop_s: float
    layer_s: float
    """Of a layer's kernels, however little they do."""
    mixture_s: float
    """Of a layer's router and the exchange of its tokens besides."""

    def seconds(self, step: TokenCost) -> float:
        """Of one token of each of a batch."""
        return float(
            sum(each * amount for each, amount in zip(astuple(self), astuple(step), strict=True))
        )


MEASURED = ServerConstants(
    memory=1.17,
    products=1.30,
    tiles=0.430,
    links=2.46,
    hop_s=4.67e-6,
    layer_s=44.8e-6,
    mixture_s=22.7e-6,
)
"""Fitted by `python -m bench.foresight --generator` to 812 measured runs of vLLM 0.12 to 0.19."""
MEASURED_ON = ("H100", "H200", "B200")
MEASURED_TO = {
    "rollouts at once": (4, 512),
    "tokens seen": (1, 8704),
    "tokens of a prompt": (1, 8192),
}
"""Least and most of the runs."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A replica's steps at these constants. GraphError for ranks that span nodes, which were not
    measured."""

    model: Counts
    form: WeightFormat
    kind: DeviceKind
    ranks: int = 1
    constants: ServerConstants = MEASURED
    beyond: dict[str, str] = field(default_factory=dict, compare=False)
    """What was asked outside of what was measured, a clause each."""

    def __post_init__(self) -> None:
        if self.ranks > self.kind.per_node:
            raise GraphError(
                f"{self.ranks} ranks of tensor parallelism span nodes of {self.kind.per_node}"
                f" {self.kind.name}, but no measured server does; take {self.kind.per_node} at"
                " most, or other constants"
            )

    def decode(self, batch: float, seen: float) -> float:
        """Seconds of one token for each of a batch, which look back at `seen` tokens each, in the
        mean."""
        self._note("rollouts at once", batch)
        self._note("tokens seen", seen)
        return self._seconds(batch, seen, 0.0)

    def prompt(self, tokens: float) -> float:
        """Seconds of the prompt of one rollout, taken in between the others' steps."""
        self._note("tokens of a prompt", tokens)
        return self._seconds(1.0, 0.0, tokens) - self._seconds(1.0, 0.0, 0.0)

    @property
    def source(self) -> str:
        """Where the seconds come from, and what is extrapolated."""
        beyond = [self.kind.name] if self.kind.name not in MEASURED_ON else []
        beyond += self.beyond.values()
        told = f"; extrapolated to {', '.join(beyond)}" if beyond else ""
        return f"seven constants fitted to measured runs of vLLM on {', '.join(MEASURED_ON)}{told}"

    def _note(self, what: str, value: float) -> None:
        least, most = MEASURED_TO[what]
        if not least <= value <= most:
            self.beyond[what] = f"{value:,.0f} {what} (measured from {least} to {most:,})"

    def _seconds(self, batch: float, seen: float, prompt: float) -> float:
        return self.constants.seconds(
            step(
                self.model,
                self.form,
                self.kind,
                ranks=self.ranks,
                batch=batch,
                seen=seen,
                prompts=prompt,
                prompts_seen=prompt / 2,
            )
        )


def step(
    model: Counts,
    form: WeightFormat,
    kind: DeviceKind,
    *,
    ranks: int,
    batch: float,
    seen: float,
    prompts: float = 0.0,
    prompts_seen: float = 0.0,
    exchanges: int = PER_LAYER,
) -> TokenCost:
    """One token for each rollout of a batch, on ranks of tensor parallelism.

    seen: tokens of the cache that a rollout's token looks back at. prompts: tokens of prompts that
    come in for each token decoded; prompts_seen: those that each of them looks back at. exchanges:
    all-reduces of a layer. Weights are read once, the cache once (Pope et al., arXiv 2211.05102,
    section 3); experts' weights where a token goes to them. GraphError where the device multiplies
    no such numbers."""
    spread = 1 - (1 - model.spread) ** batch if model.routed else 0.0
    dense = model.attention + model.mlps
    nbytes = (
        dense * BITS[form.dense]
        + model.experts * spread * BITS[form.experts]
        + model.ends * BITS["bfloat16"]
    )
    cache = batch * seen * model.cache * _CACHE_BYTES * max(1.0, ranks / model.cache_cuts)
    plain, experts = kind.rate("bfloat16"), _rate(kind, form.experts)
    tokens = batch * (1 + prompts)
    products = (
        2 * tokens * (dense / _rate(kind, form.dense) + model.experts_per_token / experts)
        + (2 * model.ends * batch + 4 * model.mixing * batch * prompts * prompts_seen) / plain
    )
    tile = (
        _NARROW_TILE
        if form.experts in ("fp4", "mxfp4") and "fp4" in kind.operations_per_s
        else _TILE
    )
    tiles = 2 * max(model.experts * spread * tile, model.experts_per_token * batch) / experts
    sent = PER_LAYER * model.layers * 2 * (ranks - 1) / ranks * tokens * model.width * 2
    return TokenCost(
        memory=(nbytes / 8 + cache) / (ranks * kind.memory_bytes_per_s),
        products=products / ranks,
        tiles=tiles / ranks,
        links=sent / kind.within_bytes_per_s,
        hops=exchanges * model.layers * math.log2(ranks),
        layers=model.layers,
        mixtures=model.mixtures,
    )


def _rate(kind: DeviceKind, form: str) -> float:
    """Of products with weights in this format. GraphError where the device has none.

    4 bits are native on some devices; elsewhere they become bfloat16 first. What int4 is multiplied
    by (Marlin, arXiv 2408.11743) are A100's instructions, on every device."""
    if form == "int4":
        return (
            kind.rate("bfloat16")
            * _OPERATIONS["A100"]
            / _OPERATIONS.get(kind.name, _OPERATIONS["A100"])
        )
    if form in ("fp4", "mxfp4"):
        native = "fp8" if form == "mxfp4" else "fp4"  # activations of mxfp4 are fp8
        return kind.rate(native if "fp4" in kind.operations_per_s else "bfloat16")
    return kind.rate(form)
