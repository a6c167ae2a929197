"""Who joins and leaves, as plain values; in `tests/simulation` everything comes in any order."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model, scorer
from dataflow.limits import Limits, Patience
from dataflow.node import Transform
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.scheduler import scaling
from dataflow.scheduler.events import (
    Command,
    FaultNoticed,
    FaultRecovered,
    NotifyUser,
    ProcessEvent,
    Received,
    Send,
    StartWorker,
    Tick,
    Wish,
)
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import Life, Membership, Table
from dataflow.system.files import to_json
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.kept_counts import Crossed, total
from dataflow.worker.messages import (
    AddReceivers,
    Confirmed,
    Expect,
    FromWorker,
    Heard,
    Heartbeat,
    Hello,
    Ready,
    RetireReceivers,
    Start,
    Stop,
    Wire,
)

POLICY = Model("policy")


def settled(table: Table) -> bool:
    """Whether everything is as it was wished."""
    settled = all(record.membership in (Membership.LIVE, Membership.LEFT) for record in table)
    return settled and not table.wishes


class Played:
    """A table whose workers are played: what they say goes to the reducer."""

    def __init__(self, graph: Graph, made: Plan) -> None:
        limits = Limits(
            hang_s=1e9,
            start_s=1e9,
            patience=Patience(first_s=0.0, most_s=0.0, of_one=10**6, of_all=10**6),
        )
        self.table = Table(graph=graph, plan=made, limits=limits)
        for name, own in addresses(graph, made).items():
            self.table.workers[name].addresses = own

    def begin(self) -> list[Command]:
        """All are at work."""
        for record in self.table:
            record.life, record.wired = Life.READY, True
        self.table.begun = True
        return scaling.advance(self.table)

    def scale(self, wishes: dict[str, int]) -> list[Command]:
        scaling.check(self.table, wishes)
        return reduce(self.table, Wish(wishes), 0.0)

    def hello(self, name: str, own: dict[str, str]) -> list[Command]:
        return self._said(name, lambda attempt: Hello(attempt=attempt, pid=1, addresses=own))

    def confirmed(self, ticket: int, name: str = "prompts-0") -> list[Command]:
        return self._said(name, lambda attempt: Confirmed(attempt=attempt, ticket=ticket))

    def ready(self, name: str) -> list[Command]:
        told = self._said(name, lambda attempt: Ready(attempt=attempt))
        return [command for command in told if not isinstance(command, FaultRecovered)]

    def drained(self, name: str) -> list[Command]:
        told = self._said(name, lambda attempt: Heartbeat(attempt=attempt, nodes={}, drained=True))
        return [command for command in told if command != Send(name, Heard())]

    def heartbeat(self, name: str) -> list[Command]:
        told = self._said(name, lambda attempt: Heartbeat(attempt=attempt, nodes={}))
        return [command for command in told if command != Send(name, Heard())]

    def fell(self, name: str) -> list[Command]:
        """It dies, and was not told to stop."""
        told = self.exited(name)
        return [command for command in told if not isinstance(command, FaultNoticed)]

    def exited(self, name: str) -> list[Command]:
        return reduce(self.table, ProcessEvent(name, "exited", -9), 0.0)

    def starts(self, name: str) -> dict[str, int]:
        """One that died is started again, for so many senders."""
        for record in self.table:
            if record.restart_at is not None:
                record.restart_at = 0.0 if record.name == name else 1e9
        (spawned,) = reduce(self.table, Tick(), 0.0)
        assert isinstance(spawned, StartWorker) and spawned.name == name
        return dict(spawned.senders or {})

    def leaves(self, name: str) -> bool:
        return self.table.workers[name].may_end

    def replicas(self, node: str) -> dict[str, int]:
        return scaling.replicas(self.table, node)

    def _said(self, name: str, message: Callable[[int], FromWorker]) -> list[Command]:
        record = self.table.workers[name]
        return reduce(self.table, Received(name, message(record.attempt), record.host), 0.0)


@scorer
def reward(completion: str) -> float:
    return float(len(completion))


@dataclass(frozen=True, eq=False)
class Stage(Transform):
    """A heavy operator between generator and scorer."""


def planned(devices: Devices | None = None, **how: Any) -> tuple[Graph, Plan]:
    graph, generator, trainer = (
        Graph("test"),
        FakeGenerator(model=POLICY),
        FakeTrainer(model=POLICY),
    )
    trainer(reward(Stage(name="stage")(generator(graph.source(FakePrompts())))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph, plan(graph, devices or Devices(cpus=2), **how)


def addresses(graph: Graph, made: Plan) -> dict[str, dict[str, str]]:
    inlets = {
        "generator": "prompts>generator:prompts",
        "stage": "generator>stage:prompts",
        "reward": "stage>reward:prompts",
        "trainer": "reward>trainer:prompts",
    }
    return {
        f"{name}-{replica}": {inlets[name]: f"at-{name}-{replica}"} if name in inlets else {}
        for name, replica, _ in made.processes()
    }


def begun(**how: Any) -> Played:
    played = Played(*planned(**how))
    assert played.begin() == []
    return played


def said(commands: list[Command]) -> list[tuple[str, type]]:
    """(to whom, which message) of the messages among them."""
    return [
        (command.to, type(command.message)) for command in commands if isinstance(command, Send)
    ]


def ticket(command: Command) -> int:
    """Of a message that is to be confirmed."""
    assert isinstance(command, Send) and isinstance(command.message, Expect | RetireReceivers)
    return command.message.ticket


# A join and a leave, step by step


def test_a_join_forks_waits_for_hello_and_all_downstream_then_wires_starts_tells_upstream() -> None:
    played = begun()
    forked, expect = played.scale({"generator": 2})
    assert forked == StartWorker(name="generator-1", senders={"prompts>generator:prompts": 1})
    assert expect == Send(
        "stage-0", Expect(senders={"generator>stage:prompts": 2}, ticket=ticket(expect))
    )
    assert played.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"}) == []
    (wire,) = played.confirmed(ticket(expect))
    assert wire == Send("generator-1", Wire(addresses={"generator>stage:prompts": ["at-stage-0"]}))
    start, add, told = played.ready("generator-1")
    assert start == Send("generator-1", Start())
    assert add == Send(
        "prompts-0", AddReceivers(receivers={"prompts>generator:prompts": "at-generator-1"})
    )
    assert told == NotifyUser("'generator-1' has joined with 1 thread")
    assert settled(played.table) and played.replicas("generator") == {
        "joining": 0,
        "live": 2,
        "leaving": 0,
    }


def joined(played: Played, node: str, count: int) -> list[Command]:
    """Let it grow; the orders of the end."""
    orders = played.scale({node: count})
    while played.table.joining is not None:
        name = played.table.joining.name
        orders = [
            order
            for order in orders
            if isinstance(order, Send) and isinstance(order.message, Expect)
        ]
        played.hello(name, dict.fromkeys(_inlets(node), f"at-{name}"))
        for order in orders:
            played.confirmed(ticket(order))
        orders = played.ready(name)
    return orders


def _inlets(node: str) -> list[str]:
    return ["prompts>generator:prompts" if node == "generator" else "generator>stage:prompts"]


def test_replicas_join_one_after_the_other_and_the_youngest_leaves_first() -> None:
    played = begun()
    joined(played, "generator", 3)
    assert played.replicas("generator")["live"] == 3
    (retire,) = played.scale({"generator": 2})
    receivers = {"prompts>generator:prompts": "at-generator-2"}
    assert retire == Send("prompts-0", RetireReceivers(receivers=receivers, ticket=ticket(retire)))


def test_a_leaver_is_stopped_when_it_has_nothing_left_and_upstream_knows_it() -> None:
    for first in ("drained", "confirmed"):
        played = begun()
        joined(played, "generator", 2)
        (retire,) = played.scale({"generator": 1})
        events = {
            "drained": lambda played=played: played.drained("generator-1"),
            "confirmed": lambda played=played, retire=retire: played.confirmed(ticket(retire)),
        }
        second = "confirmed" if first == "drained" else "drained"
        assert events[first]() == []
        assert not played.leaves("generator-1")
        assert events[second]() == [Send("generator-1", Stop())]
        assert played.leaves("generator-1") and not settled(played.table)
        assert played.exited("generator-1") == [
            NotifyUser("'generator-1' has left; all it had was sent on")
        ]
        assert settled(played.table)


def test_what_a_replica_did_that_has_left_is_known_to_the_next_scheduler() -> None:
    played = begun()
    joined(played, "generator", 2)
    (retire,) = played.scale({"generator": 1})
    crossed = {
        "file": {"prompts>generator:prompts": {"received": Crossed(batches=1, rows=8, bytes=100)}}
    }
    told = Heartbeat(attempt=0, nodes={}, drained=True, crossed=crossed)
    reduce(played.table, Received("generator-1", told), 0.0)
    played.confirmed(ticket(retire))
    played.exited("generator-1")
    after = Table(graph=played.table.graph, plan=played.table.plan, limits=played.table.limits)
    after.take_up(json.loads(to_json(played.table.to_plain())))
    assert total([after.workers["generator-1"].told["crossed"]]) == total([crossed])


def test_the_newest_wish_counts() -> None:
    played = begun()
    played.scale({"generator": 5})
    played.scale({"generator": 1})
    played.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"})
    played.confirmed(1)
    orders = played.ready("generator-1")
    assert said(orders) == [
        ("generator-1", Start),
        ("prompts-0", AddReceivers),
        ("prompts-0", RetireReceivers),
    ]


def test_it_says_what_a_newcomer_waits_for() -> None:
    played = begun()
    played.scale({"generator": 2})
    assert (
        scaling.missing(played.table, played.table.workers["generator-1"])
        == "its process to say hello"
    )
    played.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"})
    assert (
        scaling.missing(played.table, played.table.workers["generator-1"]) == "stage-0 to expect it"
    )
    played.confirmed(1)
    assert (
        scaling.missing(played.table, played.table.workers["generator-1"])
        == "its operator to be built"
    )


# What cannot be


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        ({"generater": 2}, "did you mean 'generator'"),
        ({"generator": 0}, "'generator' cannot run as 0 replicas"),
        ({"trainer": 2}, "'trainer' cannot run as 2 replicas"),
        ({"reward": 2}, "'reward' cannot run as 2 replicas"),
        ({"generator": 3, "trainer": 2}, "'trainer' cannot run as 2 replicas"),
    ],
)
def test_wishes_that_cannot_be_are_refused_and_none_of_them_is_taken_in(
    wishes: dict[str, int], reason: str
) -> None:
    played = begun()
    with pytest.raises(GraphError, match=reason):
        played.scale(wishes)
    assert settled(played.table)


# Accelerators


def test_a_newcomer_takes_spare_accelerators_and_a_leaver_gives_them_back() -> None:
    played = begun(devices=Devices(cpus=8, gpus=4), gpus={"generator": 1, "trainer": 1})
    forked = played.scale({"generator": 2})[0]
    assert isinstance(forked, StartWorker) and played.table.workers["generator-1"].gpus == (2,)
    with pytest.raises(
        GraphError,
        match="3 replicas of 1 GPU each.*|room for 3 beside the others; ask for 3 at most",
    ):
        played.scale({"generator": 4})


def test_a_newcomer_waits_for_the_accelerators_of_a_leaver() -> None:
    played = begun(devices=Devices(cpus=8, gpus=3), gpus={"generator": 2, "trainer": 1})
    (retire,) = played.scale({"generator": 1})
    assert played.scale({"generator": 2}) == []
    played.drained("generator-1")
    played.confirmed(ticket(retire))
    forked = played.exited("generator-1")[1]
    assert isinstance(forked, StartWorker) and (
        forked.name,
        played.table.workers["generator-2"].gpus,
    ) == (
        "generator-2",
        (1,),
    )


# A small world in which everything comes in any order
