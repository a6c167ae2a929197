"""Which host has what of a plan, for people: a line for hosts that have the same."""

from collections.abc import Collection, Iterable, Mapping

from dataflow.planning.hosts import Devices, Host, named
from dataflow.planning.memory_need import amount
from dataflow.planning.placement import Placement, ranges


def host_lines(devices: Devices, placements: Iterable[Placement], light: Collection[str]) -> list[str]:
    """Of every host what it is and has, those that are alike on one line; nothing for this machine alone.

    light: workers whose operators compute on no device."""
    has: dict[str, list[str]] = {host.name: [] for host in devices.hosts}
    for placement in placements:
        for name, told in _told(placement, placement.worker in light).items():
            has[name].append(told)
    alike: dict[tuple[str, str], list[str]] = {}
    for host in devices.hosts:
        alike.setdefault((_size(host), ", ".join(has[host.name]) or "nothing"), []).append(host.name)
    return [
        f"host{'s' if len(names) > 1 else ''} {named(names)} ({size}): {'each ' if len(names) > 1 else ''}{what}"
        for (size, what), names in alike.items()
    ]


def _told(placement: Placement, is_light: bool) -> Mapping[str, str]:
    """By host, what it has of one node."""
    replicas: dict[str, list[int]] = {}
    for replica, host in enumerate(placement.hosts):
        replicas.setdefault(host, []).append(replica)
    found: dict[str, str] = {}
    for host, there in replicas.items():
        text = placement.node if len(there) == 1 else f"{len(there)} x {placement.node}"
        if placement.gpus:
            numbers = [
                int(placement.device(replica, rank).removeprefix("cuda:"))
                for replica in there for rank in range(placement.ranks)
            ]  # fmt: skip
            text += f" on gpu {ranges(numbers)}"
        elif not is_light:
            text += f" on {placement.share_of(there[0])}"
        found[host] = text
    return found


def _size(host: Host) -> str:
    """What a host is: `H100, 96 cores, 8 GPUs of 80.0 GiB, 512.0 GiB`."""
    memory = f" of {amount(host.gpu_memory_bytes)}" if host.gpu_memory_bytes else ""
    facts = [host.kind, f"{host.cpus} core{'s' if host.cpus > 1 else ''}"]
    facts.append(f"{host.gpus} GPU{'s' if host.gpus > 1 else ''}{memory}" if host.gpus else "")
    facts.append(amount(host.memory_bytes) if host.memory_bytes else "")
    return ", ".join(filter(None, facts))
