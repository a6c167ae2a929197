"""All inputs of a plan beside its graph, as plain values: the same inputs give the same plan."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dataflow.errors import GraphError, nearest
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices
from dataflow.records import MESSAGE_BYTES

# Which hosts the user wants replicas on: `place=`, read and checked.


Place = Mapping[str, str | Sequence[str]]
"""By node, the host of its replicas, or several that they use in turn."""
Pins = Mapping[str, tuple[str, ...]]
"""By node, the hosts that its replicas use in turn."""


def read_place(place: Place, devices: Devices) -> Pins:
    """As it was given, with every host in a tuple. GraphError for hosts that the run does not
    have.
    """
    pins = {
        node: (hosts,) if isinstance(hosts, str) else tuple(hosts) for node, hosts in place.items()
    }
    host_names = [host.name for host in devices.hosts]
    if pins and not host_names:
        raise GraphError(
            f"place names hosts, {pins}, but this run has this machine alone; run it over hosts, or"
            " leave place= out"
        )
    for node, hosts in pins.items():
        for host in hosts:
            if host not in host_names:
                raise GraphError(
                    f"'{node}' is to be on host '{host}', but the run has"
                    f" {host_names}{nearest(host, host_names)}; name one of these"
                )
        if not hosts or len(set(hosts)) < len(hosts):
            raise GraphError(
                f"'{node}' is to be on hosts {list(hosts)}; name one or more, each of them once"
            )
    return pins


def check_pins(pins: Pins, replicas: Mapping[str, int], spread: Mapping[str, int]) -> None:
    """Refuse more hosts than replicas, and hosts that cannot have as many ranks each. GraphError.

    spread: of those whose ranks may be on several hosts, how many ranks there are.
    """
    for node, hosts in pins.items():
        ranks = spread.get(node, 1)
        if ranks > 1 and ranks % len(hosts):
            fitting = [count for count in range(1, ranks + 1) if ranks % count == 0]
            raise GraphError(
                f"'{node}' is to be spread over {len(hosts)} hosts, {', '.join(hosts)}, but has"
                f" {ranks} ranks, and each host is to have as many; name"
                f" {', '.join(map(str, fitting[:-1]))} or {ranks} hosts, or give it other ranks"
            )
        if ranks == 1 and (count := replicas[node]) < len(hosts):
            raise GraphError(
                f"'{node}' is to be on {len(hosts)} hosts, {', '.join(hosts)}, but has {count}"
                f" replica{'s' if count > 1 else ''}, and all ranks of a replica are on one host,"
                f" but for those of a trainer; name {count} at most, or give it more replicas,"
                " where it can have more"
            )


def pin_of(nodes: Sequence[str], pins: Pins, why: str) -> str | None:
    """The host that nodes which sit together are pinned to; None: to none. GraphError where they
    name several.

    why: they sit together, for people.
    """
    named = {node: pins[node] for node in nodes if node in pins}
    hosts = {host for of_node in named.values() for host in of_node}
    if len(hosts) > 1:
        pinned = ", ".join(
            f"'{node}' on {' and '.join(of_node)}" for node, of_node in named.items()
        )
        raise GraphError(f"place puts {pinned}, but {why}; name one host for all of them")
    return next(iter(hosts), None)


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What `make_plan` takes, by the names of its parameters: `make_plan(graph,
    **inputs.arguments)`.

    >>> import msgspec
    >>> from dataflow import Devices
    >>> from dataflow.planning.inputs import PlanInputs
    >>> inputs = PlanInputs(devices=Devices(cpus=2), scale={100: {"generator": 3}})
    >>> msgspec.convert(msgspec.to_builtins(inputs), PlanInputs) == inputs
    True
    """

    devices: Devices
    gpus: Wishes | Literal["shared"] | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    steps: int | None = None
    scale: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    weights: str | None = None
    listen: str = ""
    message_bytes: int = MESSAGE_BYTES
    link_gbps: float | None = None
    place: Place = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """For `make_plan`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def digest(value: Any) -> str:
    """64 hexadecimal digits, the same for equal values in every process and Python: of plain values
    and dataclasses.
    """
    plain = json.dumps(
        value, default=_fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(plain.encode()).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    """Of a dataclass; a TypeError, as JSON's, of anything else."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a digest is of plain values, but found {type(value).__name__}")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
