"""Who joins and leaves, as plain values; in `tests/simulation` everything comes in any order."""

import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from dataflow import Graph, GraphError, Model, scorer
from dataflow.limits import Limits, Patience
from dataflow.node import Transform
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.planning.seats import spare
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
    TakeOver,
    Tick,
    Wish,
)
from dataflow.scheduler.events import KeptProcess as Kept
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import Membership, ProcessState, Table
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
    Moved,
    Ready,
    RetireReceivers,
    SenderEnded,
    Start,
    Stop,
    ToWorker,
    Wire,
)
from transport.life import Life

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
            record.process, record.wired = ProcessState.READY, True
        self.table.begun = True
        return scaling.advance(self.table)

    def scale(self, wishes: dict[str, int]) -> list[Command]:
        scaling.check(self.table, wishes)
        return reduce(self.table, Wish(wishes), 0.0)

    def hello(self, name: str, own: dict[str, str]) -> list[Command]:
        return self._said(name, lambda life: Hello(life=life, pid=1, addresses=own))

    def confirmed(self, ticket: int, name: str = "prompts-0") -> list[Command]:
        return self._said(name, lambda life: Confirmed(life=life, ticket=ticket))

    def ready(self, name: str) -> list[Command]:
        told = self._said(name, lambda life: Ready(life=life))
        return [command for command in told if not isinstance(command, FaultRecovered)]

    def drained(self, name: str) -> list[Command]:
        told = self._said(name, lambda life: Heartbeat(life=life, nodes={}, drained=True))
        return [command for command in told if command != Send(name, Heard())]

    def heartbeat(self, name: str) -> list[Command]:
        told = self._said(name, lambda life: Heartbeat(life=life, nodes={}))
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

    def _said(self, name: str, message: Callable[[Life], FromWorker]) -> list[Command]:
        record = self.table.workers[name]
        return reduce(self.table, Received(name, message(record.life), record.host), 0.0)


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
    told = Heartbeat(life=Life(), nodes={}, drained=True, crossed=crossed)
    reduce(played.table, Received("generator-1", told), 0.0)
    played.confirmed(ticket(retire))
    played.exited("generator-1")
    after = Table(graph=played.table.graph, plan=played.table.plan, limits=played.table.limits)
    after.take_up(json.loads(to_json(played.table.to_plain())))
    assert total([after.workers["generator-1"].told["crossed"]]) == total([crossed])


def test_a_number_is_never_used_again() -> None:
    played = begun()
    joined(played, "generator", 3)
    played.scale({"generator": 1})
    forked = played.scale({"generator": 2})[0]
    assert isinstance(forked, StartWorker) and forked.name == "generator-3"


def test_no_leave_begins_while_somebody_joins() -> None:
    played = begun()
    joined(played, "generator", 2)
    played.scale({"stage": 2})
    assert played.scale({"generator": 1}) == []
    played.hello("stage-1", {"generator>stage:prompts": "at-stage-1"})
    for ticket in range(1, 20):
        played.confirmed(ticket)
    orders = played.ready("stage-1")
    assert [(to, kind) for to, kind in said(orders) if kind is AddReceivers] == [
        ("generator-0", AddReceivers),
        ("generator-1", AddReceivers),
    ]
    assert ("prompts-0", RetireReceivers) in said(orders)


def test_wishes_before_the_start_wait_for_it() -> None:
    played = Played(*planned())
    assert played.scale({"generator": 2}) == []
    assert isinstance(played.begin()[0], StartWorker)


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


def test_accelerators_of_one_replica_lie_in_a_row() -> None:
    assert spare(range(8), {0, 1, 3}, 2) == (4, 5)
    assert spare(range(4), {1}, 2) == (2, 3)
    assert spare(range(4), {1, 3}, 2) is None


# A small world in which everything comes in any order


@dataclass
class Process:
    """A worker as the reducer sees it: messages in, messages out, and rows that it passes on."""

    name: str
    worker: str
    expected: dict[str, int]
    messages: deque[ToWorker] = field(default_factory=deque)
    events: deque[tuple[str, Any]] = field(default_factory=deque)
    receivers: dict[str, list[str]] = field(default_factory=dict)
    """By edge, addresses; those that retire are elsewhere."""
    retiring: list[RetireReceivers] = field(default_factory=list)
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
    down: bool = False
    """It has died and is not started again."""
    address: str = ""
    unreached: list[tuple[str, int]] = field(default_factory=list)
    """(address, row) of what was sent to where a receiver is no more."""


class World:
    """Executes commands in a random order, each queue for itself in its own."""

    def __init__(self, seed: int, *, moves: bool = False) -> None:
        """moves: whoever is started again may listen elsewhere."""
        self.random, self.moves = random.Random(seed), moves
        self.played = Played(*planned())
        self.order = ["prompts", "generator", "stage", "reward", "trainer"]
        self.edges = {
            a: f"{a}>{b}:prompts" for a, b in zip(self.order, self.order[1:], strict=False)
        }
        self.processes: dict[str, Process] = {}
        self.issued = 0
        self.issuing = True
        self.trained: list[int] = []
        for name in self.order:
            before = self.order[self.order.index(name) - 1] if name != "prompts" else None
            expected = {self.edges[before]: 1} if before else {}
            process = Process(
                f"{name}-0", name, expected, started=True, ready=True, address=f"at-{name}-0"
            )
            self.processes[process.name] = process
        for a, b in zip(self.order, self.order[1:], strict=False):
            self.connect(self.processes[f"{a}-0"], self.edges[a], f"at-{b}-0")
        self.execute(self.played.begin())

    def at(self, address: str) -> Process:
        return self.processes[address.removeprefix("at-").partition("@")[0]]

    def connect(self, sender: Process, edge: str, address: str) -> None:
        receiver = self.at(address)
        assert not receiver.gone, (
            f"{sender.name} was told to send to {receiver.name}, which is gone"
        )
        sender.receivers.setdefault(edge, []).append(address)
        if receiver.down or receiver.address != address:
            # it finds those that are connected when it is started again, or they hear where it is
            return
        receiver.peers[sender.name] = sender.ended
        assert len(receiver.peers) <= receiver.expected[edge], (
            f"{receiver.name} did not expect {sender.name}"
        )

    def execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, StartWorker):
                if command.name in self.processes:
                    continue  # `rise` starts it again
                worker, senders = command.name.rpartition("-")[0], dict(command.senders or {})
                made = Process(command.name, worker, senders, address=f"at-{command.name}")
                made.events.append(("hello", dict.fromkeys(senders, f"at-{command.name}")))
                self.processes[command.name] = made
            elif isinstance(command, Send):
                process = self.processes[command.to]
                assert not process.gone or isinstance(command.message, AddReceivers)
                process.messages.append(command.message)

    def steps(self) -> Iterator[Any]:
        """All that could happen next."""
        for process in self.processes.values():
            if process.gone:
                continue
            if process.down:
                yield lambda process=process: self.rise(process)
                continue
            if process.messages:
                yield lambda process=process: self.hear(process)
            if process.events:
                yield lambda process=process: self.report(process)
            if process.started and not process.ended:
                yield lambda process=process: self.work(process)
            for message in process.retiring:
                if not any(self.owed(process, address) for address in message.receivers.values()):
                    yield lambda process=process, message=message: self.part(process, message)
            if process.ended and not process.drained and not self.owing(process):
                yield lambda process=process: self.drain(process)

    def crash(self, process: Process) -> None:
        """It dies, and that is noticed; what it was sent and has not passed on is sent to it
        again.
        """
        if self.played.leaves(process.name):
            process.gone = True
            self.execute(self.played.exited(process.name))
            return
        process.down = True
        process.ready = process.started = process.ended = process.drained = False
        process.messages.clear()
        process.events.clear()
        process.receivers.clear()
        process.retiring.clear()
        process.rows.extend((process.name, row) for _, row in process.unreached)
        process.unreached.clear()
        self.execute(self.played.fell(process.name))

    def rise(self, process: Process) -> None:
        """It is started again, whatever was said before its death and has not arrived yet."""
        process.expected = self.played.starts(process.name)
        if self.moves:
            process.address = f"at-{process.name}@{self.random.randrange(3)}"
        address, process.peers = process.address, {}
        for sender in self.processes.values():
            if self.played.leaves(sender.name):
                continue
            if any(address in found for found in sender.receivers.values()):
                process.peers[sender.name] = sender.ended
            elif any(address in message.receivers.values() for message in sender.retiring):
                process.peers[sender.name] = True
            self.reach(sender, process)
        process.down = False
        process.events.append(("hello", dict.fromkeys(process.expected, address)))

    def owed(self, sender: Process, address: str) -> bool:
        receiver = self.at(address)
        return any(name == sender.name for name, _ in receiver.rows) or any(
            self.at(to) is receiver for to, _ in sender.unreached
        )

    def owing(self, process: Process) -> bool:
        held = [a for message in process.retiring for a in message.receivers.values()]
        return bool(process.retiring) or any(
            self.owed(process, address)
            for each in [*process.receivers.values(), held]
            for address in each
        )

    def hear(self, process: Process) -> None:
        message = process.messages.popleft()
        match message:
            case Expect():
                process.expected |= message.senders
                process.events.append(("confirmed", message.ticket))
            case SenderEnded():
                for edge, replica in message.senders.items():
                    process.peers.setdefault(f"{edge.partition('>')[0]}-{replica}", True)
            case Wire():
                for edge, found in message.addresses.items():
                    for address in found:
                        self.connect(process, edge, address)
                process.events.append(("ready", None))
            case Moved():
                for edge, address in message.receivers.items():
                    self.move(process, edge, set(message.before[edge]), address)
            case Start():
                process.started = True
            case AddReceivers():
                for edge, address in message.receivers.items():
                    if address not in process.receivers.get(edge, []):
                        self.connect(process, edge, address)
            case RetireReceivers() if message.ticket not in [
                known.ticket for known in process.retiring
            ]:
                for edge, address in message.receivers.items():
                    if address in process.receivers[edge]:
                        process.receivers[edge].remove(address)
                        if self.at(address).address == address:
                            self.at(address).peers[process.name] = True
                process.retiring.append(message)
            case Stop():
                assert process.drained and not process.rows, (
                    f"{process.name} is stopped with rows in its hands"
                )
                process.gone = True
                self.execute(self.played.exited(process.name))

    def move(self, process: Process, edge: str, before: set[str], address: str) -> None:
        """A receiver is elsewhere: what it has not acknowledged goes there."""
        receiver, found = self.at(address), process.receivers.get(edge, [])
        retiring = [
            message for message in process.retiring if message.receivers.get(edge) in before
        ]
        if not retiring and not before & set(found):
            return
        process.receivers[edge] = [address if known in before else known for known in found]
        process.retiring = [
            structs.replace(each, receivers={edge: address}) if each in retiring else each
            for each in process.retiring
        ]
        process.unreached = [
            (address if to in before else to, row) for to, row in process.unreached
        ]
        if not receiver.down and receiver.address == address:
            receiver.peers[process.name] = process.ended or bool(retiring)
            self.reach(process, receiver)

    def reach(self, sender: Process, receiver: Process) -> None:
        """What was sent to where a receiver is by now has arrived."""
        receiver.rows.extend(
            (sender.name, row) for to, row in sender.unreached if to == receiver.address
        )
        sender.unreached = [(to, row) for to, row in sender.unreached if to != receiver.address]

    def succeed(self) -> None:
        """The scheduler dies, some of what was on its way is lost; another takes over, and ends who
        was not ready.
        """
        left = json.loads(to_json(self.played.table.to_plain()))
        self.played = Played(*planned())
        self.played.table.take_up(left)
        here = [
            process for process in self.processes.values() if not process.gone and not process.down
        ]
        for process in here:
            for queue in (process.messages, process.events):
                if self.random.random() < 0.5:
                    queue.clear()
        lives = {record.name: record.life for record in self.played.table}
        kept = {
            name: Kept(lives[name], 1, not process.down and not process.gone, -9)
            for name, process in self.processes.items()
        }
        commands = reduce(self.played.table, TakeOver(kept), 0.0)
        for process in here:
            if not process.ready:
                self.crash(process)
        self.execute(commands)
        for process in here:
            if process.ready:
                # it finds the new one
                process.events.append(("drained" if process.drained else "heartbeat", None))

    def report(self, process: Process) -> None:
        kind, value = process.events.popleft()
        process.ready |= kind == "ready"
        if kind == "confirmed":
            self.execute(self.played.confirmed(value, process.name))
        else:
            arguments = (process.name,) if value is None else (process.name, value)
            self.execute(getattr(self.played, kind)(*arguments))

    def part(self, process: Process, message: RetireReceivers) -> None:
        process.retiring.remove(message)
        process.events.append(("confirmed", message.ticket))

    def drain(self, process: Process) -> None:
        process.drained = True
        process.events.append(("drained", None))

    def work(self, process: Process) -> None:
        if process.worker == "prompts" and not process.rows:
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
        if receiver.address != address:
            process.unreached.append((address, row))
            return
        assert not receiver.ended, f"{receiver.name} got a row after its end"
        receiver.rows.append((process.name, row))

    def end(self, process: Process) -> None:
        process.ended = True
        for found in process.receivers.values():
            for address in found:
                if self.at(address).address == address:
                    self.at(address).peers[process.name] = True

    def without_senders(self) -> list[tuple[str, str]]:
        """(sender, receiver) that are both at work, and the sender does not send there."""
        live = [
            each
            for each in self.processes.values()
            if self.played.table.workers[each.name].membership is Membership.LIVE
        ]
        return [
            (sender.name, receiver.name)
            for sender in live
            for receiver in live
            if sender.worker in self.edges
            and self.edges[sender.worker] in receiver.expected
            and receiver.address not in sender.receivers[self.edges[sender.worker]]
        ]

    def settle(self) -> None:
        """Go on until every wish is fulfilled."""
        self.run(20_000, until=lambda: settled(self.played.table))

    def end_well(self, wished: dict[str, int]) -> None:
        """The prompts end: every row is trained once, and every wish is fulfilled."""
        self.issuing = False
        self.run(100_000)
        assert sorted(self.trained) == list(range(1, self.issued + 1))
        assert settled(self.played.table)
        assert {node: self.played.replicas(node)["live"] for node in wished} == wished

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
        world.execute(world.played.scale({node: count}))
        world.run(world.random.randrange(0, 200))
    early = world.random.random() < 0.3  # the prompts end while replicas still come and go
    if not early:
        world.settle()
        assert {node: world.played.replicas(node)["live"] for node in wished} == wished
    world.end_well(wished)


@pytest.mark.parametrize("seed", range(60))
def test_whoever_dies_while_replicas_come_and_go_every_row_is_trained_once(seed: int) -> None:
    world = World(1_000 + seed, moves=bool(seed % 2))
    wished = {"generator": 1, "stage": 1}
    for _ in range(world.random.randrange(2, 12)):
        if world.random.random() < 0.5:
            node, count = world.random.choice(["generator", "stage"]), world.random.randrange(1, 5)
            wished[node] = count
            world.execute(world.played.scale({node: count}))
        for _ in range(world.random.randrange(0, 3)):
            world.crash(
                world.random.choice([each for each in world.processes.values() if not each.gone])
            )
            world.run(world.random.randrange(0, 30))
        world.run(world.random.randrange(0, 200))
    world.settle()
    world.end_well(wished)


@pytest.mark.parametrize("seed", range(120))
def test_whenever_the_scheduler_dies_the_next_one_goes_on_and_every_row_is_trained_once(
    seed: int,
) -> None:
    world = World(2_000 + seed, moves=bool(seed % 2))
    wished = {"generator": 1, "stage": 1}
    for _ in range(world.random.randrange(2, 12)):
        if world.random.random() < 0.5:
            node, count = world.random.choice(["generator", "stage"]), world.random.randrange(1, 5)
            wished[node] = count
            world.execute(world.played.scale({node: count}))
        if world.random.random() < 0.3:
            world.crash(
                world.random.choice([each for each in world.processes.values() if not each.gone])
            )
        world.run(world.random.randrange(0, 30))
        if world.random.random() < 0.6:
            world.succeed()
        world.run(world.random.randrange(0, 200))
    world.settle()
    world.end_well(wished)
    assert world.without_senders() == []


def test_nobody_joins_or_leaves_while_one_that_died_is_away() -> None:
    played = begun()
    joined(played, "generator", 2)
    assert played.fell("stage-0") == []
    assert played.scale({"generator": 3}) == [] and played.scale({"generator": 1}) == []
    assert played.starts("stage-0") == {"generator>stage:prompts": 2}
    (wire,) = played.hello("stage-0", {"generator>stage:prompts": "at-stage-0"})
    assert wire == Send("stage-0", Wire(addresses={"stage>reward:prompts": ["at-reward-0"]}))
    assert said(played.ready("stage-0")) == [("stage-0", Start), ("prompts-0", RetireReceivers)]


def test_one_that_died_while_it_let_another_go_lets_it_go_again() -> None:
    played = begun()
    joined(played, "generator", 2)
    (retire,) = played.scale({"generator": 1})
    played.fell("prompts-0")
    played.starts("prompts-0")
    wire, again = played.hello("prompts-0", {})
    assert again == retire
    assert wire == Send(
        "prompts-0",
        Wire(addresses={"prompts>generator:prompts": ["at-generator-0", "at-generator-1"]}),
    )


def test_one_that_died_counts_a_leaver_that_was_told_to_stop_as_it_may_come_once_more_or_not() -> (
    None
):
    played = begun()
    joined(played, "generator", 2)
    (retire,) = played.scale({"generator": 1})
    played.drained("generator-1")
    assert said(played.confirmed(ticket(retire))) == [("generator-1", Stop)]
    assert played.fell("stage-0") == []
    assert played.starts("stage-0") == {"generator>stage:prompts": 2}
    _, over = played.hello("stage-0", {"generator>stage:prompts": "at-stage-0"})
    assert over == Send("stage-0", SenderEnded(senders={"generator>stage:prompts": 1}))
    played.exited("generator-1")
    played.fell("stage-0")
    assert played.starts("stage-0") == {"generator>stage:prompts": 1}, (
        "one that has left does not come"
    )
