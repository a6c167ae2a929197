"""What is asked of a Ray cluster, and why it cannot be had: pure functions of its list of nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dataflow.errors import GraphError

Node: TypeAlias = Mapping[str, Any]
"""As ray.nodes() has it."""
CPU, GPU = "CPU", "GPU"
_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """So many hosts with so much of each resource."""

    hosts: int
    bundle: Mapping[str, float]

    def describe(self) -> str:
        """For people."""
        return f"{self.hosts} hosts with {_amounts(self.bundle)} each"


def asked(
    nodes: Sequence[Node],
    *,
    hosts: int = 0,
    cpus: int = _UNKNOWN,
    gpus: int = _UNKNOWN,
    resources: Mapping[str, float],
) -> BundleRequest:
    """What to ask for. hosts: 0 for all nodes that have what is named. cpus, gpus: -1 for as many
    as the smallest of them has, which leaves out nodes without a core. Errors: GraphError where
    nothing can be.
    """
    named = {**resources, **{name: n for name, n in ((CPU, cpus), (GPU, gpus)) if n > 0}}
    fit = [node for node in nodes if node["Alive"] and _has(node, {CPU: 1, **named})]
    if not fit and (not hosts or cpus == _UNKNOWN):
        raise GraphError(
            f"no host of the Ray cluster has {_amounts({CPU: 1, **named})}; there"
            f" {_what_there_is(nodes)}; ask for what there is, or for hosts= and cpus= where an"
            " autoscaler brings them"
        )
    largest = sorted(fit, key=lambda each: -each["Resources"][CPU])[: hosts or None]
    smallest = {
        name: min((int(node["Resources"].get(name, 0)) for node in largest), default=0)
        for name in (CPU, GPU)
    }
    bundle = {
        **resources,
        CPU: smallest[CPU] if cpus == _UNKNOWN else cpus,
        GPU: smallest[GPU] if gpus == _UNKNOWN else gpus,
    }
    return BundleRequest(
        hosts=hosts or len(fit), bundle={name: float(n) for name, n in bundle.items() if n}
    )


def cannot_be_had(
    wanted: BundleRequest,
    nodes: Sequence[Node],
    free: Mapping[str, Mapping[str, float]],
    wait_s: float,
) -> str:
    """That a placement did not come to be, with what there is. free: by node, what nobody uses."""
    return (
        f"Ray did not find {wanted.describe()} within {wait_s:.0f} s; there"
        f" {_what_there_is(nodes, free)}; ask for less, end what else runs there, add hosts, or"
        " give an autoscaler longer (wait_s)"
    )


def host_name(nodes: Sequence[Node], node_id: str) -> str:
    """What a node is called in the run: as its machine; with a part of Ray's number where several
    are on one.
    """
    (own,) = [node for node in nodes if node["NodeID"] == node_id]
    name = str(own["NodeManagerHostname"])
    alike = [node for node in nodes if node["Alive"] and node["NodeManagerHostname"] == name]
    return name if len(alike) < 2 else f"{name}-{node_id[:6]}"


def _has(node: Node, bundle: Mapping[str, float]) -> bool:
    return all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())


def _what_there_is(
    nodes: Sequence[Node], free: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    hosts = [
        f"'{node['NodeManagerAddress']}' with {_amounts(_plain(node['Resources']))}"
        + (
            f" ({_amounts(_plain(free[node['NodeID']]))} free)"
            if free and node["NodeID"] in free
            else ""
        )
        for node in nodes
        if node["Alive"]
    ]
    return f"are {len(hosts)} hosts: {'; '.join(hosts)}" if hosts else "are no hosts"


def _plain(resources: Mapping[str, float]) -> Mapping[str, float]:
    """Those that users know of."""
    hidden = ("memory", "object_store_memory")
    return {
        name: n
        for name, n in resources.items()
        if name not in hidden and not name.startswith("node:") and n
    }


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"
