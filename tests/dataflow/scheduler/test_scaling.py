"""Who joins and leaves, told as plain values: by hand, and in a small world where everything comes in any order."""

import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model, scorer
from dataflow.node import Transform
from dataflow.planning.plan import Devices, Plan, plan
from dataflow.scheduler.scaling import Fork, Order, Say, Scaling, Tell, spare
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")


def settled(scaling: Scaling) -> bool:
    """Whether everything is as it was wished."""
    return all(member.state in ("live", "left") for member in scaling._members.values()) and not scaling._wishes


@scorer
def reward(completion: str) -> float:
    return float(len(completion))


@dataclass(frozen=True, eq=False)
class Stage(Transform):
    """A heavy operator between generator and scorer."""


def planned(devices: Devices | None = None, **how: Any) -> tuple[Graph, Plan]:
    graph, generator, trainer = Graph("test"), FakeGenerator(model=POLICY), FakeTrainer(model=POLICY)
    trainer(reward(Stage(name="stage")(generator(graph.source(FakePrompts())))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph, plan(graph, devices or Devices(cpus=2), **how)


def addresses(graph: Graph, made: Plan) -> dict[str, dict[str, str]]:
    inlets = {"generator": "prompts>generator:prompts", "stage": "generator>stage:prompts",
              "reward": "stage>reward:prompts", "trainer": "reward>trainer:prompts"}  # fmt: skip
    return {
        f"{name}-{replica}": {inlets[name]: f"at-{name}-{replica}"} if name in inlets else {}
        for name, replica, _ in made.processes()
    }


def begun(**how: Any) -> Scaling:
    graph, made = planned(**how)
    scaling = Scaling(graph, made)
    assert scaling.begin(addresses(graph, made)) == []
    return scaling


def said(orders: list[Order]) -> list[tuple[str, str]]:
    """(to whom, which word) of the words among them."""
    return [(order.to, order.word["kind"]) for order in orders if isinstance(order, Say)]


# A join and a leave, step by step


def test_a_join_forks_waits_for_hello_and_for_everybody_downstream_then_wires_starts_and_tells_upstream() -> None:
    scaling = begun()
    forked, expect = scaling.scale({"generator": 2})
    assert forked == Fork(
        name="generator-1", node="generator", replica=1, senders={"prompts>generator:prompts": 1}, gpus=()
    )
    assert isinstance(expect, Say)
    assert (expect.to, expect.word["senders"]) == ("stage-0", {"generator>stage:prompts": 2})
    assert scaling.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"}) == []
    (wire,) = scaling.confirmed(expect.word["ticket"])
    assert wire == Say("generator-1", {"kind": "wire", "addresses": {"generator>stage:prompts": ["at-stage-0"]}})
    start, add, told = scaling.ready("generator-1")
    assert start == Say("generator-1", {"kind": "start"})
    assert add == Say("prompts-0", {"kind": "add", "receivers": {"prompts>generator:prompts": "at-generator-1"}})
    assert told == Tell("'generator-1' has joined with 1 thread")
    assert settled(scaling) and scaling.replicas("generator") == {"joining": 0, "live": 2, "leaving": 0}


def joined(scaling: Scaling, node: str, count: int) -> list[Order]:
    """Let it grow; the orders of the end."""
    orders = scaling.scale({node: count})
    while scaling.joining is not None:
        name = scaling.joining
        orders = [order for order in orders if isinstance(order, Say) and order.word["kind"] == "expect"]
        scaling.hello(name, dict.fromkeys(_inlets(node), f"at-{name}"))
        for order in orders:
            scaling.confirmed(order.word["ticket"])
        orders = scaling.ready(name)
    return orders


def _inlets(node: str) -> list[str]:
    return ["prompts>generator:prompts" if node == "generator" else "generator>stage:prompts"]


def test_replicas_join_one_after_the_other_and_the_youngest_leaves_first() -> None:
    scaling = begun()
    joined(scaling, "generator", 3)
    assert scaling.replicas("generator")["live"] == 3
    (retire,) = scaling.scale({"generator": 2})
    assert isinstance(retire, Say)
    receivers = {"prompts>generator:prompts": "at-generator-2"}
    assert retire == Say("prompts-0", {"kind": "retire", "receivers": receivers, "ticket": retire.word["ticket"]})


def test_a_leaver_is_stopped_when_it_has_nothing_left_and_upstream_knows_it() -> None:
    for first in ("drained", "confirmed"):
        scaling = begun()
        joined(scaling, "generator", 2)
        (retire,) = scaling.scale({"generator": 1})
        assert isinstance(retire, Say)
        events = {
            "drained": lambda scaling=scaling: scaling.drained("generator-1"),
            "confirmed": lambda scaling=scaling, retire=retire: scaling.confirmed(retire.word["ticket"]),
        }
        second = "confirmed" if first == "drained" else "drained"
        assert events[first]() == []
        assert not scaling.leaves("generator-1")
        assert events[second]() == [Say("generator-1", {"kind": "stop"})]
        assert scaling.leaves("generator-1") and not settled(scaling)
        assert scaling.exited("generator-1") == [Tell("'generator-1' has left; all it had was sent on")]
        assert settled(scaling)


def test_a_number_is_never_used_again() -> None:
    scaling = begun()
    joined(scaling, "generator", 3)
    scaling.scale({"generator": 1})
    forked = scaling.scale({"generator": 2})[0]
    assert isinstance(forked, Fork) and forked.name == "generator-3"


def test_no_leave_begins_while_somebody_joins() -> None:
    scaling = begun()
    joined(scaling, "generator", 2)
    scaling.scale({"stage": 2})
    assert scaling.scale({"generator": 1}) == []
    scaling.hello("stage-1", {"generator>stage:prompts": "at-stage-1"})
    for ticket in range(1, 20):
        scaling.confirmed(ticket)
    orders = scaling.ready("stage-1")
    assert [(to, kind) for to, kind in said(orders) if kind == "add"] == [
        ("generator-0", "add"),
        ("generator-1", "add"),
    ]
    assert ("prompts-0", "retire") in said(orders)


def test_wishes_before_the_start_wait_for_it() -> None:
    graph, made = planned()
    scaling = Scaling(graph, made)
    assert scaling.scale({"generator": 2}) == []
    assert isinstance(scaling.begin(addresses(graph, made))[0], Fork)


def test_the_newest_wish_counts() -> None:
    scaling = begun()
    scaling.scale({"generator": 5})
    scaling.scale({"generator": 1})
    scaling.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"})
    scaling.confirmed(1)
    orders = scaling.ready("generator-1")
    assert said(orders) == [("generator-1", "start"), ("prompts-0", "add"), ("prompts-0", "retire")]


def test_it_says_what_a_newcomer_waits_for() -> None:
    scaling = begun()
    scaling.scale({"generator": 2})
    assert scaling.missing() == "its process to say hello"
    scaling.hello("generator-1", {"prompts>generator:prompts": "at-generator-1"})
    assert scaling.missing() == "stage-0 to expect it"
    scaling.confirmed(1)
    assert scaling.missing() == "its operator to be built"


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
def test_wishes_that_cannot_be_are_refused_and_none_of_them_is_taken_in(wishes: dict[str, int], reason: str) -> None:
    scaling = begun()
    with pytest.raises(GraphError, match=reason):
        scaling.scale(wishes)
    assert settled(scaling)


# Accelerators


def test_a_newcomer_takes_spare_accelerators_and_a_leaver_gives_them_back() -> None:
    scaling = begun(devices=Devices(cpus=8, gpus=4), gpus={"generator": 1, "trainer": 1})
    forked = scaling.scale({"generator": 2})[0]
    assert isinstance(forked, Fork) and forked.gpus == (2,)
    with pytest.raises(GraphError, match="3 replicas of 1 GPU each.*|room for 3 beside the others; ask for 3 at most"):
        scaling.scale({"generator": 4})


def test_a_newcomer_waits_for_the_accelerators_of_a_leaver() -> None:
    scaling = begun(devices=Devices(cpus=8, gpus=3), gpus={"generator": 2, "trainer": 1})
    (retire,) = scaling.scale({"generator": 1})
    assert isinstance(retire, Say)
    assert scaling.scale({"generator": 2}) == []
    scaling.drained("generator-1")
    scaling.confirmed(retire.word["ticket"])
    forked = scaling.exited("generator-1")[1]
    assert isinstance(forked, Fork) and (forked.name, forked.gpus) == ("generator-2", (1,))


def test_accelerators_of_one_replica_lie_in_a_row() -> None:
    assert spare(8, {0, 1, 3}, 2) == (4, 5)
    assert spare(4, {1}, 2) == (2, 3)
    assert spare(4, {1, 3}, 2) is None


# A small world in which everything comes in any order


@dataclass
class Process:
    """A worker as the state machine sees it: words in, events out, and rows that it passes on."""

    name: str
    worker: str
    expected: dict[str, int]
    words: deque[dict[str, Any]] = field(default_factory=deque)
    events: deque[tuple[str, Any]] = field(default_factory=deque)
    receivers: dict[str, list[str]] = field(default_factory=dict)
    """By edge, addresses; those that retire are elsewhere."""
    retiring: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, bool] = field(default_factory=dict)
    """Who has sent here, and whether it has ended."""
    rows: deque[tuple[str, int]] = field(default_factory=deque)
    """(sender, row) of what is not sent on, and so not acknowledged."""
    ready: bool = False
    """Whether the scheduler knows that it is."""
    started: bool = False
    ended: bool = False
    drained: bool = False
    gone: bool = False
    wired: bool = True
    down: bool = False
    """It has died and is not started again."""


class World:
    """Carries out orders in a random order, each queue for itself in its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        graph, made = planned()
        self.scaling = Scaling(graph, made)
        self.order = ["prompts", "generator", "stage", "reward", "trainer"]
        self.edges = {a: f"{a}>{b}:prompts" for a, b in zip(self.order, self.order[1:], strict=False)}
        self.processes: dict[str, Process] = {}
        self.issued = 0
        self.issuing = True
        self.trained: list[int] = []
        for name in self.order:
            before = self.order[self.order.index(name) - 1] if name != "prompts" else None
            process = Process(f"{name}-0", name, {self.edges[before]: 1} if before else {}, started=True, ready=True)
            self.processes[process.name] = process
        for a, b in zip(self.order, self.order[1:], strict=False):
            self.connect(self.processes[f"{a}-0"], self.edges[a], f"at-{b}-0")
        self.obey(self.scaling.begin(addresses(graph, made)))

    def at(self, address: str) -> Process:
        return self.processes[address.removeprefix("at-")]

    def connect(self, sender: Process, edge: str, address: str) -> None:
        receiver = self.at(address)
        assert not receiver.gone, f"{sender.name} was told to send to {receiver.name}, which is gone"
        sender.receivers.setdefault(edge, []).append(address)
        if receiver.down:
            return  # it finds those that are connected when it is started again
        receiver.peers[sender.name] = sender.ended
        assert len(receiver.peers) <= receiver.expected[edge], f"{receiver.name} did not expect {sender.name}"

    def obey(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Fork):
                assert order.name not in self.processes
                made = Process(order.name, order.node, dict(order.senders), wired=False)
                inlets = dict.fromkeys(order.senders, f"at-{order.name}")
                made.events.append(("hello", inlets))
                self.processes[order.name] = made
            elif isinstance(order, Say):
                process = self.processes[order.to]
                assert not process.gone or order.word["kind"] == "add"
                process.wired |= order.word["kind"] == "wire"
                if process.wired:
                    process.words.append(dict(order.word))

    def steps(self) -> Iterator[Any]:
        """All that could happen next."""
        for process in self.processes.values():
            if process.gone:
                continue
            if process.down:
                yield lambda process=process: self.rise(process)
                continue
            if process.words:
                yield lambda process=process: self.hear(process)
            if process.events:
                yield lambda process=process: self.report(process)
            if process.started and not process.ended:
                yield lambda process=process: self.work(process)
            for word in process.retiring:
                if not any(self.owed(process, address) for address in word["receivers"].values()):
                    yield lambda process=process, word=word: self.part(process, word)
            if process.ended and not process.drained and not self.owing(process):
                yield lambda process=process: self.drain(process)

    def crash(self, process: Process) -> None:
        """It dies, and that is noticed; what it was sent and has not passed on is sent to it again."""
        if self.scaling.leaves(process.name):
            process.gone = True
            self.obey(self.scaling.exited(process.name))
            return
        process.down, process.wired = True, False
        process.ready = process.started = process.ended = process.drained = False
        process.words.clear()
        process.events.clear()
        process.receivers.clear()
        process.retiring.clear()
        self.obey(self.scaling.fell(process.name))

    def rise(self, process: Process) -> None:
        """It is started again, whatever was said before its death and has not arrived yet."""
        process.expected = self.scaling.senders(process.name)
        address, process.peers = f"at-{process.name}", {}
        for sender in self.processes.values():
            if self.scaling.leaves(sender.name):
                continue
            if any(address in found for found in sender.receivers.values()):
                process.peers[sender.name] = sender.ended
            elif any(address in word["receivers"].values() for word in sender.retiring):
                process.peers[sender.name] = True
        process.down = False
        process.events.append(("hello", dict.fromkeys(process.expected, address)))

    def owed(self, sender: Process, address: str) -> bool:
        return any(name == sender.name for name, _ in self.at(address).rows)

    def owing(self, process: Process) -> bool:
        held = [a for word in process.retiring for a in word["receivers"].values()]
        return bool(process.retiring) or any(
            self.owed(process, address) for each in [*process.receivers.values(), held] for address in each
        )

    def hear(self, process: Process) -> None:
        word = process.words.popleft()
        match word["kind"]:
            case "expect":
                process.expected |= word["senders"]
                process.events.append(("confirmed", word["ticket"]))
            case "over":
                for edge, replica in word["senders"].items():
                    process.peers.setdefault(f"{edge.partition('>')[0]}-{replica}", True)
            case "wire":
                for edge, found in word["addresses"].items():
                    for address in found:
                        self.connect(process, edge, address)
                process.events.append(("ready", None))
            case "start":
                process.started = True
            case "add":
                for edge, address in word["receivers"].items():
                    if address not in process.receivers.get(edge, []):
                        self.connect(process, edge, address)
            case "retire" if word["ticket"] not in [known["ticket"] for known in process.retiring]:
                for edge, address in word["receivers"].items():
                    if address in process.receivers[edge]:
                        process.receivers[edge].remove(address)
                        self.at(address).peers[process.name] = True
                process.retiring.append(word)
            case "stop":
                assert process.drained and not process.rows, f"{process.name} is stopped with rows in its hands"
                process.gone = True
                self.obey(self.scaling.exited(process.name))

    def succeed(self) -> None:
        """The scheduler dies, some of what was on its way is lost; another takes over, and ends who was not ready."""
        left = json.loads(json.dumps(self.scaling.to_plain()))
        self.scaling = Scaling(*planned())
        orders = self.scaling.take_up(left)
        here = [process for process in self.processes.values() if not process.gone and not process.down]
        for process in here:
            for queue in (process.words, process.events):
                if self.random.random() < 0.5:
                    queue.clear()
            if not process.ready:
                self.crash(process)
        self.obey(orders)
        for process in here:
            if process.ready:
                process.words.append({"kind": "start"})
            if process.drained:
                process.events.append(("drained", None))  # as each of its beats says

    def report(self, process: Process) -> None:
        kind, value = process.events.popleft()
        process.ready |= kind == "ready"
        if kind == "confirmed":
            self.obey(self.scaling.confirmed(value))
        else:
            arguments = (process.name,) if value is None else (process.name, value)
            self.obey(getattr(self.scaling, kind)(*arguments))

    def part(self, process: Process, word: dict[str, Any]) -> None:
        process.retiring.remove(word)
        process.events.append(("confirmed", word["ticket"]))

    def drain(self, process: Process) -> None:
        process.drained = True
        process.events.append(("drained", None))

    def work(self, process: Process) -> None:
        if process.worker == "prompts":
            if self.issuing:
                self.issued += 1
                self.pass_on(process, self.issued)
            else:
                self.end(process)
        elif process.rows:
            _, row = process.rows.popleft()
            if process.worker == "trainer":
                self.trained.append(row)
            else:
                self.pass_on(process, row)
        elif len(process.peers) >= sum(process.expected.values()) and all(process.peers.values()):
            self.end(process)

    def pass_on(self, process: Process, row: int) -> None:
        address = self.random.choice(process.receivers[self.edges[process.worker]])
        receiver = self.at(address)
        assert not receiver.ended, f"{receiver.name} got a row after its end"
        receiver.rows.append((process.name, row))

    def end(self, process: Process) -> None:
        process.ended = True
        for found in process.receivers.values():
            for address in found:
                self.at(address).peers[process.name] = True

    def without_senders(self) -> list[tuple[str, str]]:
        """(sender, receiver) that are both at work, and the sender does not send there."""
        live = [each for each in self.processes.values() if self.scaling.state(each.name) == "live"]
        return [
            (sender.name, receiver.name) for sender in live for receiver in live
            if sender.worker in self.edges and self.edges[sender.worker] in receiver.expected
            and f"at-{receiver.name}" not in sender.receivers[self.edges[sender.worker]]
        ]  # fmt: skip

    def settle(self) -> None:
        """Go on until every wish is fulfilled."""
        self.run(20_000, until=lambda: settled(self.scaling))

    def end_well(self, wished: dict[str, int]) -> None:
        """The prompts end: every row is trained once, and every wish is fulfilled."""
        self.issuing = False
        self.run(100_000)
        assert sorted(self.trained) == list(range(1, self.issued + 1))
        assert settled(self.scaling)
        assert {node: self.scaling.replicas(node)["live"] for node in wished} == wished

    def run(self, most: int, until: Any = lambda: False) -> None:
        for _ in range(most):
            possible = list(self.steps())
            if not possible or until():
                return
            self.random.choice(possible)()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_in_whatever_order_every_row_is_trained_once(seed: int) -> None:
    world = World(seed)
    wished = {"generator": 1, "stage": 1}
    for _ in range(world.random.randrange(2, 12)):
        node, count = world.random.choice(["generator", "stage"]), world.random.randrange(1, 5)
        wished[node] = count
        world.obey(world.scaling.scale({node: count}))
        world.run(world.random.randrange(0, 200))
    early = world.random.random() < 0.3  # the prompts end while replicas still come and go
    if not early:
        world.settle()
        assert {node: world.scaling.replicas(node)["live"] for node in wished} == wished
    world.end_well(wished)


@pytest.mark.parametrize("seed", range(60))
def test_whoever_dies_while_replicas_come_and_go_every_row_is_trained_once(seed: int) -> None:
    world = World(1_000 + seed)
    wished = {"generator": 1, "stage": 1}
    for _ in range(world.random.randrange(2, 12)):
        if world.random.random() < 0.5:
            node, count = world.random.choice(["generator", "stage"]), world.random.randrange(1, 5)
            wished[node] = count
            world.obey(world.scaling.scale({node: count}))
        for _ in range(world.random.randrange(0, 3)):
            world.crash(world.random.choice([each for each in world.processes.values() if not each.gone]))
            world.run(world.random.randrange(0, 30))
        world.run(world.random.randrange(0, 200))
    world.settle()
    world.end_well(wished)


@pytest.mark.parametrize("seed", range(120))
def test_whenever_the_scheduler_dies_the_next_one_goes_on_and_every_row_is_trained_once(seed: int) -> None:
    world = World(2_000 + seed)
    wished = {"generator": 1, "stage": 1}
    for _ in range(world.random.randrange(2, 12)):
        if world.random.random() < 0.5:
            node, count = world.random.choice(["generator", "stage"]), world.random.randrange(1, 5)
            wished[node] = count
            world.obey(world.scaling.scale({node: count}))
        if world.random.random() < 0.3:
            world.crash(world.random.choice([each for each in world.processes.values() if not each.gone]))
        world.run(world.random.randrange(0, 30))
        if world.random.random() < 0.6:
            world.succeed()
        world.run(world.random.randrange(0, 200))
    world.settle()
    world.end_well(wished)
    assert world.without_senders() == []


def test_nobody_joins_or_leaves_while_one_that_died_is_away() -> None:
    scaling = begun()
    joined(scaling, "generator", 2)
    assert scaling.fell("stage-0") == []
    assert scaling.scale({"generator": 3}) == [] and scaling.scale({"generator": 1}) == []
    assert scaling.senders("stage-0") == {"generator>stage:prompts": 2}
    (wire,) = scaling.hello("stage-0", {"generator>stage:prompts": "at-stage-0"})
    assert wire == Say("stage-0", {"kind": "wire", "addresses": {"stage>reward:prompts": ["at-reward-0"]}})
    assert said(scaling.ready("stage-0")) == [("stage-0", "start"), ("prompts-0", "retire")]


def test_one_that_died_while_it_let_another_go_lets_it_go_again() -> None:
    scaling = begun()
    joined(scaling, "generator", 2)
    (retire,) = scaling.scale({"generator": 1})
    scaling.fell("prompts-0")
    wire, again = scaling.hello("prompts-0", {})
    assert again == retire and isinstance(wire, Say)
    assert wire.word["addresses"] == {"prompts>generator:prompts": ["at-generator-0", "at-generator-1"]}


def test_one_that_died_counts_a_leaver_that_was_told_to_stop_as_it_may_come_once_more_or_not() -> None:
    scaling = begun()
    joined(scaling, "generator", 2)
    (retire,) = scaling.scale({"generator": 1})
    assert isinstance(retire, Say)
    scaling.drained("generator-1")
    assert said(scaling.confirmed(retire.word["ticket"])) == [("generator-1", "stop")]
    assert scaling.fell("stage-0") == []
    assert scaling.senders("stage-0") == {"generator>stage:prompts": 2}
    _, over = scaling.hello("stage-0", {"generator>stage:prompts": "at-stage-0"})
    assert over == Say("stage-0", {"kind": "over", "senders": {"generator>stage:prompts": 1}})
    scaling.exited("generator-1")
    scaling.fell("stage-0")
    assert scaling.senders("stage-0") == {"generator>stage:prompts": 1}, "one that has left does not come"
