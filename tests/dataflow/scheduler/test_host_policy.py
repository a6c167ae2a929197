"""Hosts that are lost, come back and join, told as plain values: who falls, where it starts again,
what counts.
"""

import dataclasses
import json
import signal
from collections.abc import Sequence

import pytest
from test_scaling import addresses, planned

from dataflow.errors import DataflowError, DeadlineError, RunError
from dataflow.limits import Limits, Patience
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.seats import Seat
from dataflow.scheduler import events, seating
from dataflow.scheduler.events import (
    Clear,
    Command,
    FaultNoticed,
    HostHeard,
    HostJoined,
    HostLost,
    Send,
    StartWorker,
)
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import Membership, ProcessState, Table
from dataflow.system.files import to_json
from dataflow.worker import messages
from dataflow.worker.messages import Moved, Start, Wire
from transport.life import Life

A, B, C = (Host(name=name, cpus=4, gpus=2) for name in "abc")


SITS = {
    "prompts-0": "a",
    "reward-0": "a",
    "trainer-0": "a",
    "generator-0": "a",
    "generator-1": "b",
    "stage-0": "b",
}


GPUS = {"generator": (0, 2), "trainer": (1,)}


LIMITS = Limits(hang_s=10.0, host_s=60.0, patience=Patience(first_s=0.0, of_one=3))


class Run:
    """A run over two hosts whose agents and workers are played."""

    def __init__(self, hosts: Sequence[Host] = (A, B)) -> None:
        graph, made = planned(Devices.of(hosts), gpus={"generator": 2, "trainer": 1})
        made = dataclasses.replace(
            made,
            placements={
                node: dataclasses.replace(
                    placement,
                    hosts=tuple(
                        SITS[f"{placement.worker}-{replica}"]
                        for replica in range(placement.replicas)
                    ),
                    gpus=GPUS.get(node, ()),
                )
                for node, placement in made.placements.items()
            },
        )
        self.table, self.now = Table(graph=graph, plan=made, limits=LIMITS), 100.0
        self.own = addresses(graph, made)
        for number, record in enumerate(self.table):
            record.host = SITS[record.name]
            record.gpus = {"generator-0": (0,), "trainer-0": (1,), "generator-1": (2,)}.get(
                record.name, ()
            )
            record.process, record.wired, record.has_process, record.pid = (
                ProcessState.READY,
                True,
                True,
                number + 1,
            )
            record.addresses, record.received_at = self.own[record.name], record.host
        self.table.begun = True
        self.table.watched_at = self.now
        self.hear()

    def hear(self, *hosts: str) -> None:
        """Agents, and the workers that are at work there, say that they live."""
        for name in hosts or list(self.table.hosts):
            self.take(HostHeard(name))
            for record in self.table:
                if record.host == name and record.process is ProcessState.READY:
                    self.says(record.name, messages.Heartbeat(life=record.life, nodes={}))

    def take(self, event: events.Event) -> list[Command]:
        return reduce(self.table, event, self.now)

    def says(self, name: str, message: messages.FromWorker) -> list[Command]:
        return self.take(events.Received(name, message, self.table.workers[name].host))

    def tick(self, seconds: float = 0.0, *heard: str) -> list[Command]:
        """Time passes second by second, in which these hosts are heard."""
        found: list[Command] = []
        for _ in range(max(1, int(seconds))):
            self.now += min(seconds, 1.0)
            if heard:
                self.hear(*heard)
            found += self.take(events.Tick())
        return found

    def back(self, name: str, address: str = "elsewhere") -> list[Command]:
        """An attempt says hello, and is ready."""
        life = self.table.workers[name].life
        self.take(events.ProcessEvent(name, "started", host=self.table.workers[name].host))
        own = dict.fromkeys(self.own[name], address)
        found = self.says(name, messages.Hello(life=life, pid=9, addresses=own))
        return found + self.says(name, messages.Ready(life=life))


def spawned(commands: list[Command]) -> list[str]:
    return [command.name for command in commands if isinstance(command, StartWorker)]


def error(commands: list[Command]) -> DataflowError:
    (found,) = [command.error for command in commands if isinstance(command, events.EndRun)]
    return found


def told(commands: list[Command]) -> str:
    return "\n".join(command.text for command in commands if isinstance(command, events.NotifyUser))


def test_a_host_that_is_not_heard_is_lost_and_its_workers_start_as_soon_as_there_is_room() -> None:
    run = Run((A, B, C))
    seconds = {"busy": 0.0, "waiting": 0.0, "blocked": 0.0, "starved": 0.0}
    report = messages.NodeReport(
        status={"begun": 5}, seconds=seconds, rows_in=0, rows_out=0, ended=False, blocked=False
    )
    run.says("generator-1", messages.Heartbeat(life=Life(), nodes={"generator": report}))
    assert run.tick(10.0, "a", "c") == [], (
        "and nobody is blamed who cannot be heard because of his host"
    )
    found = run.tick(1.0, "a", "c")
    fell = [command for command in found if isinstance(command, FaultNoticed)]
    assert [(each.worker, each.cause) for each in fell] == [
        (name, "was on host 'b', which was not heard for 11 s")
        for name in ("generator-1", "stage-0")
    ]
    assert [each.rollouts for each in fell] == [5, 0], "that are drawn again"
    assert spawned(found) == ["generator-1", "stage-0"] and not run.table.failures
    generator = run.table.workers["generator-1"]
    assert (generator.host, generator.gpus, generator.life.attempt) == ("c", (4,), 1)
    assert seating.device(run.table, generator) == "cuda:0"
    assert "host 'b' was not heard for 11 s; with it fell generator-1, stage-0" in told(found)


def test_a_host_that_was_silent_for_less_than_the_limit_has_lost_nothing() -> None:
    run = Run()
    assert run.tick(9.0, "a") == run.tick(20.0, "a", "b") == []
    assert all(record.life.attempt == 0 for record in run.table)


def test_whoever_was_stopped_himself_blames_no_host() -> None:
    run = Run()
    run.now += 1000.0
    assert run.tick(0.0) == [] and run.tick(9.0) == []


def test_no_word_of_a_lost_host_counts_any_more() -> None:
    run = Run((A, B, C))
    run.take(HostLost("b", "has ended its agent"))
    for moment in (None, run.tick(0.0, "a", "c")):
        before = to_json(run.table.to_plain())
        assert run.take(events.ProcessEvent("generator-1", "exited", -9, host="b")) == []
        assert run.says("stage-0", messages.Ready(life=Life())) == []
        assert run.says("stage-0", messages.Failed(life=Life(), message="so")) == []
        assert to_json(run.table.to_plain()) == before, moment
    assert run.table.workers["generator-1"].process is ProcessState.FORKED


def test_a_lost_host_that_is_back_ends_what_it_has_before_anything_is_started_there() -> None:
    run = Run()
    run.take(HostLost("b", "has ended its agent"))
    run.tick(0.0, "a")
    kept = {"generator-1": events.KeptProcess(Life(), 5, True, None)}
    assert run.take(HostJoined(B, kept)) == [Clear("b")]
    assert spawned(run.tick(1.0, "a", "b")) == [], "though it is heard"
    assert told(run.take(HostJoined(B))) == "host 'b' is back"
    assert spawned(run.tick(1.0, "a", "b")) == ["generator-1"]
    assert run.table.workers["generator-1"].gpus == (2,)


def test_without_room_a_run_says_so_goes_on_with_a_host_that_joins_or_ends_with_the_numbers() -> (
    None
):
    wanted = (
        "no host has room for 'generator-1': 'generator' needs 1 GPU on one host, but 'a' has 0 of"
        " 2 GPUs free; 'b' has ended its agent"
    )
    waits, ends = Run(), Run()
    for run in (waits, ends):
        run.take(HostLost("b", "has ended its agent"))
        found = run.tick(0.0, "a")
        assert spawned(found) == [
            "stage-0"
        ] and f"{wanted}; the run waits 60 s for a host that joins" in told(found)
        run.back("stage-0")
        assert run.tick(50.0, "a") == [], "it says so once"
    assert told(waits.take(HostJoined(C))) == "host 'c' has joined with 4 cores and 2 GPUs"
    assert spawned(waits.tick(1.0, "a", "c")) == ["generator-1"]
    assert (waits.table.workers["generator-1"].host, waits.table.workers["generator-1"].gpus) == (
        "c",
        (4,),
    )
    found = error(ends.tick(11.0, "a"))
    assert isinstance(
        found, DeadlineError
    ) and f"waited 60 s for a host that joins, as {wanted}" in str(found)


def test_the_workers_of_a_host_that_is_lost_before_all_were_ready_start_elsewhere_too() -> None:
    run = Run((A, B, C))
    run.table.begun, run.table.starts_until = False, run.now + 300.0
    run.take(HostLost("b", "has ended its agent"))
    assert spawned(run.tick(1.0, "a", "c")) == ["generator-1", "stage-0"]
    run.back("generator-1")
    assert not run.table.begun
    found = run.back("stage-0")
    started = {each.to for each in found if isinstance(each, Send) and each.message == Start()}
    assert run.table.begun and started == set(run.table.workers)


def test_a_host_that_is_lost_again_and_again_without_progress_ends_the_run() -> None:
    run = Run()
    for _ in range(2):
        run.take(HostLost("b", "has ended its agent"))
        run.tick(1.0, "a")
        run.take(HostJoined(B))
        run.tick(1.0, "a", "b")
    found = error(run.take(HostLost("b", "has ended its agent")))
    assert isinstance(found, RunError) and "host 'b' was lost 3 times" in str(found)


def test_those_that_send_to_a_worker_that_is_elsewhere_hear_where_it_was_and_is() -> None:
    run = Run((A, B, C))
    run.take(HostLost("b", "has ended its agent"))
    run.tick(0.0, "a", "c")
    found = run.back("stage-0", "tcp://c:1")
    edge = "generator>stage:prompts"
    moved = Moved(receivers={edge: "tcp://c:1"}, before={edge: ["at-stage-0"]})
    sends = [command for command in found if isinstance(command, Send)]
    assert Send("generator-0", moved) in sends and "generator-1" not in [
        each.to for each in sends
    ], "it is away itself"
    wires = [
        each.message.addresses
        for each in [c for c in run.back("generator-1") if isinstance(c, Send)]
        if isinstance(each.message, Wire)
    ]
    assert wires == [{edge: ["tcp://c:1"]}]
    again = [each for each in run.take(events.TakeOver({})) if isinstance(each, Send)]
    assert again == [], "they have not found the next scheduler"
    generator = run.table.workers["generator-0"]
    assert generator.deferred[0] == moved, "before it is asked to send there as well"


def test_the_next_scheduler_meets_a_hosts_workers_when_its_agent_joins_and_misses_others() -> None:
    left = json.loads(to_json(Run().table.to_plain()))
    run = Run()
    run.table.take_up(left)
    run.table.begun = True
    assert spawned(run.take(events.TakeOver({}))) == []
    kept = {
        name: events.KeptProcess(Life(), 5, True, None)
        for name, host in SITS.items()
        if host == "a"
    }
    kept["generator-0"] = events.KeptProcess(Life(), 5, False, -9)
    found = run.take(HostJoined(A, kept))
    assert [each.worker for each in found if isinstance(each, FaultNoticed)] == ["generator-0"]
    assert Start() in run.table.workers["trainer-0"].deferred, "what it may have missed"
    assert spawned(run.tick(1.0, "a")) == ["generator-0"]
    assert run.table.workers["stage-0"].process is ProcessState.READY, "nobody knows"
    assert "host 'b' was not heard" in told(run.tick(10.0, "a"))
    assert run.table.workers["stage-0"].life.attempt == 1


def test_a_wish_that_came_before_any_host_was_met_is_fulfilled_when_they_are() -> None:
    """Simulation, seed 19622: nobody fell, so that nobody became ready again, and the wish waited
    for ever.
    """
    left = json.loads(to_json(Run((A, B, C)).table.to_plain()))
    run = Run((A, B, C))
    run.table.take_up(left)
    run.table.begun = True
    run.take(events.TakeOver({}))
    assert spawned(run.take(events.Wish({"generator": 3}))) == []
    for host in (A, B, C):
        kept = {
            name: events.KeptProcess(Life(), 5, True, None)
            for name, where in SITS.items()
            if where == host.name
        }
        assert spawned(run.take(HostJoined(host, kept))) == []
    assert spawned(run.tick(1.0, "a", "b", "c")) == ["generator-2"]


def test_an_agent_that_finds_its_scheduler_again_tells_of_ends_that_nobody_heard_of() -> None:
    run = Run()
    kept = {
        "generator-1": events.KeptProcess(Life(), 5, False, -9),
        "stage-0": events.KeptProcess(Life(), 6, True, None),
    }
    found = run.take(HostJoined(B, kept))
    assert [each.worker for each in found if isinstance(each, FaultNoticed)] == ["generator-1"]
    assert run.table.workers["stage-0"].process is ProcessState.READY


def test_a_leaver_that_was_told_to_stop_has_left_with_its_host() -> None:
    run = Run()
    run.table.workers["generator-1"].membership = Membership.STOPPING
    run.take(HostLost("b", "has ended its agent"))
    assert run.table.workers["generator-1"].membership is Membership.LEFT
    assert spawned(run.tick(0.0, "a")) == ["stage-0"]


def test_a_newcomer_gets_the_accelerators_of_one_host_that_lives() -> None:
    run = Run((A, B, C))
    assert seating.room_for(run.table, "generator") == Seat("b", (3,))
    run.take(HostLost("b", "has ended its agent"))
    assert seating.room_for(run.table, "generator") == Seat("c", (4,))


@pytest.mark.parametrize(
    "process", [ProcessState.FORKED, ProcessState.STARTING, ProcessState.DYING]
)
def test_one_that_is_on_its_way_or_dying_falls_with_its_host_and_is_killed_by_nobody(
    process: ProcessState,
) -> None:
    run = Run((A, B, C))
    record = run.table.workers["generator-1"]
    record.process, record.dying_since = process, run.now
    found = run.tick(11.0, "a", "c")
    assert "generator-1" in spawned(found) and record.host == "c"
    killed = [
        command
        for command in found
        if isinstance(command, events.Signal) and command.number == signal.SIGKILL
    ]
    assert [command.to for command in killed] == (
        ["generator-1"] if process is ProcessState.DYING else []
    ), "at its old host"


def test_who_keeps_what_no_other_host_sees_waits_for_its_own_and_others_go_elsewhere() -> None:
    own = [dataclasses.replace(host, own_folder=True) for host in (A, B)]
    run = Run([*own, C])
    run.table.hosts["c"].is_met = True
    commands = run.take(HostLost("a", "has ended its agent"))
    commands += run.tick(2.0, "b", "c")
    spawned = {
        command.name: run.table.workers[command.name].host
        for command in commands
        if isinstance(command, StartWorker)
    }
    assert spawned.keys() == {"prompts-0", "reward-0", "generator-0"} and set(spawned.values()) <= {
        "b",
        "c",
    }
    told = " ".join(each.text for each in commands if isinstance(each, events.NotifyUser))
    assert (
        "'trainer-0' keeps on host 'a' what no other sees, and nothing else can go on with that"
        in told
    )
    ends = [
        each.error
        for each in run.tick(LIMITS.host_s + 2, "b", "c")
        if isinstance(each, events.EndRun)
    ]
    assert isinstance(ends[0], DeadlineError) and "what no other sees" in str(ends[0])


def test_a_trainer_in_the_schedulers_folder_goes_to_hosts_that_see_it() -> None:
    run = Run([A, dataclasses.replace(B, own_folder=True), C])
    run.take(HostLost("a", "has ended its agent"))
    run.tick(2.0, "b", "c")
    assert run.table.workers["trainer-0"].host == "c"


def test_a_host_that_is_back_and_sees_another_folder_than_before_gets_nothing() -> None:
    run = Run()
    run.take(HostLost("b", "has ended its agent"))
    commands = run.take(HostJoined(dataclasses.replace(B, own_folder=True)))
    assert [each.text for each in commands if isinstance(each, events.NotifyUser)] == [
        "host 'b' is back and does not see the run folder, other than before; nothing is started"
        " there: let it see what it saw, or give it another name"
    ]
    assert not run.table.hosts["b"].is_alive


def moved() -> Run:
    """A run whose host b was lost, so that its workers went to host c, and that is back."""
    run = Run((A, B, C))
    run.tick(12.0, "a", "c")
    for name in ("generator-1", "stage-0"):
        run.back(name)
    assert told(run.take(HostJoined(B))) == "host 'b' is back"
    assert run.tick(25.0, "a", "b", "c") == [], "it may be lost again"
    return run


def test_a_moved_worker_goes_back_once_its_planned_host_has_been_well_for_a_while() -> None:
    run = moved()
    found = run.tick(10.0, "a", "b", "c")
    killed = [command.to for command in found if isinstance(command, events.Signal)]
    assert killed == ["generator-1", "stage-0"]
    assert told(found) == "hosts are back for 30 s: generator-1 to 'b', stage-0 to 'b' as planned"
    for name in killed:
        assert (
            run.take(events.ProcessEvent(name, "exited", -9, host=run.table.workers[name].host))
            == []
        )
    assert spawned(run.tick(1.0, "a", "b", "c")) == ["generator-1", "stage-0"]
    assert [(run.table.workers[name].host, run.table.workers[name].gpus) for name in killed] == [
        ("b", (2,)),
        ("b", ()),
    ]
    assert not run.table.failures and run.table.hopeless is None
    for name in killed:
        run.back(name)
    assert run.tick(60.0, "a", "b", "c") == [], "all are where the plan has them"


def test_nobody_goes_back_where_what_it_had_is_anothers_or_before_all_are_at_work() -> None:
    run = moved()
    newcomer = dataclasses.replace(
        run.table.workers["generator-0"], name="generator-2", replica=2, host="b", gpus=(2,)
    )
    run.table.add(newcomer)
    assert [
        each.to for each in run.tick(10.0, "a", "b", "c") if isinstance(each, events.Signal)
    ] == ["stage-0"]
    run = moved()
    run.table.workers["trainer-0"].die("is dying", run.now)
    assert not [
        each
        for each in run.tick(10.0, "a", "b", "c")
        if getattr(each, "to", "") in ("generator-1", "stage-0")
    ]


def test_one_that_dies_elsewhere_starts_where_the_plan_has_it() -> None:
    run = moved()
    run.take(events.ProcessEvent("generator-1", "exited", -9, host="c"))
    assert spawned(run.tick(1.0, "a", "b", "c")) == ["generator-1"]
    assert run.table.workers["generator-1"].host == "b" and run.table.workers["stage-0"].host == "c"


def test_who_takes_turns_follows_the_others_though_its_own_host_is_back() -> None:
    graph, made = planned(
        Devices.of((A, B)), gpus={"generator": 2, "trainer": "generator"}, place={"trainer": "a"}
    )
    table = Table(graph=graph, plan=made, limits=LIMITS)
    trainer = table.workers["trainer-0"]
    assert (trainer.host, trainer.gpus) == ("a", (0, 1))
    for record in table:
        record.process = ProcessState.READY
    for number in range(2):  # which began again at once, while the trainer was to wait
        generator = table.workers[f"generator-{number}"]
        generator.host, generator.gpus = "b", (2 + number,)
    trainer.process, trainer.restart_at = ProcessState.DOWN, 0.0
    assert seating.seat(table, [trainer]) == [trainer]
    assert (trainer.host, trainer.gpus) == ("b", (2, 3))


def test_what_an_earlier_attempt_says_or_any_on_another_host_counts_nowhere() -> None:
    """A host that was lost comes back, and its agent passes on what its workers still say."""
    run = Run((A, B, C))
    run.table.scheduler = 2
    run.tick(12.0, "a", "c")
    record = run.table.workers["generator-1"]
    assert (record.host, record.life, record.process) == ("c", Life(2, 1), ProcessState.FORKED)
    record.is_reachable, record.deferred = False, [Start()]
    by_the_one_before = Life(1, 1)
    for life, host in ((Life(), "b"), (Life(), "c"), (by_the_one_before, "c"), (record.life, "b")):
        for message in (messages.Ready(life=life), messages.Heartbeat(life=life, nodes={})):
            assert run.take(events.Received("generator-1", message, host)) == []
    assert (
        record.process is ProcessState.FORKED
        and not record.is_reachable
        and record.deferred == [Start()]
    )
