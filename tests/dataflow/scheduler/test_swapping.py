"""One scorer in the place of another in a live run: a server plays workers and trials, the clock is
moved by hand.
"""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rigs.graphs import fake_graph
from test_control import Play, PlayedServer

from dataflow import Graph, Model, scorer
from dataflow.errors import DataflowError
from dataflow.folder.faults import FILE
from dataflow.folder.live_changes import Swap
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.scheduler import live_changes
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import Client
from dataflow.scheduler.events import Drain, Received
from dataflow.scheduler.requests import Reply, SwapNode, Swapped
from dataflow.scheduler.swap_requests import LAST_WORD_S, READY_S
from dataflow.scheduler.table import ProcessState, Table
from dataflow.settable import RESTART, Settable
from dataflow.system.messages import Refused
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import Settings
from dataflow.worker.messages import Failed, Heartbeat, Tried
from dataflow.worker.swapped import TRIAL_S
from transport.life import Life

SOMEBODY = Client(b"somebody")


STRICT = "rewards:strict"


KNOBS = {"weight": Settable(value=1.5, at=RESTART, kind=float).to_plain()}


"""Of the operator there."""


class _Server(PlayedServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replies: list[Reply] = []
        self.dismissed: list[str] = []

    def reply(self, to: Client, reply: Reply) -> None:
        assert to == SOMEBODY
        self.replies.append(reply)

    def dismiss(self, name: str) -> None:
        self.dismissed.append(name)


class Swapping(Play):
    """A run with a scorer whose workers are played."""

    NAMES = ("prompts-0", "generator-0", "reward-0", "trainer-0")
    INLETS: ClassVar = {
        "generator": ("prompts>generator:prompts",),
        "reward": ("generator>reward:prompts",),
        "trainer": ("reward>trainer:prompts",),
    }

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        _Server.FOLDER = folder
        self.played = self.follow(_Server())

    def follow(self, server: _Server, left: Any = None) -> _Server:
        graph = fake_graph()
        made = plan(graph, Devices(cpus=2))
        self.server = server
        self.run = Scheduler(
            graph,
            made,
            Settings(folder=str(self.folder)),
            clock=lambda: self.now,
            server=server,
            snapshot=left,  # type: ignore[arg-type]
        )
        return server

    @property
    def trial(self) -> str:
        """The process that tries an operator now."""
        name = list(self.played.settings)[-1]
        assert name.startswith("swap.trial-")
        return name

    @property
    def replies(self) -> list[Reply]:
        return self.played.replies

    def ask(self, node: str = "reward", reference: str = STRICT) -> None:
        self.server.requested.append((SOMEBODY, SwapNode(node, reference, "anna@here")))
        self.turn()

    def answers(self, error: str = "") -> None:
        """The trial has come to its end."""
        wanted = Swap(**self.played.settings[self.trial]["tries"])
        found = (
            None
            if error
            else dataclasses.replace(
                wanted, file="rewards.py", source="text", digest="0123456789abcdef", knobs=KNOBS
            )
        )
        self.server.received.append(
            Received(self.trial, Tried(life=Life(), swap=found, error=error))
        )
        self.turn()

    def told(self, name: str) -> list[str]:
        """What an attempt was started with."""
        return [each["reference"] for each in self.played.settings[name]["swaps"]]


@pytest.fixture
def live(tmp_path: Path) -> Swapping:
    made = Swapping(tmp_path)
    made.begin()
    return made


def has_no_faults(live: Swapping) -> bool:
    return not (live.folder / FILE).exists()


def test_an_operator_is_tried_first_and_then_its_worker_is_started_again_with_it(
    live: Swapping,
) -> None:
    live.ask()
    assert (
        live.server.killed == []
        and live.replies == []
        and live.played.settings[live.trial]["worker"] == "swap.trial"
    )
    live.answers()
    assert live.server.killed == [("reward-0", signal.SIGKILL)] and live.played.dismissed == [
        live.trial
    ]
    live.exits("reward-0")
    live.turn()
    live.turn()
    assert live.server.spawned[-1] == ("reward-0", 1) and live.told("reward-0") == [STRICT]
    assert live.replies == []
    live.restart("reward-0", 0.0)
    live.turn()
    assert live.replies == [
        Swapped("'reward' is 'rewards:strict' from now on (sha256 0123456789ab), after step 0")
    ]
    assert live.run.notices == [
        "'reward' is 'rewards:strict' from now on (sha256 0123456789ab), after step 0"
    ]
    assert has_no_faults(live) and not live.run.table.failures


def test_what_does_not_fit_is_refused_and_nothing_has_changed(live: Swapping) -> None:
    live.ask()
    live.answers("'rewards:strict' writes text")
    assert live.replies == [Refused("'rewards:strict' writes text (the run goes on as it was)")]
    assert live.server.killed == [] and not live.run.table.swaps.made
    live.ask()  # and the next may be asked for
    live.answers()
    assert live.server.killed == [("reward-0", signal.SIGKILL)]


def test_a_module_that_is_not_imported_in_time_is_refused_and_its_process_ended(
    live: Swapping,
) -> None:
    live.ask()
    live.turn(TRIAL_S - 0.1)
    live.all_heartbeats()
    assert live.replies == []
    live.turn(0.2)
    (reply,) = live.replies
    assert isinstance(reply, Refused) and "was not imported and checked within 15 s" in reply.error
    assert live.played.dismissed == [live.trial] and live.server.killed == []
    late = Tried(life=Life(), swap=Swap(number=1, node="reward", reference=STRICT), error="")
    live.server.received.append(Received(live.trial, late))
    live.turn()
    assert live.server.killed == [] and live.server.refused == [], "it comes too late"


def test_a_module_that_ends_its_process_is_refused(live: Swapping) -> None:
    live.ask()
    live.exits(live.trial, -signal.SIGSEGV)
    live.turn()
    live.turn(LAST_WORD_S + 0.1)
    (reply,) = live.replies
    assert (
        isinstance(reply, Refused)
        and "importing 'rewards:strict' ended the process that tried it" in reply.error
    )


def test_the_last_word_of_a_trial_counts_though_its_end_was_heard_before(live: Swapping) -> None:
    live.ask()
    live.exits(live.trial, 0)
    live.turn()
    live.answers()
    assert live.server.killed == [("reward-0", signal.SIGKILL)]


def test_a_trials_heartbeats_are_no_workers(live: Swapping) -> None:
    live.ask()
    live.server.received.append(Received(live.trial, Heartbeat(life=Life(), nodes={})))
    live.turn()
    assert live.server.refused == []


def test_a_worker_that_cannot_start_with_it_is_started_with_the_one_before(live: Swapping) -> None:
    live.ask()
    live.answers()
    live.exits("reward-0")
    live.turn()
    live.turn()
    live.say("reward-0", Failed, message="no such lexicon", lasting=True)
    live.turn()
    live.exits("reward-0")
    live.turn()
    live.turn()
    assert live.server.spawned[-1] == ("reward-0", 2) and live.told("reward-0") == []
    live.restart("reward-0", 0.0)
    live.turn()
    (reply,) = live.replies
    assert (
        isinstance(reply, Refused)
        and "could not start with 'rewards:strict': no such lexicon" in reply.error
    )
    assert has_no_faults(live) and live.run.table.hopeless is None


def test_a_worker_that_is_killed_while_it_starts_with_it_is_started_with_it_again(
    live: Swapping,
) -> None:
    live.ask()
    live.answers()
    for _ in range(2):
        live.exits("reward-0")
        live.turn()
        live.turn(0.5)
    assert live.server.spawned[-1] == ("reward-0", 2) and live.told("reward-0") == [STRICT]
    live.restart("reward-0", 0.0)
    assert [fault["cause"] for fault in live.faults()] == ["died (SIGKILL)"], (
        "the second death was none of a swap"
    )
    live.exits("reward-0")
    live.turn()
    live.turn(0.5)
    assert live.told("reward-0") == [STRICT], "so is every later one"
    live.exits("generator-0")
    live.turn()
    live.turn(0.5)
    assert live.told("generator-0") == []


def test_two_swaps_at_once_are_refused(live: Swapping) -> None:
    live.ask()
    live.ask()
    assert live.replies == [
        Refused("'reward' is just being swapped for 'rewards:strict'; ask again when that is done")
    ]
    live.answers()
    live.ask()
    assert "is just being started with another operator" in live.replies[-1].error  # type: ignore[union-attr]


def test_who_asks_is_told_when_the_worker_takes_long_to_start(live: Swapping) -> None:
    live.ask()
    live.answers()
    live.turn(READY_S + 0.1)
    (reply,) = live.replies
    assert isinstance(reply, Swapped) and "has not started within 20 s" in reply.text


@pytest.mark.parametrize(
    "when", ["before it is told to end", "before it has ended", "when it has ended"]
)
def test_a_scheduler_that_takes_over_in_the_midst_of_a_swap_brings_it_to_its_end(
    live: Swapping, when: str
) -> None:
    live.ask()
    live.answers()
    if when == "when it has ended":
        live.exits("reward-0")
        live.run._note(live.server.events.pop())
    live.run.snapshot.write()
    left = json.loads((live.folder / "scheduler-0.json").read_text())
    server = _Server()
    alive = {name: name != "reward-0" or when != "when it has ended" for name in live.NAMES}
    server.handed = [
        {
            "name": name,
            "pid": 1,
            "alive": alive[name],
            "status": None if alive[name] else -signal.SIGKILL,
            "settings": {"life": [0, 0], "keys": {}},
        }
        for name in live.NAMES
    ]
    server.number, live.played = 1, server  # type: ignore[misc]
    live.follow(server, left)
    live.run.start()
    if alive["reward-0"]:
        assert server.killed == [("reward-0", signal.SIGKILL)]
        live.exits("reward-0")
        live.turn()
    live.turn()
    assert server.spawned == [("reward-0", 1)] and live.told("reward-0") == [STRICT]
    live.restart("reward-0", 0.0)
    assert [fault["worker"] for fault in live.faults()] == ["scheduler"]


def test_a_run_that_was_resumed_goes_on_with_what_was_swapped_in(tmp_path: Path) -> None:
    live = Swapping(tmp_path)
    live.run = Scheduler(
        live.run.table.graph,
        live.run.table.plan,
        clock=lambda: live.now,
        server=live.server,  # type: ignore[arg-type]
        settings=Settings(
            folder=str(tmp_path), swaps=(Swap(number=4, node="reward", reference=STRICT),)
        ),
    )
    live.begin()
    assert live.told("reward-0") == [STRICT] and live.told("generator-0") == []
    live.ask()
    assert live.played.settings[live.trial]["tries"]["number"] == 5


def test_a_swap_that_the_end_of_the_run_overtakes_is_told(live: Swapping) -> None:
    live.ask()
    live.answers()
    live.run._apply(Drain())
    live.exits("reward-0")
    live.turn()
    assert live.replies == [Refused("the run has ended before 'reward-0' could start again")]
    assert has_no_faults(live)


# What cannot be


def refused(table: Table, node: str) -> str:
    with pytest.raises(DataflowError) as error:
        live_changes.check_swap(table, node)
    return str(error.value)


@pytest.fixture(scope="module")
def table() -> Table:
    @scorer(isolate=False)
    def reward(completion: str) -> float:
        return 1.0

    g, model = Graph("all"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(reward(generator(g.source(FakePrompts()))))
    FakeEvaluate(every_steps=10)(reward(generator(g.source(FakePrompts(name="held_out")))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    made = Table(graph=g, plan=plan(g, Devices(cpus=2)), begun=True)
    for record in made:
        record.process = ProcessState.READY
    return made


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (
            "generator",
            "'generator' generates: rollouts under way and the weights that drew them are its own",
        ),
        ("trainer", "'trainer' trains: weights and the optimiser's state are its own"),
        ("prompts", "'prompts' is a source: which groups are issued"),
        ("eval", "'eval' is a FakeEvaluate, which may hold what it was given earlier"),
    ],
)
def test_what_is_no_scorer_is_refused_with_what_could_be_and_what_to_do(
    table: Table, node: str, why: str
) -> None:
    said = refused(table, node)
    assert (
        why in said
        and "scorers and filters alone, here ['reward']; end it with dataflow stop" in said
    )


def test_a_node_that_is_not_there_is_refused_with_the_nearest_one(table: Table) -> None:
    assert "did you mean 'reward'?; name one of these" in refused(table, "rewards")


def test_a_worker_that_is_away_and_a_run_that_ends_take_nothing_in(table: Table) -> None:
    record = live_changes.worker_of(table, "reward")
    record.process = ProcessState.DOWN
    assert f"'{record.name}', which runs 'reward', is down and not at work" in refused(
        table, "reward"
    )
    record.process, table.run.draining = ProcessState.READY, True
    assert "the run is ending" in refused(table, "reward")
    table.run.draining = False
    live_changes.check_swap(table, "reward")
