"""A plan by host, as text: one line for all hosts that have the same."""

from collections.abc import Collection, Iterable, Mapping

from dataflow.planning.hosts import Devices, Host, named
from dataflow.planning.placement import Placement, amount, ranges


def host_lines(
    devices: Devices, placements: Iterable[Placement], light: Collection[str]
) -> list[str]:
    """What each host is and has, those that are alike on one line; none for this machine alone.

    light: workers whose operators compute on no device.
    """
    has: dict[str, list[str]] = {host.name: [] for host in devices.hosts}
    for placement in placements:
        for name, text in _told(placement, placement.worker in light).items():
            has[name].append(text)
    alike: dict[tuple[str, str], list[str]] = {}
    for host in devices.hosts:
        alike.setdefault((_size(host), ", ".join(has[host.name]) or "nothing"), []).append(
            host.name
        )
    return [
        f"host{'s' if len(names) > 1 else ''} {named(names)} ({size}):"
        f" {'each ' if len(names) > 1 else ''}{text}"
        for (size, text), names in alike.items()
    ]


def _told(placement: Placement, is_light: bool) -> Mapping[str, str]:
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
        if ranks_each % placement.tensor_parallel
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


def _size(host: Host) -> str:
    """What a host is: `H100, 96 cores, 8 GPUs of 80.0 GiB, 512.0 GiB`."""
    memory = f" of {amount(host.gpu_memory_bytes)}" if host.gpu_memory_bytes else ""
    facts = [host.kind, f"{host.cpus} core{'s' if host.cpus > 1 else ''}"]
    facts.append(f"{host.gpus} GPU{'s' if host.gpus > 1 else ''}{memory}" if host.gpus else "")
    facts.append(amount(host.memory_bytes) if host.memory_bytes else "")
    return ", ".join(filter(None, facts))
