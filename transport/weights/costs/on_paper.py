"""A trainer and a generator on paper: what goes between their ranks, how long that takes, and what
each rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from transport.weights.costs.decoder import STYLES, Decoder
from transport.weights.costs.explain import Cost, Interconnect, amount, cost, explain, in_rounds
from transport.weights.encoding import SCALE, Encoding
from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Ints, Layout, Mesh
from transport.weights.layout.parallel_plan import mesh_layout
from transport.weights.layout.plan import CopyPlan
from transport.weights.layout.reshard import reshard

STATE = {"weights": 4, "gradients": 4, "optimiser": 8}
"""Bytes of each parameter that a trainer's rank holds: float32, and AdamW's two moments in
float32."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of one side: replicas, each cut by FSDP, each piece of it by tensor parallelism."""

    replicas: int = 1
    shards: int = 1
    tensor_parallel: int = 1

    @property
    def mesh(self) -> Mesh:
        """Rank 0, 1, ... in that order, tensor parallel running fastest."""
        return Mesh.of(self.replicas, self.shards, self.tensor_parallel)

    def __str__(self) -> str:
        axes = {
            "replica": self.replicas,
            "shard": self.shards,
            "tensor-parallel rank": self.tensor_parallel,
        }
        return (
            " x ".join(f"{n:,} {axis}{'s' if n > 1 else ''}" for axis, n in axes.items() if n > 1)
            or "1 rank"
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OnPaper:
    """A plan on paper, from the layouts of both sides."""

    parameters: int
    plan: CopyPlan
    links: Interconnect
    made: Cost
    readers: RankGrid
    """The generator's."""
    held: Mapping[str, Mapping[str, Ints]]
    """By side, by part: bytes of each rank at the start."""

    def __str__(self) -> str:
        """Lines of text."""
        lines = [
            f"{self.parameters / 1e9:.4g} billion parameters",
            explain(self.plan, self.links),
            "",
            self._rounds(),
        ]
        lines += [
            self._most("source", self.made.source_bytes),
            self._most("destination", self.made.destination_bytes),
        ]
        lines += ["", "memory of each rank at the start, at least", *self._memory()]
        return "\n".join(lines)

    def rank(self, source: int) -> str:
        """What one rank of the trainer sends: to the ranks of each replica of the generator."""
        nbytes = self.plan.pair_bytes[source].reshape(self.readers.replicas, -1)
        lines = [f"source rank {source} sends, to the ranks of each replica"]
        alike: dict[tuple[int, ...], list[int]] = {}
        for replica, row in enumerate(nbytes.tolist()):
            alike.setdefault(tuple(row), []).append(replica)
        for row, replicas in alike.items():
            label = (
                f"{len(replicas)} replicas, first {replicas[0]}"
                if len(replicas) > 1
                else f"replica {replicas[0]}"
            )
            lines.append(f"  {label}: " + "  ".join(amount(n) if n else "." for n in row))
        return "\n".join(lines)

    def _rounds(self) -> str:
        rounds, seconds = in_rounds(self.plan.pair_bytes, self.links)
        return (
            f"{rounds:,} rounds over one communicator, in each of which a rank has one peer at"
            f" most: {seconds:.3g} s, {seconds / self.made.seconds:.2f} times the floor of"
            f" {self.made.seconds:.3g} s"
        )

    def _most(self, side: str, nbytes: Ints) -> str:
        rank = int(np.argmax(nbytes.sum(axis=1)))
        does = "out of" if side == "source" else "into"
        return f"most bytes {does} a rank: {amount(int(nbytes[rank].sum()))}, {side} rank {rank}"

    def _memory(self) -> list[str]:
        lines = []
        for side, parts in self.held.items():
            total = np.sum(list(parts.values()), axis=0)
            rank = int(np.argmax(total))
            text = " + ".join(
                f"{part} {amount(int(nbytes[rank]))}" for part, nbytes in parts.items()
            )
            least = int(total.min())
            spread = f", the least {amount(least)}" if least < total[rank] else ""
            lines.append(f"  {side}: {amount(int(total[rank]))} ({text}){spread}")
        return lines


def on_paper(
    model: Decoder,
    trainer: RankGrid,
    generator: RankGrid,
    links: Interconnect,
    *,
    dtype: str = "bfloat16",
    quantized: str | None = None,
) -> OnPaper:
    """A version from the trainer's ranks into the generator's.

    dtype: in which weights travel; quantized: the format in which linear layers do, int8 or fp8,
    with their scales. LayoutMismatch for an unknown dtype or format, and where tensor parallelism
    would cut heads.
    """
    for side in (trainer, generator):
        ranks, keys = side.tensor_parallel, model.kv_heads
        if model.heads % ranks or (keys % ranks and ranks % keys):
            raise LayoutMismatch(
                f"heads cannot be dealt out evenly; found {model.heads} attention heads and {keys}"
                f" key/value heads for {ranks} tensor-parallel ranks; give a number that divides"
                " the first, and divides the second or is a multiple of it"
            )
    whole = model.tensors("float32")
    encoding = Encoding(dtype=dtype, quantized=quantized)
    trained, read = (
        mesh_layout(whole, STYLES, side.mesh, key_value_heads=model.kv_heads)
        for side in (trainer, generator)
    )
    sent, received = encoding.layout(trained), encoding.layout(read)
    plan = reshard(sent, received)
    parameters = trained.rank_bytes // 4
    narrow = {
        candidate
        for name in sent.tensors
        if name.endswith(SCALE)
        for candidate in (name, name.removesuffix(SCALE))
    }
    return OnPaper(
        parameters=sum(int(np.prod(shape)) for shape, _ in whole.values()),
        plan=plan,
        links=links,
        made=cost(plan.pair_bytes, links),
        readers=generator,
        held={
            f"trainer ({trainer})": {
                **{name: parameters * per_parameter for name, per_parameter in STATE.items()},
                **(
                    {"what is quantised to be sent": _of_all(sent.only(narrow).rank_bytes, trained)}
                    if narrow
                    else {}
                ),
            },
            f"generator ({generator}), beside its cache": {
                "version in use": received.rank_bytes,
                "version that arrives": received.rank_bytes,
            },
        },
    )


def _of_all(rank_bytes: Ints, layout: Layout) -> Ints:
    """Of all ranks of a layout, of which the last may hold nothing."""
    return np.pad(rank_bytes, (0, layout.ranks - len(rank_bytes)))
