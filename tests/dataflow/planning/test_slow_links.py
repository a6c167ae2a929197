"""The plan says where weights travel as deltas: over links that are known to be slow, and never
within a machine.
"""

import dataclasses

import pytest

from dataflow import Devices, Graph, GraphError, Model, plan
from dataflow.planning.executors import SCAN_BYTES_PER_S
from dataflow.planning.hosts import Host
from dataflow.planning.plan import Plan
from dataflow.runner import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")
SLOW = 1e7


def build() -> Graph:
    graph, trainer, generator = (
        Graph("test"),
        FakeTrainer(model=POLICY),
        FakeGenerator(model=POLICY),
    )
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def planned(link: float | None, weights: str | None = None) -> Plan:
    return plan(build(), Devices(cpus=2, link_bytes_per_s=link), weights=weights)


def weights_line(made: Plan) -> str:
    (line,) = [line for line in made.explain().splitlines() if line.startswith("weights")]
    return line


def test_a_forced_executor_takes_the_link_s_rate_where_deltas_pay() -> None:
    made = planned(SLOW, "gloo")
    assert made.link("trainer", "gloo") == SLOW
    assert weights_line(made).endswith(
        ", as deltas where these are shorter, over links of 10 MB/s)"
    )
    for other in (planned(None, "gloo"), planned(SCAN_BYTES_PER_S, "gloo"), planned(50e9, "gloo")):
        assert other.link("trainer", "gloo") is None
        assert "deltas" not in weights_line(other)


def test_within_a_machine_everything_is_sent() -> None:
    for weights in (None, "shared_memory"):
        made = planned(SLOW, weights)
        assert made.link("trainer", "shared_memory") is None
        assert "deltas" not in weights_line(made)


def test_between_hosts_the_link_counts_unasked() -> None:
    def made(link: float | None) -> Plan:
        devices = Devices.of(
            [Host(name="a", cpus=2), Host(name="b", cpus=2)], link_bytes_per_s=link
        )
        where = {"trainer": "a", "generator": ("a", "b")}
        return plan(build(), devices, replicas={"generator": 2}, place=where)

    assert [path.link_bytes_per_s for path in made(SLOW).weight_paths] == [None, SLOW]
    assert made(SLOW).executors() == {("trainer", "generator"): "shared_memory x1, gloo x1"}
    assert (
        made(SLOW).link("trainer", "gloo") == SLOW
        and made(SLOW).link("trainer", "shared_memory") is None
    )
    assert made(None).link("trainer", "gloo") is None
    together = dataclasses.replace(made(SLOW), weight_paths=made(SLOW).weight_paths[:1])
    assert together.link("trainer", "gloo") == SLOW, "one that is beside the trainer may be moved"


def test_a_rate_is_given_in_gigabits_and_is_above_nothing() -> None:
    assert (
        make_plan(build(), devices=Devices(cpus=2), weights="gloo", link_gbps=0.08).link(
            "trainer", "gloo"
        )
        == SLOW
    )
    for none in (0.0, -1.0, float("nan")):
        with pytest.raises(GraphError, match="a link carries more than nothing, but link_gbps is"):
            make_plan(build(), devices=Devices(cpus=2), link_gbps=none)
