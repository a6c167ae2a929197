"""Seconds of a replica's steps by measured kernels: products, attention, experts and all-reduces,
one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Decoder, Latent
from dataflow.foresight.kernel_tables import PACKAGE, KernelTable, Tables, version
from dataflow.foresight.links import PER_LAYER

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
    shape."""

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
        mean."""
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
        layer = attention + sum(each.seconds(tokens) for each in self._projections)
        layer += SMALL_KERNELS * SMALL_KERNEL_S
        if exchange is not None:
            layer += PER_LAYER * exchange.seconds(tokens * decoder.width * 2)
        seconds = decoder.layers * layer
        if mixtures < decoder.layers:
            seconds += (decoder.layers - mixtures) * sum(each.seconds(tokens) for each in self._mlp)
        if mixtures:
            seconds += mixtures * sum(each.seconds(tokens) for each in self._mixture)
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
                f"{', '.join(f'{each:g}' for each in table.curve.at)}; take one of them"
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
