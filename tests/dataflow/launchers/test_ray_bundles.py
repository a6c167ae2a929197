"""What is asked of a Ray cluster, and what is said when it cannot be had."""

from typing import Any

import pytest

from dataflow.errors import GraphError
from dataflow.launchers.ray_bundles import BundleRequest, asked, cannot_be_had, host_name


def node(name: str, *, machine: str = "", alive: bool = True, **resources: float) -> dict[str, Any]:
    hidden = {"memory": 1e9, "object_store_memory": 1e9, f"node:{name}": 1.0}
    return {
        "NodeID": f"{name}-0123456789",
        "NodeManagerAddress": name,
        "NodeManagerHostname": machine or name,
        "Alive": alive,
        "Resources": {**resources, **hidden},
    }


HEAD, A, B, DEAD = (
    node("head", CPU=0),
    node("a", CPU=16, GPU=8),
    node("b", CPU=8, GPU=8),
    node("c", CPU=4, alive=False),
)


NODES = [HEAD, A, B, DEAD]


def test_all_hosts_with_a_core_are_asked_for_and_each_for_what_the_smallest_has() -> None:
    assert asked(NODES, resources={}) == BundleRequest(hosts=2, bundle={"CPU": 8.0, "GPU": 8.0})


def test_the_largest_hosts_are_asked_for_where_not_all_are_wanted() -> None:
    assert asked(NODES, hosts=1, gpus=0, resources={}) == BundleRequest(
        hosts=1, bundle={"CPU": 16.0}
    )


def test_hosts_without_what_is_named_do_not_count() -> None:
    rack = node("d", CPU=2, GPU=1, rack=1)
    assert asked([*NODES, rack], resources={"rack": 1}) == BundleRequest(
        hosts=1, bundle={"CPU": 2.0, "GPU": 1.0, "rack": 1.0}
    )


def test_hosts_that_are_yet_to_come_can_be_asked_for_by_number_and_cores() -> None:
    assert asked([HEAD], hosts=4, cpus=16, gpus=8, resources={}) == BundleRequest(
        hosts=4, bundle={"CPU": 16.0, "GPU": 8.0}
    )


@pytest.mark.parametrize(
    "wish", [{"hosts": 4}, {"cpus": 32}, {"gpus": 9}, {"resources": {"rack": 1}}]
)
def test_what_no_host_has_is_refused_with_what_there_is(wish: dict[str, Any]) -> None:
    if "hosts" in wish:
        with pytest.raises(
            GraphError, match="has 1 CPU; there are 1 hosts: 'head' with nothing; ask for"
        ):
            asked([HEAD, DEAD], **{"resources": {}, **wish})
        return
    with pytest.raises(
        GraphError, match="there are 3 hosts: .*'a' with 16 CPU, 8 GPU; 'b' with 8 CPU, 8 GPU"
    ):
        asked(NODES, **{"resources": {}, **wish})


def test_a_placement_that_cannot_be_had_says_what_was_asked_and_what_there_is() -> None:
    free = {each["NodeID"]: each["Resources"] for each in NODES} | {A["NodeID"]: {"GPU": 0.0}}
    said = cannot_be_had(BundleRequest(hosts=3, bundle={"CPU": 8}), [A, B, DEAD], free, 60)
    assert said.startswith(
        "Ray did not find 3 hosts with 8 CPU each within 60 s; there are 2 hosts: "
        "'a' with 16 CPU, 8 GPU (nothing free); 'b' with 8 CPU, 8 GPU (8 CPU, 8 GPU free); "
    )


def test_hosts_are_called_as_their_machines_unless_several_are_on_one() -> None:
    nodes = [*(node(name, machine="m") for name in "xy"), node("z", machine="n")]
    nodes.append(node("w", machine="n", alive=False))
    assert [host_name(nodes, each["NodeID"]) for each in nodes[:3]] == ["m-x-0123", "m-y-0123", "n"]
