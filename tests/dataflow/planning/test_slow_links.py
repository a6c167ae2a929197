"""The plan says where weights travel as deltas: over links that are known to be slow, and never within a machine."""

import dataclasses

import pytest

from dataflow import Devices, Graph, GraphError, Model, plan
from dataflow.planning import executors
from dataflow.planning.executors import SCAN_BYTES_PER_S, Seat
from dataflow.planning.plan import Plan
from dataflow.run import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")
SLOW = 1e7


def build() -> Graph:
    graph, trainer, generator = Graph("test"), FakeTrainer(model=POLICY), FakeGenerator(model=POLICY)
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
    assert weights_line(made).endswith(", as deltas where these are shorter, over links of 10 MB/s)")
    for other in (planned(None, "gloo"), planned(SCAN_BYTES_PER_S, "gloo"), planned(50e9, "gloo")):
        assert other.link("trainer", "gloo") is None
        assert "deltas" not in weights_line(other)


def test_within_a_machine_everything_is_sent() -> None:
    for weights in (None, "shared_memory"):
        made = planned(SLOW, weights)
        assert made.link("trainer", "shared_memory") is None
        assert "deltas" not in weights_line(made)


def test_between_machines_the_link_counts_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    sit = executors._seat
    monkeypatch.setattr(executors, "_seat", lambda *where: on_a_machine_of_its_own(sit(*where)))
    made = planned(SLOW)
    assert made.executors() == {("trainer", "generator"): "gloo"}
    assert made.link("trainer", "gloo") == SLOW
    assert planned(None).link("trainer", "gloo") is None


def on_a_machine_of_its_own(seat: Seat) -> Seat:
    return dataclasses.replace(seat, machine=seat.process)


def test_a_rate_is_given_in_gigabits_and_is_above_nothing() -> None:
    assert make_plan(build(), devices=Devices(cpus=2), weights="gloo", link_gbps=0.08).link("trainer", "gloo") == SLOW
    for none in (0.0, -1.0, float("nan")):
        with pytest.raises(GraphError, match="a link carries more than nothing, but link_gbps is"):
            make_plan(build(), devices=Devices(cpus=2), link_gbps=none)
