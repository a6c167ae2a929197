"""Where the seconds of a generator's steps come from: rates of data sheets, measured servers, or
measured kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TypeAlias

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts, Decoder, Latent, counts
from dataflow.foresight.kernel_tables import PACKAGE, KernelTable, Tables, version
from dataflow.foresight.links import PER_LAYER, all_reduces

# A decode step of a server that takes in prompts between its steps: its work at full rates, and
# seven constants.

BITS = {"bfloat16": 16, "fp8": 8, "fp4": 4.5, "mxfp4": 4.25, "int4": 4.5}
"""Of a weight and its share of a scale: one of 8 bits for 16 or 32 weights, one of 16 for 32
(int4)."""
_CACHE_BYTES = 2
_TILE, _NARROW_TILE = 64, 8
"""The fewest rows that a product computes: of Hopper's matrix instructions. Where 4 bits are
native, tokens lie on their narrow side."""
_OPERATIONS = {"A100": 2048, "H100": 4096, "H200": 4096, "B200": 8192}
"""Operations of a multiprocessor in a cycle, in bfloat16, by the device's best instructions."""


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
    `ServerConstants`.
    """

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
        much.
        """
        return self.memory + self.products


@dataclass(frozen=True, kw_only=True)
class ServerConstants:
    """Of a server, for all devices alike."""

    memory: float
    """How many times as long as at the full rate; likewise the next three."""
    products: float
    tiles: float
    links: float
    hop_s: float
    layer_s: float
    """Seconds of a layer's kernels, however little they do."""
    mixture_s: float
    """Further seconds of a layer's router, and of the exchange of its tokens."""

    def seconds(self, step: TokenCost) -> float:
        """Of one token of each of a batch."""
        return float(
            sum(
                constant * amount
                for constant, amount in zip(astuple(self), astuple(step), strict=True)
            )
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
"""Constants fitted by `python -m bench.foresight --generator` to 812 measured runs of vLLM 0.12 to
0.19."""
MEASURED_ON = ("H100", "H200", "B200")
MEASURED_TO = {
    "rollouts at once": (4, 512),
    "tokens seen": (1, 8704),
    "tokens of a prompt": (1, 8192),
}
"""The smallest and the largest of the runs."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A replica's steps at these constants. GraphError for ranks that span nodes, which were not
    measured.
    """

    model: Counts
    form: WeightFormat
    kind: DeviceKind
    ranks: int = 1
    constants: ServerConstants = MEASURED
    beyond: dict[str, str] = field(default_factory=dict, compare=False)
    """Requests outside of what was measured, a clause each."""

    def __post_init__(self) -> None:
        if self.ranks > self.kind.per_node:
            raise GraphError(
                f"{self.ranks} ranks of tensor parallelism span nodes of {self.kind.per_node}"
                f" {self.kind.name}, but no measured server does; take {self.kind.per_node} at"
                " most, or other constants"
            )

    def decode(self, batch: float, seen: float) -> float:
        """Seconds of one token for each of a batch, which look back at `seen` tokens each, in the
        mean.
        """
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
        extrapolated = f"; extrapolated to {', '.join(beyond)}" if beyond else ""
        return (
            f"seven constants fitted to measured runs of vLLM on {', '.join(MEASURED_ON)}"
            f"{extrapolated}"
        )

    def _note(self, quantity: str, value: float) -> None:
        least, most = MEASURED_TO[quantity]
        if not least <= value <= most:
            self.beyond[quantity] = f"{value:,.0f} {quantity} (measured from {least} to {most:,})"

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
    no such numbers.
    """
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
    return TokenCost(
        memory=(nbytes / 8 + cache) / (ranks * kind.memory_bytes_per_s),
        products=products / ranks,
        tiles=tiles / ranks,
        links=all_reduces(model, kind, ranks, tokens),
        hops=exchanges * model.layers * math.log2(ranks),
        layers=model.layers,
        mixtures=model.mixtures,
    )


def _rate(kind: DeviceKind, form: str) -> float:
    """Of products with weights in this format. GraphError where the device has none.

    4 bits are native on some devices; elsewhere they become bfloat16 first. What int4 is multiplied
    by (Marlin, arXiv 2408.11743) are A100's instructions, on every device.
    """
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


# Seconds of a replica's steps by measured kernels: products, attention, experts and all-reduces,
# one by one.

PROMPT_BATCH = 8192
"""Tokens of prompts that a server takes in at once: vLLM's default of max_num_batched_tokens on
such devices."""
SMALL_KERNELS, SMALL_KERNEL_S = 6, 2e-6
"""Of a layer, that no table has (norms, rotary positions, the cache's entry, the gate), in a graph.
Assumed."""
_LATENT, _LATENT_WIDTH = Latent(queries=1536, keys=512, plain=128, rotated=64, values=128), 7168
"""The only latent attention that was measured, whole with its projections: DeepSeek-V3's, over
numbers of heads."""
_LATENT_DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8_block"}
_BALANCE = "power_law_1.01"
"""How the tables' tokens are spread over experts: a few get most, as measured in models."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Of one model on some ranks of tensor parallelism.

    GraphError where the package is not installed, or has no table for this device, dtype or
    shape.
    """

    decoder: Decoder
    kind: DeviceKind
    ranks: int = 1
    products: str = "bfloat16"
    """Dtype of projections and MLPs, as the tables call it."""
    experts: str | None = None
    """The same of routed experts; None: as `products`."""
    server: str | None = None
    """Version of vLLM; None: the newest."""

    def __post_init__(self) -> None:
        latent = self.decoder.latent
        if latent is not None and (latent, self.decoder.width) != (_LATENT, _LATENT_WIDTH):
            raise GraphError(
                f"latent attention was measured with DeepSeek-V3's dimensions alone; found {latent}"
                f" and a width of {self.decoder.width}; foresee with other constants"
            )
        if self.ranks > self.kind.per_node:
            raise GraphError(
                f"{self.ranks} ranks of tensor parallelism span nodes of {self.kind.per_node}"
                f" {self.kind.name}, over which no all-reduce was measured; take"
                f" {self.kind.per_node} at most, or other constants"
            )

    def decode(self, batch: float, seen: float) -> float:
        """Seconds of one token for each of a batch, which look back at `seen` tokens each, in the
        mean.
        """
        batch = max(1.0, batch)
        attention = self._decoding.seconds(batch, max(1.0, seen))
        return self._forward(batch, attention, self._exchange_in_graph) + self._head.seconds(batch)

    def prompt(self, tokens: float) -> float:
        """Seconds of the prompt of one rollout, where several are taken in at once."""
        tokens = max(1.0, tokens)
        together = max(1.0, PROMPT_BATCH // tokens)
        attention = self._reading.seconds(together, tokens)
        whole = self._forward(together * tokens, attention, self._exchange) + self._head.seconds(
            together
        )
        return whole / together

    @property
    def source(self) -> str:
        """Where the seconds come from, and what was not measured."""
        versions = sorted(
            {self._tables.version(name) for name in ("gemm_perf", f"{self._decoding.name}_perf")}
        )
        beyond = "; ".join(self._tables.beyond.values())
        return (
            f"kernels measured on {self.kind.name} by {PACKAGE} {version()} with vLLM"
            f" {', '.join(versions)}; {SMALL_KERNELS} small kernels a layer of"
            f" {SMALL_KERNEL_S * 1e6:g} microseconds"
            f" assumed{f'; extrapolated: {beyond}' if beyond else ''}"
        )

    def _forward(self, tokens: float, attention: float, exchange: KernelTable | None) -> float:
        """All layers, for so many tokens; `attention`: that of one layer."""
        decoder, experts = self.decoder, self.decoder.experts
        mixtures = decoder.layers - experts.dense_layers if experts else 0
        layer = attention + sum(table.seconds(tokens) for table in self._projections)
        layer += SMALL_KERNELS * SMALL_KERNEL_S
        if exchange is not None:
            layer += PER_LAYER * exchange.seconds(tokens * decoder.width * 2)
        seconds = decoder.layers * layer
        if mixtures < decoder.layers:
            seconds += (decoder.layers - mixtures) * sum(
                table.seconds(tokens) for table in self._mlp
            )
        if mixtures:
            seconds += mixtures * sum(table.seconds(tokens) for table in self._mixture)
        return seconds

    @cached_property
    def _tables(self) -> Tables:
        return Tables(kind=self.kind.name, server=self.server)

    def _product(self, n: float, k: float, dtype: str) -> KernelTable:
        return self._tables.table("gemm_perf", ("n", "k", "m"), gemm_dtype=dtype).cut(n=n, k=k)

    def _attention(self, name: str, length: str) -> KernelTable:
        decoder = self.decoder
        if decoder.latent is not None:
            table = self._tables.table(
                name,
                ("num_heads", "batch_size", length),
                kv_cache_dtype="bfloat16",
                gemm_type=_LATENT_DTYPES.get(self.products, self.products),
            )
            return table.cut(num_heads=decoder.heads / self.ranks)
        axes = ("num_key_value_heads", "num_heads", "batch_size", length)
        table = self._tables.table(
            name, axes, head_dim=decoder.head_width, window_size=0, kv_cache_dtype="bfloat16"
        )
        return table.cut(num_key_value_heads=self._kv_heads, num_heads=decoder.heads / self.ranks)

    @property
    def _kv_heads(self) -> float:
        """Of a rank; where there are fewer than ranks, several hold the same."""
        return max(1.0, self.decoder.kv_heads / self.ranks)

    @cached_property
    def _decoding(self) -> KernelTable:
        latent = self.decoder.latent is not None
        return self._attention(
            "mla_generation_module_perf" if latent else "generation_attention_perf", "step"
        )

    @cached_property
    def _reading(self) -> KernelTable:
        latent = self.decoder.latent is not None
        return self._attention(
            "mla_context_module_perf" if latent else "context_attention_perf", "isl"
        )

    @cached_property
    def _projections(self) -> Sequence[KernelTable]:
        decoder, dtype = self.decoder, self.products
        if decoder.latent is not None:
            return ()  # measured with attention
        queries = decoder.heads / self.ranks
        return (
            self._product(
                (queries + 2 * self._kv_heads) * decoder.head_width, decoder.width, dtype
            ),
            self._product(decoder.width, queries * decoder.head_width, dtype),
        )

    def _gated(self, inner: float) -> Sequence[KernelTable]:
        dtype, width = self.products, self.decoder.width
        return (
            self._product(2 * inner / self.ranks, width, dtype),
            self._product(width, inner / self.ranks, dtype),
        )

    @cached_property
    def _mlp(self) -> Sequence[KernelTable]:
        return self._gated(self.decoder.inner)

    @cached_property
    def _mixture(self) -> Sequence[KernelTable]:
        """Router, routed experts, shared ones."""
        decoder, experts = self.decoder, self.decoder.experts
        assert experts is not None
        table = self._tables.table(
            "moe_perf",
            ("moe_tp_size", "num_tokens"),
            moe_dtype=self.experts or self.products,
            hidden_size=decoder.width,
            inter_size=experts.inner,
            topk=experts.per_token,
            num_experts=experts.number,
            moe_ep_size=1,
            distribution=_BALANCE,
        )
        if self.ranks not in table.curve.at:
            raise GraphError(
                f"these experts were not measured over {self.ranks} ranks, but over "
                f"{', '.join(f'{number:g}' for number in table.curve.at)}; take one of them"
            )
        router = self._product(experts.number, decoder.width, "bfloat16")
        shared = self._gated(experts.shared * experts.inner) if experts.shared else ()
        return (router, table.cut(moe_tp_size=self.ranks), *shared)

    @cached_property
    def _head(self) -> KernelTable:
        return self._product(self.decoder.vocabulary / self.ranks, self.decoder.width, "bfloat16")

    def _all_reduce(self, source: str) -> KernelTable | None:
        if self.ranks == 1:
            return None
        table = self._tables.table(
            "custom_allreduce_perf", ("num_gpus", "message_size"), kernel_source=source
        )
        return table.cut(num_gpus=self.ranks)

    @cached_property
    def _exchange_in_graph(self) -> KernelTable | None:
        return self._all_reduce("vLLM_custom_graph")

    @cached_property
    def _exchange(self) -> KernelTable | None:
        return self._all_reduce("vLLM_custom_eager")


CONSTANTS = ("data-sheets", "serving", "kernels")
"""The last needs an optional package, of which the second was fitted to rows."""


ReplicaTimes: TypeAlias = Serving | Kernels


def steps_of(
    constants: str, decoder: Decoder, kind: DeviceKind, *, ranks: int, dtype: str
) -> ReplicaTimes | None:
    """None: by `Rates`. `kernels:0.24.0` are those of one version of vLLM.

    GraphError where the constants have another name, or do not cover this replica.
    """
    name, colon, server = constants.partition(":")
    if name not in CONSTANTS or (colon and (name != "kernels" or not server)):
        raise GraphError(
            f"constants to foresee with are {constants!r}; take one of {', '.join(CONSTANTS)},"
            " kernels:VERSION of vLLM"
        )
    if name == "kernels":
        return Kernels(
            decoder=decoder, kind=kind, ranks=ranks, products=dtype, server=server or None
        )
    if name == "serving":
        return Serving(
            model=counts(decoder),
            form=WeightFormat(dense=dtype, experts=dtype),
            kind=kind,
            ranks=ranks,
        )
    return None


def check_covered(constants: str, decoder: Decoder, kind: DeviceKind, dtype: str) -> None:
    """GraphError for what no number of ranks can mend: a name, a package, a device, a dtype."""
    steps = steps_of(constants, decoder, kind, ranks=1, dtype=dtype)
    if steps is not None:
        steps.decode(1, 1)
