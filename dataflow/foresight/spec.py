"""Devices that one could rent, and what one pays for them, as text: `192xH100+64xL40S`,
`H100=2.5,L40S=1.0`."""

import re
from collections.abc import Mapping

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import device_kind
from dataflow.planning.hosts import Devices, Host

_CORES_EACH, _MEMORY_EACH = 12, 128 * 10**9
"""Cores and bytes of main memory beside each device: assumed, about what nodes of eight have."""


def read_devices(text: str) -> Devices:
    """Nodes of eight of one kind, the last one with what is left; `2xcpu`: two cores of this
    machine, and nothing else.

    GraphError for what cannot be read.

    >>> from dataflow.foresight.spec import read_devices
    >>> [(host.name, host.gpus) for host in read_devices("10xH100").hosts]
    [('H100-0', 8), ('H100-1', 2)]
    """
    if (cores := re.fullmatch(r"\s*([1-9][0-9]{0,3})\s*x\s*(?i:cpu)\s*", text)) is not None:
        return Devices(cpus=int(cores[1]))
    hosts: list[Host] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*x\s*([\w-]+)\s*", part)
        if match is None:
            raise GraphError(
                f"devices to foresee are {text!r}, which cannot be read at {part!r}; write them as"
                " 16xH100, or as 192xH100+64xL40S"
            )
        count, kind = int(match[1]), device_kind(match[2])
        if kind.name == "cpu":
            raise GraphError(
                f"devices to foresee are {text!r}; name either accelerators or cores, not both"
            )
        if any(host.kind == kind.name for host in hosts):
            raise GraphError(
                f"devices to foresee are {text!r}, which names {kind.name} twice; add the"
                " numbers up"
            )
        for number in range(-(-count // kind.per_node)):
            each = min(kind.per_node, count - number * kind.per_node)
            hosts.append(
                Host(
                    name=f"{kind.name}-{number}",
                    cpus=_CORES_EACH * each,
                    gpus=each,
                    kind=kind.name,
                    memory_bytes=_MEMORY_EACH * each,
                    gpu_memory_bytes=kind.memory_bytes,
                )
            )
    return Devices.of(hosts)


def read_prices(text: str, devices: Devices) -> Mapping[str, float] | None:
    """Of a device for an hour, by kind; None where nobody says. In whatever money they are given.

    GraphError for what cannot be read, and where a kind of these devices has none.

    >>> read_prices("H100=2.5,L40S=1.0", read_devices("8xH100"))
    {'H100': 2.5, 'L40S': 1.0}
    """
    if not text.strip():
        return None
    if not devices.gpus:
        raise GraphError(
            f"prices are {text!r}, but the devices are cores of this machine, which nobody rents by"
            " the hour here; leave --prices out, or foresee accelerators, as 16xH100"
        )
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([\w-]+)\s*=\s*([0-9]+(?:\.[0-9]+)?)\s*", part)
        if match is None:
            raise GraphError(
                f"prices are {text!r}, which cannot be read at {part!r}; write them as"
                " H100=2.5,L40S=1.0"
            )
        found[device_kind(match[1]).name] = float(match[2])
    lacking = [
        kind for kind in dict.fromkeys(host.kind for host in devices.hosts) if kind not in found
    ]
    if lacking:
        raise GraphError(
            f"prices are {text!r}, which has none for {', '.join(lacking)}; add {lacking[0]}=.."
        )
    return found
