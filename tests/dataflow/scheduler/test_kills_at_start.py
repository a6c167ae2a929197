"""Workers that are killed before all were ready once, at every moment: the run begins as it would
have, wired to those that are there.
"""

from collections.abc import Iterable, Iterator
from random import Random

import pytest
from test_scaling import addresses, planned

from dataflow.limits import Limits, Patience
from dataflow.planning.hosts import Devices
from dataflow.scheduler.events import (
    Command,
    EndRun,
    ProcessEvent,
    Received,
    RunBegins,
    Send,
    StartWorker,
    Tick,
)
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import ProcessState, Table, WorkerRecord
from dataflow.worker.messages import FromWorker, Hello, Moved, Ready, Start, Wire
from transport.life import Life

PATIENT = Patience(first_s=0.0, most_s=0.0, of_one=100, of_all=1000)


class Attempt:
    """One process: what it was told, and what it does next."""

    def __init__(self, name: str, number: int, senders: dict[str, int] | None) -> None:
        self.name, self.number, self.senders = name, number, senders
        self.steps = ["started", "hello", "ready"]
        self.wires: list[dict[str, list[str]]] = []
        self.started = 0

    @property
    def may_go_on(self) -> bool:
        return bool(self.steps) and (self.steps[0] != "ready" or bool(self.wires))

    def hear(self, message: object) -> None:
        match message:
            case Wire():
                self.wires.append({edge: list(where) for edge, where in message.addresses.items()})
            case Moved():
                for edge, where in message.receivers.items():
                    own = self.wires[-1][edge]
                    self.wires[-1][edge] = [
                        where if at in message.before[edge] else at for at in own
                    ]
            case Start():
                self.started += 1


class Starting:
    """A run of two generators as it starts."""

    def __init__(self, seed: int, kills: int) -> None:
        self.random, self.kills, self.now = Random(seed), kills, 0.0
        graph, made = planned(replicas={"generator": 2})
        self.table = Table(graph=graph, plan=made, limits=Limits(patience=PATIENT))
        self.inlets = {consumer: edge for edge, _, consumer in self.table.edges}
        self.attempts: dict[str, Attempt] = {}
        self.do(reduce(self.table, RunBegins(), 0.0))

    def run(self) -> None:
        for _ in range(1000):
            if (
                self.table.begun
                and not self.kills
                and all(record.process is ProcessState.READY for record in self.table)
            ):
                return
            self.now += 0.01
            self.turn(self.random.choice(list(self.attempts.values())))
            self.do(reduce(self.table, Tick(), self.now))
        raise AssertionError(
            f"the run does not begin: {[str(record.process) for record in self.table]}"
        )

    def turn(self, one: Attempt) -> None:
        if self.kills and self.random.random() < 0.2:
            self.kills -= 1
            one.steps = []
            self.do(reduce(self.table, ProcessEvent(one.name, "exited", -9), self.now))
        elif one.may_go_on:
            getattr(self, one.steps.pop(0))(one)

    def started(self, one: Attempt) -> None:
        self.do(reduce(self.table, ProcessEvent(one.name, "started"), self.now))

    def hello(self, one: Attempt) -> None:
        self.says(one, Hello(life=Life(attempt=one.number), pid=1, addresses=self.addresses(one)))

    def ready(self, one: Attempt) -> None:
        self.says(one, Ready(life=Life(attempt=one.number)))

    def says(self, one: Attempt, message: FromWorker) -> None:
        self.do(reduce(self.table, Received(one.name, message), self.now))

    def addresses(self, one: Attempt) -> dict[str, str]:
        edge = self.inlets.get(one.name.rpartition("-")[0])
        return {edge: f"{one.name} at attempt {one.number}"} if edge else {}

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartWorker():
                    record = self.table.workers[command.name]
                    senders = None if command.senders is None else dict(command.senders)
                    self.attempts[command.name] = Attempt(
                        command.name, record.life.attempt, senders
                    )
                case Send():
                    self.attempts[command.to].hear(command.message)
                case EndRun():
                    raise command.error


@pytest.mark.parametrize("kills", [1, 2, 6])
def test_the_run_begins_whoever_is_killed_at_whichever_moment_of_its_start(kills: int) -> None:
    for seed in range(60):
        run = Starting(seed, kills)
        run.run()
        where = [run.addresses(one) for one in run.attempts.values()]
        for one in run.attempts.values():
            assert one.started == 1 and len(one.wires) == 1, (seed, one.name)
            if one.number and one.name.startswith("stage"):
                assert one.senders == {"generator>stage:prompts": 2}
            for edge, to in one.wires[0].items():
                assert sorted(to) == sorted(own[edge] for own in where if edge in own), (
                    seed,
                    one.name,
                )
        assert sum(one.number for one in run.attempts.values()) == kills


def test_the_start_of_many_workers_looks_at_each_of_them_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def counting(records: Iterable[WorkerRecord]) -> Iterator[WorkerRecord]:
        nonlocal looks
        for record in records:
            looks += 1
            yield record

    graph, made = planned(Devices(cpus=400), replicas={"generator": 400})
    table = Table(graph=graph, plan=made)
    names, where = list(table.workers), addresses(graph, made)
    monkeypatch.setattr(Table, "__iter__", lambda self: counting(self.workers.values()))
    monkeypatch.setattr(
        Table,
        "__reversed__",
        lambda self: counting(reversed(self.workers.values())),
        raising=False,
    )
    assert sum(isinstance(each, StartWorker) for each in reduce(table, RunBegins(), 0.0)) == 404
    for name in names:
        hello = Hello(life=Life(), pid=1, addresses=where[name])
        commands = reduce(table, Received(name, hello), 0.0)
    wired = [each for each in commands if isinstance(each, Send) and isinstance(each.message, Wire)]
    assert len(wired) == len(names)
    for name in names:
        reduce(table, Received(name, Ready(life=Life())), 0.0)
    assert table.begun
    assert looks < 30 * len(names)
