"""Ports on which workers listen: on each host one worker has one."""

from collections.abc import Mapping

from dataflow.errors import GraphError
from dataflow.planning.placement import Placement


def check_ports(placements: Mapping[str, Placement]) -> None:
    """Refuse two workers that would listen on one port of one host. GraphError."""
    seen: dict[tuple[str, int], str] = {}
    for each in placements.values():
        for replica in range(each.replicas if each.port else 0):
            name = f"'{each.node}'" if each.replicas == 1 else f"'{each.node}-{replica}'"
            other = seen.setdefault((each.host(replica), each.port), name)
            if other != name:
                place = f"host '{each.host(replica)}'" if each.host(replica) else "this machine"
                raise GraphError(
                    f"{other} and {name} would both listen on port {each.port} of {place}, where"
                    " only one can; give port=0 (any that is free), or each operator a port of its"
                    " own, and replicas with one port hosts of their own with place="
                )
