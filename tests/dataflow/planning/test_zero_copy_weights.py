"""Which trainers send versions from their weights themselves, and which from copies: planned, told,
refused.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model
from dataflow.node import TrainingTraits, Traits
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")
CPUS = Devices(cpus=4)
SLOW = Devices(cpus=4, link_bytes_per_s=12.5e6)
GPUS = Devices(cpus=8, gpus=8)
STRAIGHT, COPIED = (
    "from the weights themselves: an update waits for who is taking them",
    "from copies of the weights",
)


@dataclass(frozen=True, eq=False)
class Wishing(FakeTrainer):
    """A trainer that says whether it copies, and may sleep."""

    copies: bool | None = None

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, training=TrainingTraits(copies_weights=self.copies), sleeps=True
        )


@dataclass(frozen=True, eq=False)
class Sleeping(FakeGenerator):
    """A generator that may take turns."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, sleeps=True)


def planned(copies: bool | None, devices: Devices, **how: Any) -> Plan:
    graph, trainer = Graph("test"), Wishing(model=POLICY, copies=copies)
    generator = Sleeping(model=POLICY)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=0)
    return plan(graph, devices, **how)


def told(made: Plan) -> str:
    (line,) = [line for line in made.explain().splitlines() if line.startswith("weights")]
    return line


@pytest.mark.parametrize(
    ("copies", "devices", "how", "zero_copy"),
    [
        (None, CPUS, {"ranks": {"trainer": 2}}, True),
        (False, CPUS, {"ranks": {"trainer": 2}}, True),
        (True, CPUS, {"ranks": {"trainer": 2}}, False),
        (None, CPUS, {"weights": "gloo"}, True),
        (None, SLOW, {"weights": "gloo"}, False),
        (None, CPUS, {"ranks": {"trainer": 2}, "gpus": {"trainer": "generator"}}, False),
        (None, GPUS, {"gpus": {"generator": 1, "trainer": 2}}, True),
        (None, GPUS, {"gpus": {"trainer": 2}}, False),
    ],
    ids=[
        "ranks",
        "asked for",
        "copies",
        "one rank by gloo",
        "deltas",
        "turns",
        "GPUs",
        "GPU to main memory",
    ],
)
def test_versions_go_out_from_the_weights_unless_these_are_put_away_or_must_be_copied(
    copies: bool | None, devices: Devices, how: dict[str, Any], zero_copy: bool
) -> None:
    made = planned(copies, devices, **how)
    (path,) = made.weight_paths
    assert path.zero_copy == made.zero_copy("trainer", path.executor) == zero_copy
    assert (STRAIGHT in told(made)) == zero_copy
    assert (COPIED in told(made)) == (not zero_copy and path.link_bytes_per_s is None)


@pytest.mark.parametrize("copies", [None, True, False])
def test_one_rank_writes_the_memory_in_which_its_readers_compute(copies: bool | None) -> None:
    made = planned(copies, CPUS)
    assert not made.weight_paths[0].zero_copy and not made.zero_copy("trainer", "shared_memory")
    assert STRAIGHT not in told(made) and COPIED not in told(made)


@pytest.mark.parametrize(
    ("devices", "how", "said"),
    [
        (
            CPUS,
            {"gpus": {"trainer": "generator"}},
            r"it takes turns on its devices with \['generator'\]",
        ),
        (SLOW, {"weights": "gloo"}, r"it sends what changed over links of 12.5 MB/s"),
    ],
)
def test_weights_that_are_put_away_or_compared_are_not_lent(
    devices: Devices, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        GraphError, match=rf"'trainer' has copy_weights=False, but {said}.*; leave copy_weights out"
    ):
        planned(False, devices, **how)
