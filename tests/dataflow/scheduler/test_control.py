"""What the scheduler does when workers die, hang or fail: a server plays the workers, the clock is
moved by hand.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from opened import closed, opened

from dataflow import Graph, Model
from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.folder.faults import FILE
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.runtime import RunSettings
from dataflow.scheduler import control
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import Client
from dataflow.scheduler.events import Received, RunBegins
from dataflow.scheduler.progress import ProgressWatch
from dataflow.scheduler.requests import TellFacts
from dataflow.scheduler.table import ProcessState
from dataflow.system.messages import MessageError
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import Settings
from dataflow.worker.messages import (
    ALONE,
    TO_SCHEDULER,
    Bye,
    Confirmed,
    Failed,
    FromWorker,
    Heard,
    Heartbeat,
    Hello,
    NodeCommand,
    NodeReport,
    Ready,
    Stacks,
    Start,
    Wire,
)
from transport.life import Life


class PlayedServer:
    """Takes down what the scheduler does; says what the test has put in."""

    FOLDER: ClassVar = Path()
    number, lives, alone_s = 0, False, 0.0
    sockets: ClassVar = ()

    def __init__(self, *args: Any) -> None:
        self.folder, self.address, self.requests = self.FOLDER, "ipc:///sockets/control", ""
        self.left, self.keys = self.folder, None
        self.received: list[Received] = []
        self.requested: list[tuple[Client, Any]] = []
        self.handed: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.sent: list[tuple[str, Any]] = []
        self.spawned: list[tuple[str, int]] = []
        self.heavy: list[bool] = []
        self.settings: dict[str, Any] = {}
        self.killed: list[tuple[str, int]] = []
        self.closed = False
        self.refused: list[str] = []
        self.waited: Callable[[float], None] = lambda seconds: None

    def wait(self, wait_s: float) -> tuple[list[Any], list[Any], list[Any]]:
        self.waited(wait_s)
        received, self.received = self.received, []
        requested, self.requested = self.requested, []
        events, self.events = self.events, []
        return received, requested, events

    def drain(self, wait_s: float) -> list[Any]:
        received, self.received = self.received, []
        return received

    def reply(self, to: Client, reply: Any) -> None:
        """Nobody reads it."""

    def send(self, name: str, message: Any, host: str = "") -> None:
        self.sent.append((name, message))

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        self.stays = (wait_s, end_s, silent_s)

    def check(self) -> None:
        """Nobody has taken its place."""

    def refuse(self, who: str, why: str) -> None:
        self.refused.append(who)

    def place(self, host: str) -> dict[str, str]:
        return {"control": self.address, "sockets": str(self.folder)}

    def spawn(self, name: str, settings: Any, heavy: bool, keeps: bool) -> None:
        self.spawned.append((name, settings["life"].attempt))
        self.heavy.append(heavy)
        self.settings[name] = settings
        self.events.append({"event": "started", "name": name, "pid": 1, "status": None})

    def kill(self, name: str, number: int) -> None:
        self.killed.append((name, number))

    def close(self) -> None:
        self.closed = True


class Play:
    """A run whose workers are played."""

    NAMES = ("prompts-0", "held_out-0", "generator-0", "trainer-0", "eval-0")
    INLETS: ClassVar = {
        "generator": ("prompts>generator:prompts", "held_out>generator:held_out"),
        "trainer": ("generator>trainer:prompts",),
        "eval": ("generator>eval:held_out",),
    }

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        monkeypatch.setattr(control, "ControlServer", PlayedServer)
        monkeypatch.setattr(PlayedServer, "FOLDER", folder)
        graph, model = Graph("test"), Model("policy")
        generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
        trainer(generator(graph.source(FakePrompts())))
        FakeEvaluate(every_steps=10)(generator(graph.source(FakePrompts(name="held_out"))))
        graph.feedback(trainer.weights, generator, max_staleness=1)
        self.now, self.folder = 100.0, folder
        made = plan(graph, Devices(cpus=2))
        self.run = Scheduler(
            graph,
            made,
            Settings(folder=str(folder), run=RunSettings(limits=Limits(**limits))),
            clock=lambda: self.now,
        )
        self.server: PlayedServer = self.run._server  # type: ignore[assignment]

    def begin(self) -> "Play":
        def play(seconds: float) -> None:
            self.now += seconds
            for name in self.NAMES:
                self.say(name, Hello, pid=1, addresses=self.inlets(name))
                self.say(name, Ready)

        self.server.waited = play
        self.run.start()
        self.server.waited = self.pass_time
        assert sorted(self.server.spawned) == [(name, 0) for name in sorted(self.NAMES)]
        self.server.spawned.clear()
        self.server.sent.clear()
        return self

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def inlets(self, name: str) -> dict[str, str]:
        return {edge: f"{edge}@{name}" for edge in self.INLETS.get(name.removesuffix("-0"), ())}

    def say(
        self, name: str, kind: Callable[..., FromWorker], attempt: int | None = None, **more: Any
    ) -> None:
        record = self.run.table.workers.get(name)
        made = Life(attempt=attempt or 0) if record is None or attempt is not None else record.life
        self.server.received.append(Received(name, kind(life=made, **more)))

    def heartbeat(
        self, name: str, rows: int = 0, attempt: int | None = None, status: Any = None, **more: Any
    ) -> None:
        report = NodeReport(
            status=status or {},
            seconds={"busy": 1.0 * rows, "waiting": 0.0, "blocked": 0.0, "starved": 0.0},
            rows_in=rows,
            rows_out=rows,
            ended=False,
            blocked=False,
        )
        self.say(name, Heartbeat, attempt, nodes={name.removesuffix("-0"): report}, **more)

    def all_heartbeats(self) -> None:
        for record in self.run.table:
            if record.process is ProcessState.READY:
                self.heartbeat(record.name)

    def exits(self, name: str, status: int = -signal.SIGKILL) -> None:
        self.server.events.append({"event": "exited", "name": name, "pid": 1, "status": status})

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.run.turn(0.0)

    def to(self, name: str) -> list[Any]:
        """What was said to a worker since the last time, but for answers to heartbeats."""
        found = [
            message
            for to, message in self.server.sent
            if to == name and not isinstance(message, Heard)
        ]
        self.server.sent = [(to, message) for to, message in self.server.sent if to != name]
        return found

    def restart(self, name: str, wait_s: float = 0.25) -> None:
        """From its death to its return."""
        self.turn(wait_s)
        self.say(name, Hello, pid=2, addresses=self.inlets(name))
        self.turn()
        self.say(name, Ready)
        self.turn()

    def faults(self) -> list[Any]:
        return [json.loads(line) for line in (self.folder / FILE).read_text().splitlines()]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Play]:
    return lambda **limits: Play(tmp_path, monkeypatch, **limits)


# Restarts


def test_a_worker_that_died_is_started_again_with_the_next_attempt_and_hears_all_it_needs(
    play: Any,
) -> None:
    run = play().begin()
    run.exits("held_out-0")
    run.turn()
    assert run.server.spawned == []
    run.turn(0.24)
    assert run.server.spawned == []
    run.turn(0.01)
    assert run.server.spawned == [("held_out-0", 1)]
    run.say("held_out-0", Hello, pid=2, addresses={})
    run.turn()
    receivers = {"held_out>generator:held_out": ["held_out>generator:held_out@generator-0"]}
    assert run.to("held_out-0") == [Wire(addresses=receivers)]
    run.say("held_out-0", Ready)
    run.turn()
    evaluate = NodeCommand("held_out", {"evaluate": 0, "again": True})
    assert run.to("held_out-0") == [evaluate, Start()]
    (fault,) = run.faults()
    assert (fault["worker"], fault["cause"], fault["attempt"]) == (
        "held_out-0",
        "died (SIGKILL)",
        0,
    )
    assert fault["recovered_s"] == 0.25
    assert run.run.notices == ["worker held_out-0 died (SIGKILL), restarted after 0.2 s"]


def test_a_receiver_that_died_is_started_again_for_as_many_senders_as_it_has(play: Any) -> None:
    run = play().begin()
    run.exits("generator-0")
    run.turn()
    run.restart("generator-0")
    assert run.server.settings["generator-0"]["senders"] == dict.fromkeys(
        Play.INLETS["generator"], 1
    )
    wire, start = run.to("generator-0")
    assert wire.addresses == {
        "generator>trainer:prompts": ["generator>trainer:prompts@trainer-0"],
        "generator>eval:held_out": ["generator>eval:held_out@eval-0"],
    }
    assert start == Start()


def test_a_worker_that_failed_is_started_again_once_its_process_is_gone(play: Any) -> None:
    run = play().begin()
    run.say("trainer-0", Failed, message="no memory")
    for _ in range(4):
        run.turn(1.0)
        run.all_heartbeats()
    assert run.server.spawned == [] and run.server.killed == []
    run.exits("trainer-0", status=1)
    run.turn()
    run.all_heartbeats()
    run.restart("trainer-0")
    assert run.server.spawned == [("trainer-0", 1)]
    assert run.faults()[0]["cause"] == "failed: no memory"


def test_a_worker_that_failed_and_does_not_end_is_killed(play: Any) -> None:
    run = play().begin()
    run.say("trainer-0", Failed, message="no memory")
    run.turn()
    run.all_heartbeats()
    run.turn(6.0)
    assert run.server.killed == [("trainer-0", signal.SIGKILL)]


def test_a_failure_that_a_restart_does_not_mend_ends_the_run_at_once(play: Any) -> None:
    run = play().begin()
    run.say("trainer-0", Failed, message="reward() in mine.py:3 returned nan", lasting=True)
    run.turn()
    run.exits("trainer-0", status=1)
    with pytest.raises(
        RunError, match="mine.py:3 returned nan; a restart would not mend that"
    ) as found:
        run.turn()
    assert not isinstance(found.value, WorkerDied) and run.server.spawned == []


@pytest.mark.parametrize("said", [{}, {"lasting": False}])
def test_any_other_failure_is_worth_a_restart(play: Any, said: dict[str, Any]) -> None:
    run = play().begin()
    run.say("trainer-0", Failed, message="no memory", **said)
    run.turn()
    run.exits("trainer-0", status=1)
    run.turn()
    run.all_heartbeats()
    run.restart("trainer-0")
    assert run.server.spawned == [("trainer-0", 1)]


def test_what_a_worker_said_before_it_ended_is_its_cause_also_when_its_end_is_noticed_first(
    play: Any,
) -> None:
    run = play().begin()
    run.exits("trainer-0", status=1)
    waited = run.server.waited
    run.server.wait = lambda seconds: ([], [], [run.server.events.pop(0)])  # the end comes first
    run.say("trainer-0", Failed, message="no memory")
    run.run.turn(0.0)
    del run.server.wait
    assert run.server.waited is waited
    run.restart("trainer-0")
    assert run.faults()[0]["cause"] == "failed: no memory"


def test_nobody_is_killed_for_a_silence_in_which_the_scheduler_itself_was_stopped(
    play: Any,
) -> None:
    run = play().begin()
    run.turn(3600.0)
    run.turn(10.0)
    assert run.server.killed == []
    run.turn(10.0)
    assert sorted(name for name, _ in run.server.killed) == sorted(Play.NAMES)


@pytest.mark.parametrize(
    ("turned_s", "silent_s", "cause"),
    [
        (0.0, 15.5, "has not answered for 16 s"),
        (601.0, 0.5, "was stuck in one slice of work for 601 s"),
    ],
)
def test_a_worker_that_hangs_or_is_stuck_is_killed_and_started_again_when_it_is_gone(
    turned_s: float, silent_s: float, cause: str, play: Any
) -> None:
    run = play().begin()
    run.heartbeat("generator-0", turned_s=turned_s)
    run.turn()
    for _ in range(2):
        assert run.server.killed == [] or turned_s
        run.now += silent_s / 2
        for name in Play.NAMES:
            if name != "generator-0":
                run.heartbeat(name)
        run.turn()
    assert run.server.killed == [("generator-0", signal.SIGKILL)] and run.server.spawned == []
    run.heartbeat("generator-0")  # it was on its way, and makes the silence no shorter
    run.turn()
    run.exits("generator-0")
    run.turn()
    run.restart("generator-0")
    assert run.server.spawned == [("generator-0", 1)]
    (fault,) = run.faults()
    assert fault["cause"] == cause and fault["noticed_s"] == pytest.approx(silent_s)


def test_the_last_words_of_an_attempt_count_no_more(play: Any) -> None:
    run = play().begin()
    run.exits("generator-0")
    run.turn()
    run.say("generator-0", Failed, message="too late")
    run.turn()
    run.restart("generator-0")
    run.say("generator-0", Failed, attempt=0, message="too late")
    run.say("generator-0", Ready, attempt=0)
    run.heartbeat("generator-0", 7, attempt=0)
    run.turn()
    assert run.run.table.workers["generator-0"].process is ProcessState.READY
    assert run.run.heartbeats["generator-0"]["nodes"] == {}


def test_words_for_one_that_is_away_wait_until_it_is_back_and_are_said_once(play: Any) -> None:
    run = play().begin()
    run.exits("prompts-0")
    run.turn()
    run.to("prompts-0")
    run.heartbeat("eval-0", status={"round": 0})
    run.turn()
    assert run.run.table.run.phase == "training" and run.to("prompts-0") == []
    run.restart("prompts-0")
    told = [message.message for message in run.to("prompts-0") if isinstance(message, NodeCommand)]
    assert told == [{"pause": False}]


def test_sums_of_what_workers_did_do_not_go_backwards(play: Any) -> None:
    run = play().begin()
    run.heartbeat("generator-0", 8)
    run.turn()
    run.exits("generator-0")
    run.turn()
    assert run.run.heartbeats["generator-0"]["member"] == "restarting"
    assert run.run.heartbeats["generator-0"]["nodes"]["generator"]["rows_in"] == 8
    run.restart("generator-0")
    run.heartbeat("generator-0", 3)
    run.turn()
    found = run.run.heartbeats["generator-0"]
    assert (found["member"], found["nodes"]["generator"]["rows_in"]) == ("live", 11)
    assert found["nodes"]["generator"]["seconds"]["busy"] == 11.0


def test_a_replica_that_the_plan_wants_from_a_step_on_has_the_whole_time_of_a_start_to_join(
    play: Any,
) -> None:
    run = play(start_s=50.0).begin()
    run.run.table.schedule = [(0, {"generator": 2})]
    run.turn()
    assert run.server.spawned == [("generator-1", 0)]
    for _ in range(6):
        run.all_heartbeats()
        run.turn(8.0)
    with pytest.raises(
        DeadlineError, match=r"waited 50 s for 'generator-1' to join, .* its process to say hello"
    ):
        run.turn(8.0)


# The end of patience, and ends of the run


def test_a_worker_that_fails_again_and_again_ends_the_run_with_every_cause_named(play: Any) -> None:
    run = play(patience=Patience(of_one=3)).begin()
    run.exits("generator-0")
    run.turn()
    run.restart("generator-0")
    run.exits("generator-0", status=3)
    run.turn()
    run.turn(0.5)
    run.say("generator-0", Failed, message="no such model")  # at its restart's start
    run.turn()
    run.exits("generator-0", status=1)
    with pytest.raises(WorkerDied) as raised:
        run.turn()
    for said in (
        "'generator-0' failed 3 times",
        "died (SIGKILL)",
        "ended with status 3",
        "failed: no such model",
    ):
        assert said in str(raised.value)
    run.run.close()
    assert [fault["recovered_s"] is None for fault in run.faults()] == [False, True, True]


def test_light_workers_are_asked_for_before_those_that_wait_for_torch(play: Any) -> None:
    assert play().begin().server.heavy == [False] * 3 + [True] * 2


def test_a_worker_that_dies_again_and_again_before_all_were_ready_once_ends_the_run(
    play: Any,
) -> None:
    run = play()
    run.run._apply(RunBegins())
    with pytest.raises(
        WorkerDied, match=r"'generator-0' failed 5 times .*died \(SIGKILL\) \(5 times\)"
    ):
        for _ in range(100):
            run.exits("generator-0")
            run.turn()
            run.pass_time(1.0)
    assert [attempt for name, attempt in run.server.spawned if name == "generator-0"] == [
        0,
        1,
        2,
        3,
        4,
    ]


# The end of patience, and ends of the run


@pytest.mark.parametrize("error", ["WorkerDied", "ValueError"])
def test_of_what_fails_before_all_were_ready_once_only_a_process_that_died_is_tried_again(
    play: Any, error: str
) -> None:
    run = play()
    run.run._apply(RunBegins())
    run.say("generator-0", Failed, message="rank 1 died (SIGKILL)", error=error)
    if error == "ValueError":
        with pytest.raises(RunError, match="rank 1 died"):
            run.turn()
        return
    run.turn()
    run.exits("generator-0", 1)
    run.turn()
    run.pass_time(1.0)
    run.turn()
    assert run.server.spawned[-1] == ("generator-0", 1)


def test_a_worker_that_dies_as_the_run_is_to_end_before_it_began_ends_it(play: Any) -> None:
    run = play()
    run.run._apply(RunBegins())
    run.run.wish_drain()
    run.exits("generator-0")
    with pytest.raises(
        WorkerDied, match=r"'generator-0' \(generator\) died \(SIGKILL\) .*logs/generator-0\.log"
    ):
        run.turn()
        run.turn()


def test_a_worker_that_fails_before_all_were_ready_once_ends_the_run_with_its_reason(
    play: Any,
) -> None:
    run = play()
    run.run._apply(RunBegins())
    run.say("generator-0", Failed, message="no such model")
    with pytest.raises(RunError, match="worker 'generator-0' failed: no such model"):
        run.turn()


def test_a_restart_does_not_begin_while_the_run_is_ending(play: Any) -> None:
    run = play().begin()
    run.exits("generator-0")
    run.turn()
    run.run.wish_drain()
    run.exits("prompts-0")
    run.turn(0.1)
    for _ in range(5):
        run.all_heartbeats()
        run.turn(1.0)
    assert run.server.spawned == []
    run.run.close()
    assert {fault["worker"]: fault["recovered_s"] for fault in run.faults()} == {
        "generator-0": None,
        "prompts-0": None,
    }


def test_a_trainer_that_dies_while_the_run_is_ending_ends_it_and_says_what_is_good(
    play: Any,
) -> None:
    run = play().begin()
    run.run.wish_drain()
    run.turn()
    run.exits("trainer-0")
    with pytest.raises(WorkerDied, match=r"'trainer-0' .*died.*its last checkpoint is good"):
        run.turn()


def test_a_trainer_that_was_done_when_it_ended_alone_is_missed_by_nobody(play: Any) -> None:
    """The scheduler was stopped meanwhile, and hears of all of it at once."""
    run = play().begin()
    run.run.wish_drain()
    run.turn()
    run.heartbeat("trainer-0", status={"step": 3, "done": 1})
    run.exits("trainer-0", ALONE)
    run.turn()
    assert (
        run.run.table.run.over and run.run.table.workers["trainer-0"].process is ProcessState.GONE
    )


def test_a_trainer_that_ended_alone_and_was_not_done_is_started_again(play: Any) -> None:
    run = play().begin()
    run.heartbeat("trainer-0", status={"step": 3, "done": 1}, alone=True)
    run.exits("trainer-0", ALONE)
    run.turn()
    run.turn(0.25)
    assert run.server.spawned == [("trainer-0", 1)] and not run.run.table.run.over


def test_a_trainer_that_waits_for_its_restart_when_the_run_is_to_end_ends_it(play: Any) -> None:
    run = play().begin()
    run.exits("trainer-0")
    run.turn()
    run.run.wish_drain()
    with pytest.raises(WorkerDied, match=r"'trainer-0' .*died.*its last checkpoint is good"):
        run.turn()


def test_closing_waits_for_nobody_who_has_ended_or_cannot_hear(play: Any) -> None:
    run = play(stop_s=10.0).begin()

    def wait(seconds: float) -> None:
        run.now += seconds
        for name in ("prompts-0", "eval-0", "held_out-0"):
            run.exits(name, status=0)

    run.exits("generator-0")
    run.say("trainer-0", Failed, message="so")
    run.turn()
    run.server.waited, before = wait, run.now
    run.run.close()
    assert run.server.closed and run.now - before < 1.0


def test_closing_waits_no_longer_than_the_limit_for_one_that_goes_on(play: Any) -> None:
    run = play(stop_s=10.0).begin()
    before = run.now
    run.run.close()
    assert run.server.closed and 10.0 <= run.now - before < 10.2


# Messages that are well formed and mean nothing

REPORT = NodeReport(
    status={"step": 1, "done": 0, "version": 1},
    seconds={"busy": 1.0, "waiting": 0.0, "blocked": 0.0, "starved": 0.0},
    rows_in=1,
    rows_out=1,
    ended=False,
    blocked=False,
)


JUNK = (
    None,
    -1,
    2**63,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "?zz",
    b"\xff",
    True,
    [],
    [1],
    {},
    {"a": 1},
    {"status": {}},
)


def mutated(rng: np.random.Generator, value: Any) -> Any:
    """A message's values with something else in some place."""
    if rng.random() < 0.15:
        return JUNK[int(rng.integers(len(JUNK)))]
    if isinstance(value, dict):
        return {name: mutated(rng, each) for name, each in value.items()}
    return value


def test_what_several_workers_note_as_they_become_ready_is_told_once(play: Any) -> None:
    run = play().begin()
    for name in ("generator-0", "trainer-0"):
        run.server.received.append(Received(name, Ready(life=Life(), notes=("kernels are off",))))
    run.turn()
    assert run.run.notices.count("kernels are off") == 1


def test_no_message_of_anybody_raises_through_the_scheduler(play: Any) -> None:
    run, rng, heard = play().begin(), np.random.default_rng(14), 0
    watch = ProgressWatch(
        run.run.table.graph, run.run.table.plan, RunFolder(run.folder), 10, lambda: run.now
    )
    for _ in range(800):
        node = ("trainer", "generator", "eval", "prompts")[int(rng.integers(4))]
        messages: list[FromWorker] = [
            Heartbeat(
                life=Life(), nodes={node: REPORT}, edges={"a>b:c": (1, 2)}, at=node, at_s=1.0
            ),
            Hello(life=Life(), pid=7, addresses={"a": "b"}),
            Confirmed(life=Life(), ticket=5),
            Stacks(life=Life(), threads=[]),
            Ready(life=Life()),
            Bye(life=Life(attempt=1)),
        ]
        protocol, kind, plain = opened(
            TO_SCHEDULER.encode(messages[int(rng.integers(len(messages)))])
        )
        try:
            found = TO_SCHEDULER.decode(closed([protocol, kind, mutated(rng, plain)]))
        except MessageError:
            continue
        heard += 1
        run.server.received.append(Received(f"{node}-0" if rng.random() < 0.9 else "?zz", found))
        if rng.random() < 0.1:
            run.server.requested.append((Client(b"?zz"), TellFacts()))
        run.turn()
        watch.note(run.run.table.run, run.run.heartbeats)
        watch.snapshot()
    assert heard > 100 and run.server.refused
