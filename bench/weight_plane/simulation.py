"""What the weight plane's cost model says of large models on many GPUs: python -m
bench.weight_plane --simulate.

Model figures, not measurements: `transport.weights.costs.explain` says what is in them, and
what is not. Half of the GPUs train, half generate; nodes of 8 with NVLink at 450 GB/s per GPU and
400 Gb/s per GPU between them, all of it usable. Whether a GPU's memory holds its share is not asked
(405B in bf16 with TP 8 takes 101 GB).

trainer     8B, 70B: HSDP over 8 and 64 ranks; 405B: FSDP over all; 1T: 64-way expert parallel, FSDP
            over the rest
generator   replicas of TP 8; 1T: replicas of 32 ranks, TP 8 for attention and 32-way expert
            parallel
fp8         the matrices of the layers are cast before they are sent; embeddings, router and norms
            travel in bf16, and scales (0.02% in blocks of 128 x 128) are not counted
half        as if links gave half of their bandwidth, which is the most that anybody publishes
gather      every trainer rank gathers each whole tensor from those that share it, then rank 0
            broadcasts it over one link; best: over all links of its node. Both run at full speed,
            and in the same dtype as ours
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.report import Report
from transport.weights.costs.explain import Interconnect, cost
from transport.weights.layout.layout import Layout, Mesh
from transport.weights.layout.reshard import CopyPlan, reshard

Tensors = dict[str, tuple[tuple[int, ...], str]]
Cuts = Callable[[str], int | None]

GPUS = (256, 1024)
LINKS = Interconnect()
WIDE = 170
"""Characters of the table."""
PUBLISHED = {
    "70B": "LlamaRL, 256 GPUs: 1.15 s [2nd]; OpenRLHF, the same: 111.65 s [2nd]",
    "405B": "LlamaRL, 1,024 GPUs: under 2 s [doc]",
    "1T": (
        "Perplexity RDMA, 256 to 128 GPUs: 1.3 s [src]; checkpoint-engine, Kimi-K2 on 16 H20: 14 to"
        " 16 s [src]"
    ),
    "other models": (
        "NeMo-RL, DeepSeek-V3: 2.4 to 2.8 s; vLLM sharded, 235B: 2.7 s; verl, Qwen3-30B-A3B: 7 s"
        " [src]"
    ),
}
"""By others. [doc]: in the paper; [2nd]: quoted by two or more write-ups; [src]: in the projects'
own files."""
BY_COLUMNS = ("o", "down", "shared_down")
WHOLE = ("norm", "router", "q_a", "kv_a")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shapes, and how either side deals it out."""

    name: str
    tensors: Tensors
    shards: int | None = None
    """Trainer ranks that share one tensor; None: all."""
    trainer: Callable[[Tensors, int], Layout]
    """Over so many ranks."""
    generator: Callable[[Tensors, int], Layout]

    def plan(self, gpus: int, dtype: str) -> CopyPlan:
        """Half of the GPUs to the other half, cast to fp8 or not."""
        tensors = (
            self.tensors
            if dtype == "bf16"
            else {n: (s, narrow(n, s)) for n, (s, _) in self.tensors.items()}
        )
        return reshard(self.trainer(self.tensors, gpus // 2), self.generator(tensors, gpus // 2))


def main(json_path: Path | None = None) -> int:
    """Print the table and write the JSON lines."""
    report, table, console = (
        Report("weight_plane_simulation", json_path),
        Report("weight_plane"),
        Console(),
    )
    began = time.monotonic()
    for model in models():
        for gpus in GPUS:
            for dtype in ("bf16", "fp8"):
                shards = model.shards or gpus // 2
                ours, gathered = figures(model.plan(gpus, dtype), whole_bytes(model, dtype), shards)
                case = f"{model.name} on {gpus} GPUs, {dtype}"
                published = PUBLISHED.get(model.name)
                for system, row in (("sharded", ours), ("gather_and_broadcast", gathered)):
                    report.add(
                        case=case, system=system, gpus=gpus, dtype=dtype, published=published, **row
                    )
                table.add(
                    case="by the cost model, not measured",
                    system=case,
                    **{
                        "sends GB": ours["gb_sent_per_rank"],
                        "receives GB": ours["gb_received_per_rank"],
                        "pairs": ours["pairs"],
                        "s": ours["seconds"],
                        "s half": ours["seconds_at_half"],
                        "gather: receives GB": gathered["gb_received_per_rank"],
                        "gather s": gathered["seconds"],
                        "gather best s": gathered["seconds_best"],
                        "times": gathered["seconds"] / ours["seconds"],
                    },
                )
    table.show(Console(width=max(WIDE, console.width)))
    for source, figure in PUBLISHED.items():
        console.print(
            f"measured by others, {source}: {figure}", markup=False, highlight=False, soft_wrap=True
        )
    console.print(
        f"model figures, not measurements; computed in {time.monotonic() - began:.0f} s",
        highlight=False,
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class GatherCost:
    """The model's estimate for gathering whole tensors and broadcasting them."""

    gather_s: float
    broadcast_s: float
    source_bytes: int
    """That each source rank receives, besides what it holds."""
    destination_bytes: int
    """That each destination rank receives."""

    @property
    def seconds(self) -> float:
        """One after the other, as where each tensor is gathered and then sent."""
        return self.gather_s + self.broadcast_s


def gather_and_broadcast(
    nbytes: int, sources: int, destinations: int, links: Interconnect, *, root_links: int = 1
) -> GatherCost:
    """The usual way: every source rank gathers each whole tensor, and rank 0 broadcasts it to every
    destination rank.

    The gather is an ideal all-gather by rings that use every link of a node: a node takes in what
    it lacks over all of its `between` links together, and each GPU what it lacks over its `within`
    link, at the same time. The broadcast leaves rank 0 by `root_links` links (one, where no other
    source rank is in its group), and is passed on in a pipeline that costs nothing more. Both are
    floors: messages, and tensors too small to fill links, come on top.
    """
    per_node = min(sources, links.gpus_per_node)
    nodes = -(-sources // links.gpus_per_node)
    lacking = nbytes * (sources - 1) / sources
    gather = max(
        lacking / links.within_bytes_per_s,
        nbytes * (nodes - 1) / nodes / per_node / links.between_bytes_per_s,
    )
    apart = links.destinations_from(sources) + destinations > links.gpus_per_node
    broadcast = nbytes / (
        root_links * links.between_bytes_per_s if apart else links.within_bytes_per_s
    )
    return GatherCost(
        gather_s=gather if sources > 1 else 0.0,
        broadcast_s=broadcast,
        source_bytes=int(lacking),
        destination_bytes=nbytes,
    )


def figures(plan: CopyPlan, nbytes: int, shards: int) -> tuple[dict[str, float], dict[str, float]]:
    """Ours, and gathering `nbytes` among `shards` ranks and broadcasting them; bytes are those of
    the busiest rank.
    """
    half = replace(
        LINKS,
        within_bytes_per_s=LINKS.within_bytes_per_s / 2,
        between_bytes_per_s=LINKS.between_bytes_per_s / 2,
    )
    estimate = cost(plan.pair_bytes, LINKS)
    readers = plan.destination.ranks
    usual = [gather_and_broadcast(nbytes, shards, readers, links) for links in (LINKS, half)]
    best = gather_and_broadcast(nbytes, shards, readers, LINKS, root_links=LINKS.gpus_per_node)
    ours = {
        "gb_model": nbytes / 1e9,
        "gb_sent_per_rank": float(np.max(estimate.source_bytes.sum(axis=1))) / 1e9,
        "gb_received_per_rank": float(np.max(estimate.destination_bytes.sum(axis=1))) / 1e9,
        "pairs": int((plan.pair_bytes > 0).sum()),
        "messages_per_rank": int(np.max(estimate.source_messages)),
        "seconds": estimate.seconds,
        "seconds_at_half": cost(plan.pair_bytes, half).seconds,
    }
    gathered = {
        "gb_model": nbytes / 1e9,
        "gb_gathered_per_rank": usual[0].source_bytes / 1e9,
        "gb_received_per_rank": usual[0].destination_bytes / 1e9,
        "gather_seconds": usual[0].gather_s,
        "seconds": usual[0].seconds,
        "seconds_at_half": usual[1].seconds,
        "seconds_best": best.seconds,
    }
    return ours, gathered


def whole_bytes(model: Model, dtype: str) -> int:
    """Of the model, once."""
    return sum(
        math.prod(shape) * (1 if dtype == "fp8" and narrow(name, shape) != "bfloat16" else 2)
        for name, (shape, _) in model.tensors.items()
    )


def narrow(name: str, shape: tuple[int, ...]) -> str:
    """The dtype of a tensor on the way, where layers travel in fp8."""
    layers = "." in name and len(shape) > 1 and not name.endswith("router")
    return "float8_e4m3fn" if layers else "bfloat16"


def models() -> list[Model]:
    """Llama 3 of three sizes, and a mixture of experts of Kimi-K2's shapes."""
    return [
        Model(
            name="8B",
            tensors=llama(32, 4096, 14336),
            shards=8,
            trainer=hsdp(8),
            generator=tensor_parallel,
        ),
        Model(
            name="70B",
            tensors=llama(80, 8192, 28672),
            shards=64,
            trainer=hsdp(64),
            generator=tensor_parallel,
        ),
        Model(
            name="405B",
            tensors=llama(126, 16384, 53248),
            trainer=hsdp(None),
            generator=tensor_parallel,
        ),
        Model(name="1T", tensors=mixture(), trainer=expert_fsdp, generator=expert_parallel),
    ]


def llama(
    layers: int, width: int, inner: int, vocabulary: int = 128256, keys: int = 1024
) -> Tensors:
    """Llama 3: 8 key/value heads of 128."""
    layer = {
        "q": (width, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, width),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "norm": (width,),
        "post_norm": (width,),
    }
    return bf16(
        {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)},
        [layer] * layers,
    )


def mixture() -> Tensors:
    """61 layers, the first dense; 384 experts of 2,048, and a shared one; latent attention with 64
    heads.
    """
    width, inner, experts, heads = 7168, 2048, 384, 64
    attention = {
        "q_a": (1536, width),
        "q_b": (heads * 192, 1536),
        "kv_a": (576, width),
        "kv_b": (heads * 256, 512),
        "o": (width, heads * 128),
        "norm": (width,),
        "post_norm": (width,),
        "q_norm": (1536,),
        "kv_norm": (512,),
    }
    dense = {"gate": (18432, width), "up": (18432, width), "down": (width, 18432)}
    sparse = {
        "router": (experts, width),
        "expert_gate_up": (experts, 2 * inner, width),
        "expert_down": (experts, width, inner),
        "shared_gate": (inner, width),
        "shared_up": (inner, width),
        "shared_down": (width, inner),
    }
    ends: dict[str, tuple[int, ...]] = {
        "embed": (163840, width),
        "head": (163840, width),
        "norm": (width,),
    }
    return bf16(ends, [{**attention, **dense}] + [{**attention, **sparse}] * 60)


def bf16(ends: Mapping[str, tuple[int, ...]], layers: list[dict[str, tuple[int, ...]]]) -> Tensors:
    """All of them by name."""
    shapes = {
        **ends,
        **{f"{n}.{name}": shape for n, layer in enumerate(layers) for name, shape in layer.items()},
    }
    return {name: (shape, "bfloat16") for name, shape in shapes.items()}


def cut(name: str) -> int | None:
    """The dimension that tensor parallelism cuts."""
    leaf = name.rpartition(".")[2]
    return None if leaf.endswith(WHOLE) else int(leaf in BY_COLUMNS)


def hsdp(shards: int | None) -> Callable[[Tensors, int], Layout]:
    """Replicas of so many shards each; None: one, of all ranks."""

    def trainer(tensors: Tensors, ranks: int) -> Layout:
        within = shards or ranks
        return Layout.cut(tensors, Mesh.of(ranks // within, within), lambda name: (None, 0))

    return trainer


def tensor_parallel(tensors: Tensors, ranks: int) -> Layout:
    """Replicas of TP 8."""
    return Layout.cut(tensors, Mesh.of(ranks // 8, 8), lambda name: (None, cut(name)))


def expert_fsdp(tensors: Tensors, ranks: int) -> Layout:
    """Experts dealt out to 64 ranks and cut by the others; everything else by FSDP over all."""
    return Layout.cut(
        tensors, Mesh.of(ranks // 64, 64), lambda name: (1, 0) if "expert_" in name else (0, 0)
    )


def expert_parallel(tensors: Tensors, ranks: int) -> Layout:
    """Replicas of 32 ranks: 12 whole experts each, TP 8 for the rest."""
    return Layout.cut(
        tensors,
        Mesh.of(ranks // 32, 4, 8),
        lambda name: (None, 0, 0) if "expert_" in name else (None, None, cut(name)),
    )
