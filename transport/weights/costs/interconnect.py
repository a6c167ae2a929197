"""How long a plan takes, by a model of the links between GPUs; what a gather and a broadcast would
take instead.

The model. Rank i of the source sits on GPU i; the destination's ranks sit on GPUs from
`destination_first` on; every `gpus_per_node` GPUs are a node. Between two ranks bytes go over one
of three links: within one GPU (local), within a node, or between nodes. Each GPU has its own of
each, equally fast in both directions at once, and the network between nodes is never the limit. A
pair's bytes travel in buckets, each of which costs a message at both ends. Links work at the same
time, so a direction of a GPU takes as long as its busiest link, and its messages; the plan takes as
long as the busiest GPU. Packing, casting and waiting for stragglers are not in it: it is a floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transport.weights.layout.plan import matchings
from transport.weights.layout.shards import Ints

KINDS = ("local", "within", "between")
"""Links, in the order of the columns of `Cost`'s tables."""
WHERE = ("within its GPU", "within its node", "between nodes")


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Where the ranks sit, and how fast they reach each other; bandwidths per GPU and direction."""

    gpus_per_node: int = 8
    local_bytes_per_s: float = 2e12
    """Within one GPU's memory."""
    within_bytes_per_s: float = 450e9
    """To GPUs of the same node (NVLink)."""
    between_bytes_per_s: float = 50e9
    """To GPUs of other nodes (400 Gb/s)."""
    message_s: float = 10e-6
    """What a message costs each end besides its bytes."""
    bucket_bytes: int = 64 << 20
    """Bytes of one message at most."""
    destination_first: int | None = None
    """GPU of the destination's first rank; None: the first node that holds no source rank."""

    def __post_init__(self) -> None:
        speeds = (self.local_bytes_per_s, self.within_bytes_per_s, self.between_bytes_per_s)
        if min(*speeds, self.gpus_per_node, self.bucket_bytes) <= 0 or self.message_s < 0:
            raise ValueError(
                f"links need bandwidths, buckets and nodes above zero; found {self}; give bytes per"
                " second and GPU"
            )

    def destinations_from(self, sources: int) -> int:
        """GPU of the destination's first rank."""
        if self.destination_first is not None:
            return self.destination_first
        return -(-sources // self.gpus_per_node) * self.gpus_per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """The model's estimate for a plan."""

    seconds: float
    busiest: str
    """The rank, and what holds it up."""
    source_bytes: Ints
    """[source ranks, local | within | between]: that each sends."""
    destination_bytes: Ints
    """[destination ranks, local | within | between]: that each receives."""
    source_messages: Ints
    """[source ranks]"""
    destination_messages: Ints
    """[destination ranks]"""

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes in all, by the kind of link."""
        return dict(zip(KINDS, self.source_bytes.sum(axis=0).tolist(), strict=True))


def cost(pair_bytes: Ints, links: Interconnect) -> Cost:
    """The model's cost of moving `pair_bytes` [source ranks, destination ranks] over these
    links.
    """
    kind = _kinds(pair_bytes.shape, links)
    by_kind = np.stack(
        [np.where(kind == number, pair_bytes, 0) for number in range(len(KINDS))], axis=2
    )
    messages = -(-pair_bytes // links.bucket_bytes)
    sides = [
        ("source", "sends", by_kind.sum(axis=1), messages.sum(axis=1)),
        ("destination", "receives", by_kind.sum(axis=0), messages.sum(axis=0)),
    ]
    speeds = _speeds(links)
    seconds, busiest = 0.0, "nothing is sent"
    for side, does, nbytes, count in sides:
        busy = (nbytes / speeds).max(axis=1) + count * links.message_s
        rank = int(busy.argmax())
        if busy[rank] > seconds:
            link = int((nbytes[rank] / speeds).argmax())
            seconds = float(busy[rank])
            sums = f"{amount(nbytes[rank, link])} {WHERE[link]} in {count[rank]} messages"
            busiest = f"{side} rank {rank} {does} {sums}"
    return Cost(
        seconds=seconds,
        busiest=busiest,
        source_bytes=sides[0][2],
        destination_bytes=sides[1][2],
        source_messages=sides[0][3],
        destination_messages=sides[1][3],
    )


def in_rounds(pair_bytes: Ints, links: Interconnect) -> tuple[int, float]:
    """How many rounds the ranks go through, and seconds until the last is through: each rank has
    one message under way, and goes on when its peer has come to it too.
    """
    seconds = pair_bytes / _speeds(links)[_kinds(pair_bytes.shape, links)]
    seconds += -(-pair_bytes // links.bucket_bytes) * links.message_s
    table = matchings(pair_bytes)
    rounds, (sources, destinations) = int(table.max(initial=-1)) + 1, pair_bytes.shape
    sent, received = np.zeros(sources), np.zeros(destinations)
    for number in range(rounds):
        source, destination = np.nonzero(table == number)
        over = np.maximum(sent[source], received[destination]) + seconds[source, destination]
        sent[source] = received[destination] = over
    return rounds, float(max(sent.max(), received.max()))


def _kinds(shape: tuple[int, ...], links: Interconnect) -> Ints:
    """[source ranks, destination ranks]: over which of `KINDS` each pair goes."""
    source = np.arange(shape[0])[:, None]
    destination = links.destinations_from(len(source)) + np.arange(shape[1])[None, :]
    near = source // links.gpus_per_node == destination // links.gpus_per_node
    return np.where(source == destination, 0, np.where(near, 1, 2))


def _speeds(links: Interconnect) -> npt.NDArray[np.float64]:
    """Of `KINDS`, bytes per second."""
    return np.array([links.local_bytes_per_s, links.within_bytes_per_s, links.between_bytes_per_s])


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


UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def amount(nbytes: float) -> str:
    """In powers of 1,000: 1.23 GB."""
    power = 0
    while nbytes >= 999.5 and power < len(UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.3g} {UNITS[power]}"
