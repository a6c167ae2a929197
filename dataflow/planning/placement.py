"""Where one node of a graph runs: how often, on which devices, with how many threads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.node import Split
from dataflow.planning.hosts import Devices, Host, named

Spot = tuple[str, str]
"""A host, empty for this machine, and torch's name of a device of it."""


@dataclass(frozen=True)
class Need:
    """Bytes of one process."""

    parts: Mapping[str, int] = field(default_factory=dict)
    """By purpose; at least so many."""
    rollout: int = 0
    """Of a KV-cache that takes what is free, those of one rollout of full length."""
    slots: int = 0
    """Rollouts that it is to hold at most."""

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """The sum and its parts: `4.1 GiB (weights 1.0 GiB, gradients 1.0 GiB, ...)`."""
        return (
            f"{amount(self.total)}"
            f" ({', '.join(f'{name} {amount(size)}' for name, size in self.parts.items())})"
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One node of the graph: how often it runs, where, with how much."""

    node: str
    worker: str
    """Workers are called `worker` or, with several replicas, `worker-0`, `worker-1`, ..."""
    replicas: int = 1
    ranks: int = 1
    """Processes that make up one replica."""
    split: Split = Split()
    """How they share out the model."""
    gpus: tuple[int, ...] = ()
    """Accelerators, replica by replica, numbered over all hosts; empty: CPU."""
    hosts: tuple[str, ...] = ()
    """The host of each replica, and of all its ranks, unless `rank_hosts` says otherwise; empty:
    this machine."""
    rank_hosts: tuple[str, ...] = ()
    """Hosts of the ranks of a trainer that is spread over several."""
    first_gpus: tuple[int, ...] = ()
    """By replica, or by rank of one that is spread, the number of the first accelerator of its
    host."""
    threads: int = 1
    """CPU threads of each process; where hosts differ, the fewest."""
    threads_there: tuple[int, ...] = ()
    """By replica, those of each of its processes, where hosts differ."""
    need: Need | None = None
    """Memory that one process needs at least; None: unknown or small."""
    port: int = 0
    """On which each replica listens; 0: on none, or on any that is free."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values of the knobs that the plan chose; see `Traits.ways`."""
    arrives_in_host: bool = False
    """As of `Traits`."""

    @property
    def choice(self) -> str:
        """The same for people: `compile=True, micro_batch_tokens=4096`; else empty."""
        return ", ".join(f"{knob}={value}" for knob, value in self.chosen.items())

    @property
    def memory_bytes(self) -> int | None:
        """Estimate for one process; None: unknown or small."""
        return None if self.need is None else self.need.total

    @property
    def devices(self) -> str:
        """For people: `gpu 0-5`, `cpu, 1 thread`; over hosts, which number their own accelerators,
        `6 GPUs`.
        """
        if self.gpus and self.hosts:
            return f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}"
        return f"gpu {ranges(self.gpus)}" if self.gpus else f"cpu, {_threads(self.threads)}"

    @property
    def mesh(self) -> str:
        """How ranks that do not all do the same share the model out: `2 x 2 (replicate x shard)`;
        else empty.
        """
        copies, shards = self.split.dp_replicate, self.ranks // self.split.least_ranks
        axes = {"replicate": copies, "shard": shards, "tensor": self.split.tensor_parallel}
        used = {name: size for name, size in axes.items() if size > 1}
        if len(used) < 2 and copies == 1:
            return ""
        return f"{' x '.join(map(str, used.values()))} ({' x '.join(used)})"

    @property
    def share(self) -> str:
        """What one replica gets, for people: `1 GPU`, `2 threads`, `2 processes of 1 thread
        each`.
        """
        return self.share_of(self.replicas)

    def share_of(self, replica: int) -> str:
        """What this replica gets, where hosts differ."""
        if self.gpus:
            return f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"
        threads = _threads(self.threads_of(replica))
        return threads if self.ranks == 1 else f"{self.ranks} processes of {threads} each"

    def gpus_of(self, replica: int) -> tuple[int, ...]:
        """The accelerators of one replica."""
        return self.gpus[replica * self.ranks : (replica + 1) * self.ranks]

    def host(self, replica: int, rank: int = 0) -> str:
        """The host of a rank of a replica; empty: this machine. A replica that the plan does not
        know yet has none.
        """
        if self.rank_hosts:
            return self.rank_hosts[rank]
        return self.hosts[replica] if self.hosts else ""

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """Of every replica and rank, each once, in their order."""
        return tuple(dict.fromkeys(self.rank_hosts or self.hosts))

    def threads_of(self, replica: int) -> int:
        """CPU threads of each process of a replica, be it one that joins later."""
        return self.threads_there[replica] if replica < len(self.threads_there) else self.threads

    def device(self, replica: int, rank: int = 0) -> str:
        """Torch's name of the device of one rank of a replica, on its host."""
        if not self.gpus:
            return "cpu"
        first = self.first_gpus[rank if self.rank_hosts else replica] if self.first_gpus else 0
        return f"cuda:{self.gpus[replica * self.ranks + rank] - first}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: `0-3, 8`."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else f"{row[0]}" for row in rows)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def amount(size: int | None) -> str:
    """Bytes for people: 8.2 MiB."""
    if size is None:
        return "-"
    unit, shift = (
        ("GiB", 30) if size >= 1 << 30 else ("MiB", 20) if size >= 1 << 20 else ("KiB", 10)
    )
    return f"{size / (1 << shift):.1f} {unit}"


def table(rows: Sequence[Sequence[str]], *, ruled: bool = False) -> list[str]:
    """Lines with columns as wide as they must be. ruled: a line stands below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = "  ".join("-" * width for width in widths)
    return [lines[0], rule, *lines[1:]] if ruled else lines


# A plan by host, as text: one line for all hosts that have the same.


def host_lines(
    devices: Devices, placements: Iterable[Placement], light: Collection[str]
) -> list[str]:
    """What each host is and has, those that are alike on one line; none for this machine alone.

    light: workers whose operators compute on no device.
    """
    has: dict[str, list[str]] = {host.name: [] for host in devices.hosts}
    for placement in placements:
        for name, text in _part_lines(placement, placement.worker in light).items():
            has[name].append(text)
    alike: dict[tuple[str, str], list[str]] = {}
    for host in devices.hosts:
        alike.setdefault((_host_size(host), ", ".join(has[host.name]) or "nothing"), []).append(
            host.name
        )
    return [
        f"host{'s' if len(names) > 1 else ''} {named(names)} ({size}):"
        f" {'each ' if len(names) > 1 else ''}{text}"
        for (size, text), names in alike.items()
    ]


def _part_lines(placement: Placement, is_light: bool) -> Mapping[str, str]:
    """By host, its part of one node."""
    replicas: dict[str, list[int]] = {}
    if placement.rank_hosts:
        return {host: _ranks_told(placement, host) for host in placement.all_hosts}
    for replica, host in enumerate(placement.hosts):
        replicas.setdefault(host, []).append(replica)
    texts: dict[str, str] = {}
    for host, replicas_there in replicas.items():
        text = (
            placement.node
            if len(replicas_there) == 1
            else f"{len(replicas_there)} x {placement.node}"
        )
        if placement.gpus:
            numbers = [
                int(placement.device(replica, rank).removeprefix("cuda:"))
                for replica in replicas_there
                for rank in range(placement.ranks)
            ]
            text += f" on gpu {ranges(numbers)}"
        elif not is_light:
            text += f" on {placement.share_of(replicas_there[0])}"
        texts[host] = text
    return texts


def spread_line(placement: Placement) -> str:
    """Of a trainer on several hosts: where its ranks are; else nothing."""
    if not placement.rank_hosts:
        return ""
    ranks_each = placement.ranks // len(placement.all_hosts)
    cut = (
        " (its layers are cut across hosts, as nothing else fits)"
        if ranks_each % placement.split.tensor_parallel
        else ""
    )
    return (
        f"the ranks of '{placement.node}' are spread over {len(placement.all_hosts)} hosts,"
        f" {ranks_each}"
        f" on each{cut}, and its weights go over the network, to readers on the same hosts too"
    )


def _ranks_told(placement: Placement, host: str) -> str:
    """One host's part of a spread trainer."""
    ranks = [rank for rank, at in enumerate(placement.rank_hosts) if at == host]
    text = f"{placement.node} rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
    if placement.gpus:
        return (
            f"{text} on gpu"
            f" {ranges(int(placement.device(0, rank).removeprefix('cuda:')) for rank in ranks)}"
        )
    threads = f"{placement.threads} thread{'s' if placement.threads > 1 else ''}"
    return f"{text} on {threads}{' each' if len(ranks) > 1 else ''}"


def _host_size(host: Host) -> str:
    """What a host is: `H100, 96 cores, 8 GPUs of 80.0 GiB, 512.0 GiB`."""
    memory = f" of {amount(host.gpu_memory_bytes)}" if host.gpu_memory_bytes else ""
    facts = [host.kind, f"{host.cpus} core{'s' if host.cpus > 1 else ''}"]
    facts.append(f"{host.gpus} GPU{'s' if host.gpus > 1 else ''}{memory}" if host.gpus else "")
    facts.append(amount(host.memory_bytes) if host.memory_bytes else "")
    return ", ".join(filter(None, facts))
