"""Hosts as values: their checks, what they have together, and the inputs and the digest of a plan
on every host.
"""

import os
import subprocess
import sys

import msgspec
import pytest

from dataflow import Devices, Graph, GraphError, Model, Plan, plan
from dataflow.planning.hosts import Host
from dataflow.planning.inputs import PlanInputs, digest
from dataflow.planning.memory_need import check_fit
from dataflow.planning.placement import Need
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

A = Host(name="a", cpus=4, gpus=2, memory_bytes=100, gpu_memory_bytes=40, kind="small")


B = Host(name="b", cpus=2)


C = Host(name="c", cpus=8, gpus=4, memory_bytes=200, gpu_memory_bytes=80)


def test_devices_of_hosts_are_their_sums_and_the_smallest_accelerator() -> None:
    both = Devices.of([A, C], link_bytes_per_s=1e9)
    assert (both.cpus, both.gpus, both.memory_bytes, both.gpu_memory_bytes) == (12, 6, 300, 40)
    assert both.link_bytes_per_s == 1e9 and both.machines == both.hosts == (A, C)
    assert Devices.of([A, B]).memory_bytes == 0, "what one host has is unknown, and so is the sum"


def test_accelerators_are_numbered_host_by_host_those_without_any_in_between() -> None:
    devices = Devices.of([B, A, Host(name="d", cpus=1), C])
    places = [(devices.host_of(gpu).name, devices.number_there(gpu)) for gpu in range(devices.gpus)]
    assert places == [("a", 0), ("a", 1), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]


def test_this_machine_is_a_host_without_a_name() -> None:
    (alone,) = Devices(cpus=3, gpus=1, memory_bytes=7, gpu_memory_bytes=5).machines
    assert alone == Host(name="", cpus=3, gpus=1, memory_bytes=7, gpu_memory_bytes=5)
    assert Devices(cpus=3, memory_bytes=7).room == {("", "cpu"): 7}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Host(name="a,b", cpus=1), r"a host is called 'a,b'.*give it a name of letters"),
        (lambda: Host(name="a+b", cpus=1), r"a host is called 'a\+b'"),
        (lambda: Host(name="../up", cpus=1), r"a host is called '\.\./up'"),
        (lambda: Host(name="a", cpus=0), r"host 'a' is said to have cpus=0; give 1 or more"),
        (
            lambda: Host(name="a", cpus=1, gpus=-1),
            r"host 'a' is said to have gpus=-1; give 0 or more",
        ),
        (lambda: Host(name="a", cpus=1, memory_bytes=-5), r"memory_bytes=-5"),
        (lambda: Devices.of([]), r"there are none; give it one or more"),
        (
            lambda: Devices.of([A, C, A]),
            r"need names of their own, but found \['a', 'c', 'a'\]; rename 'a'",
        ),
        (
            lambda: Devices.of([Host(name="", cpus=1), A]),
            r"need names of their own, but found \['', 'a'\]",
        ),
    ],
)
def test_a_host_that_cannot_be_is_refused(made: object, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        made()  # type: ignore[operator]


def test_hosts_and_all_a_plan_is_made_from_come_back_from_json() -> None:
    inputs = PlanInputs(
        devices=Devices.of([A, B], link_bytes_per_s=2.5e8),
        gpus={"generator": 2, "trainer": "generator"},
        scale={100: {"generator": 3}},
        place={"generator": ("a", "b"), "trainer": "a"},
        steps=7,
        listen="10.0.0.1",
    )
    sent = msgspec.json.encode(inputs)
    back = msgspec.json.decode(sent, type=PlanInputs)
    assert msgspec.json.encode(back) == sent
    assert back.devices == inputs.devices and back.scale == inputs.scale
    assert back.place == {"generator": ["a", "b"], "trainer": "a"}


def test_what_does_not_fit_names_its_host() -> None:
    needs = [
        ("generator-0", ("b", "cpu"), Need({"weights": 9})),
        ("trainer-0", ("a", "cpu"), Need({"weights": 9})),
    ]
    check_fit(needs, {("a", "cpu"): 10, ("b", "cpu"): 10})
    with pytest.raises(
        GraphError, match="does not fit into main memory of host 'b': .*found 'generator-0'"
    ):
        check_fit(needs, {("a", "cpu"): 10, ("b", "cpu"): 8})


# The digest


def made(max_staleness: int = 1, cpus: int = 4) -> Plan:
    graph, model = Graph("test"), Model("policy")
    trainer, generator = FakeTrainer(model=model), FakeGenerator(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return plan(graph, Devices(cpus=cpus), replicas={"generator": 2}, scale={3: {"generator": 1}})


def test_the_digest_of_a_plan_is_the_same_in_another_process_and_differs_where_the_plan_does() -> (
    None
):
    here = made().digest()
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location('m', {__file__!r}); m ="
        " u.module_from_spec(s);s.loader.exec_module(m); print(m.made().digest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.split() == [here], done.stderr
    assert len({here, made(2).digest(), made(cpus=8).digest()}) == 3


def test_a_digest_does_not_hang_on_the_order_in_which_a_mapping_was_filled() -> None:
    assert (
        digest({"a": 1, "b": (2, 0.1)})
        == digest({"b": [2, 0.1], "a": 1})
        != digest({"a": 1, "b": (2, 0.2)})
    )
    assert digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862", (
        "another Python"
    )
