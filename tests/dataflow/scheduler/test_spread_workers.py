"""A worker whose ranks are on several hosts, told as plain values: its life and theirs, and a host
that is lost.
"""

import json
import signal

import pytest
from rigs.spreading import build

from dataflow.limits import Limits, Patience
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import plan
from dataflow.scheduler import events, seating
from dataflow.scheduler.events import (
    Command,
    EndRanks,
    HostHeard,
    HostLost,
    Signal,
    StartRanks,
    StartWorker,
)
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import ProcessState, Table, WorkerRecord
from dataflow.system.files import to_json
from dataflow.worker import messages
from transport.life import Life

LIMITS = Limits(hang_s=10.0, host_s=60.0, patience=Patience(first_s=0.0, of_one=3))


class Run:
    """Three hosts of two accelerators; the trainer has those of `a` and `b`, and there is a spare
    host.
    """

    def __init__(self, hosts: str = "abcd") -> None:
        graph, self.now = build(), 100.0
        devices = Devices.of([Host(name=name, cpus=4, gpus=2) for name in hosts])
        made = plan(
            graph,
            devices,
            gpus={"trainer": 4, "generator": 1},
            place={"generator": "c", "prompts": "c"},
        )
        self.table = Table(graph=graph, plan=made, limits=LIMITS)
        own = {
            "generator-0": {"prompts>generator:prompts": "x"},
            "trainer-0": {"generator>trainer:prompts": "y"},
        }
        for number, record in enumerate(self.table):
            record.process, record.wired, record.has_process, record.pid = (
                ProcessState.READY,
                True,
                True,
                number + 1,
            )
            record.addresses, record.received_at, record.heard_at = (
                own.get(record.name, {}),
                record.host,
                self.now,
            )
        self.own, self.table.begun, self.table.watched_at = own, True, self.now
        for host in self.table.hosts:
            self.take(HostHeard(host))

    @property
    def trainer(self) -> WorkerRecord:
        return self.table.workers["trainer-0"]

    def take(self, event: events.Event) -> list[Command]:
        return reduce(self.table, event, self.now)

    def exits(self) -> list[Command]:
        return self.take(events.ProcessEvent("trainer-0", "exited", -9, self.trainer.host))

    def tick(self) -> list[Command]:
        self.now += 0.5
        return self.take(events.Tick())


def of_ranks(commands: list[Command]) -> list[Command]:
    return [
        each for each in commands if isinstance(each, StartWorker | StartRanks | EndRanks | Signal)
    ]


def test_the_processes_of_its_ranks_start_when_it_says_where_it_waits_for_them() -> None:
    run = Run()
    run.trainer.process = ProcessState.FORKED
    hello = messages.Hello(
        life=Life(), pid=5, addresses=run.own["trainer-0"], ranks_at="tcp://10.0.0.1:5000"
    )
    said = run.take(events.Received("trainer-0", hello, "a"))
    assert StartRanks("trainer-0", "tcp://10.0.0.1:5000") in said
    assert seating.rank_devices(run.table, run.trainer) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_they_end_when_it_has_ended_however_it_did() -> None:
    run = Run()
    assert of_ranks(run.exits()) == [EndRanks("trainer-0", Life())]
    assert of_ranks(run.tick()) == [
        StartWorker(name="trainer-0", senders={"generator>trainer:prompts": 1})
    ]
    assert run.trainer.rank_hosts == ("a", "a", "b", "b") and run.trainer.life.attempt == 1


def test_it_is_killed_when_a_host_of_its_ranks_is_lost_and_starts_again_on_hosts_that_live() -> (
    None
):
    run = Run()
    found = run.take(HostLost("b", "has ended its agent"))
    assert of_ranks(found) == [Signal("trainer-0", signal.SIGKILL)]
    assert (
        run.trainer.process is ProcessState.DYING
        and run.trainer.cause == "had ranks on host 'b', which has ended its agent"
    )
    assert of_ranks(run.take(HostLost("b", "again"))) == [], "once is enough"
    assert of_ranks(run.exits()) == [EndRanks("trainer-0", Life())]
    assert not run.table.failures, "it has not failed itself"
    assert [each.name for each in run.tick() if isinstance(each, StartWorker)] == ["trainer-0"]
    assert run.trainer.rank_hosts == ("a", "a", "d", "d") and run.trainer.gpus == (0, 1, 6, 7)


def test_its_ranks_elsewhere_end_when_its_own_host_is_lost() -> None:
    run = Run()
    found = run.take(HostLost("a", "was not heard for 11 s"))
    assert EndRanks("trainer-0", Life()) in found
    run.tick()
    assert run.trainer.rank_hosts == ("b", "b", "d", "d") and run.trainer.host == "b"


def test_without_room_for_all_ranks_it_waits_for_a_host() -> None:
    run = Run("abc")
    run.take(HostLost("b", "has ended its agent"))
    run.exits()
    assert not any(isinstance(each, StartWorker) for each in run.tick())
    assert seating.no_room(run.table, run.now) == (
        "no host has room for 'trainer-0': 'trainer' needs 4 GPUs in a row on one host, or an equal"
        " part of that on each of several, but 'a' has 2 of 2 GPUs free, 'c' has 1 of 2 GPUs free;"
        " 'b' has ended its agent"
    )
    run.take(events.HostJoined(Host(name="late", cpus=4, gpus=2)))
    assert any(isinstance(each, StartWorker) for each in run.tick())
    assert run.trainer.rank_hosts == ("a", "a", "late", "late")


@pytest.mark.parametrize("lost", ["", "b"])
def test_the_next_scheduler_knows_where_its_ranks_are(lost: str) -> None:
    run, after = Run(), Run()
    if lost:
        run.take(HostLost(lost, "has ended its agent"))
    after.table.take_up(json.loads(to_json(run.table.to_plain())))
    assert after.trainer.rank_hosts == ("a", "a", "b", "b")
    assert [host.name for host in after.table.hosts_of(after.trainer)] == ["a", "b"]
