"""Knobs of a live run that are set, and checkpoints that are asked for: a server plays workers, the
clock is moved.
"""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import fake_graph
from test_swapping import SOMEBODY, Swapping

from dataflow import scorer
from dataflow.folder.live_changes import KnobChange, Swap
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.scheduler.control import BOUNDARY_S, WRITTEN_S
from dataflow.scheduler.requests import (
    CheckpointKept,
    KeepCheckpoint,
    KnobsSet,
    Reply,
    SetKnobs,
    Swapped,
)
from dataflow.system.messages import Refused
from dataflow.worker.changed_knobs import ChangedGraph
from dataflow.worker.messages import ChangeKnobs, Heartbeat, NodeCommand, NodeReport

SECONDS = dict.fromkeys(("busy", "blocked", "waiting", "starved"), 0.0)


@scorer(isolate=False)
def scaled(completion: str, scale: float = 1.0) -> float:
    return scale * len(completion)


@pytest.fixture
def live(tmp_path: Path) -> Swapping:
    made = Swapping(tmp_path)
    made.begin()
    return made


def wish(live: Swapping, **wishes: Any) -> None:
    knobs = {place.replace("__", "."): value for place, value in wishes.items()}
    live.server.requested.append((SOMEBODY, SetKnobs(knobs, "anna@here")))
    live.turn()


def heard(live: Swapping, name: str) -> list[Any]:
    return [message for to, message in live.server.sent if to == name]


def goes_by(live: Swapping, number: int, *but: str) -> None:
    for name in live.NAMES:
        if name not in but:
            live.say(name, Heartbeat, nodes={}, changed=number)
    live.turn()


def test_a_change_is_told_to_all_and_answered_when_each_goes_by_it(live: Swapping) -> None:
    wish(live, trainer__lr=0.5)
    for name in live.NAMES:
        (message,) = [each for each in heard(live, name) if isinstance(each, ChangeKnobs)]
        (change,) = message.changes
        assert (change.node, change.knob, change.value, change.was, change.by) == (
            "trainer",
            "lr",
            0.5,
            1.0,
            "anna@here",
        )
        assert change.trainer == "trainer" and change.step == 0, (
            "the trainer says from which step on"
        )
    goes_by(live, 1, "trainer-0")
    assert live.replies == []
    goes_by(live, 1)
    assert live.replies == [KnobsSet("trainer.lr = 0.5 from now on")]
    assert live.server.killed == []
    (line,) = (
        json.loads(each) for each in (live.folder / "requests.jsonl").read_text().splitlines()
    )
    assert (
        line["request"] == "trainer.lr = 0.5" and line["by"] == "anna@here" and not line["refused"]
    )


def test_what_does_not_fit_is_refused_and_nobody_hears_of_it(live: Swapping) -> None:
    wish(live, trainer__lr="much")
    (reply,) = live.replies
    assert isinstance(reply, Refused) and "give a number (the run goes on as it was)" in reply.error
    assert not any(isinstance(message, ChangeKnobs) for _, message in live.server.sent)
    assert live.run.table.changes == []


def test_a_boundary_that_does_not_come_is_told_and_the_change_stays(live: Swapping) -> None:
    wish(live, trainer__lr=0.5)
    goes_by(live, 1, "trainer-0")
    live.turn(BOUNDARY_S / 2)
    live.all_heartbeats()
    goes_by(live, 1, "trainer-0")
    live.turn(BOUNDARY_S / 2 + 0.1)
    replies: list[Reply] = live.replies
    assert replies == [
        KnobsSet(
            "trainer.lr = 0.5 is taken in, and counts with ['trainer-0'] at the next boundary,"
            " which has not come yet"
        )
    ]
    assert len(live.run.table.changes) == 1


def test_a_worker_that_starts_again_begins_with_the_values_in_force_and_hears_of_later_ones(
    live: Swapping,
) -> None:
    wish(live, trainer__lr=0.5)
    live.exits("generator-0")
    live.turn()
    live.turn(5.0)
    assert [each["value"] for each in live.played.settings["generator-0"]["changes"]] == [0.5]
    wish(live, trainer__lr=0.25)  # it is starting, and hears nothing yet
    live.restart("generator-0", 0.0)
    live.turn()
    told = [each for each in heard(live, "generator-0") if isinstance(each, ChangeKnobs)]
    assert [change.value for change in told[-1].changes] == [0.5, 0.25]


def test_a_successor_knows_what_was_set(live: Swapping) -> None:
    wish(live, trainer__lr=0.5)
    plain = live.run.table.to_plain()
    live.run.table.changes = []
    live.run.table.take_up(json.loads(json.dumps(plain)))
    assert [(each.knob, each.value) for each in live.run.table.changes] == [("lr", 0.5)]


def swapped_in(live: Swapping) -> None:
    live.ask()
    live.answers()
    live.exits("reward-0")
    live.turn()
    live.turn()
    live.restart("reward-0", 0.0)
    live.turn()
    assert isinstance(live.replies.pop(), Swapped)


def test_a_knob_of_an_operator_that_was_swapped_in_is_set_and_its_worker_starts_again_with_it(
    live: Swapping,
) -> None:
    swapped_in(live)
    live.server.killed.clear()
    wish(live, reward__weight=2)
    assert live.server.killed == [("reward-0", signal.SIGKILL)] and live.replies == []
    (change,) = live.run.table.changes
    assert (change.knob, change.value, change.was, change.swap) == ("weight", 2.0, 1.5, 1)
    live.exits("reward-0")
    live.turn()
    live.turn()
    assert [each["value"] for each in live.played.settings["reward-0"]["changes"]] == [2.0]
    live.restart("reward-0", 0.0)
    wish(live, reward__weight=2.5)
    assert [each.was for each in live.run.table.changes] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("wishes", "why"),
    [
        (
            {"reward__weight": "much"},
            "'reward' has weight=1.5 and cannot take 'much'; give a number",
        ),
        ({"reward__scale": 2.0}, "'reward.scale' is no knob .*these may: reward.weight = 1.5"),
    ],
)
def test_what_an_operator_that_was_swapped_in_does_not_take_is_refused(
    live: Swapping, wishes: dict[str, Any], why: str
) -> None:
    swapped_in(live)
    wish(live, **wishes)
    (reply,) = live.replies
    assert isinstance(reply, Refused) and re.search(why, reply.error), reply
    assert live.run.table.changes == []


def test_what_was_set_of_an_operator_goes_with_it_and_is_no_knob_of_the_next(
    live: Swapping,
) -> None:
    swapped_in(live)
    wish(live, reward__weight=2)
    live.exits("reward-0")
    live.turn()
    live.turn()
    live.restart("reward-0", 0.0)
    live.turn()
    swapped_in(live)
    wish(live, reward__weight=3)
    assert [(each.was, each.swap) for each in live.run.table.changes] == [(1.5, 1), (1.5, 2)]


def test_a_worker_goes_by_what_was_set_of_the_operators_that_it_has() -> None:
    def set_to(number: int, value: float, swap: int) -> KnobChange:
        return KnobChange(
            number=number,
            node="reward",
            knob="scale",
            value=value,
            was=1.0,
            trainer="trainer",
            swap=swap,
        )

    graph = fake_graph(scorers=(scaled.renamed("reward"),))
    changes = (set_to(1, 2.0, 0), set_to(2, 3.0, 4))
    for swaps, value in (((), 2.0), ((Swap(number=4, node="reward", reference="m:o"),), 3.0)):
        found = ChangedGraph(
            declared=graph, plan=plan(graph, Devices(cpus=2)), changes=changes, swaps=swaps
        )
        assert (found.now().operators["reward"].knobs()["scale"], found.last) == (value, 2)


def test_a_checkpoint_is_asked_of_the_trainer_and_answered_when_it_is_there(live: Swapping) -> None:
    live.server.requested.append((SOMEBODY, KeepCheckpoint("anna@here")))
    live.turn()
    assert (
        NodeCommand("trainer", {"checkpoint": 1}) in heard(live, "trainer-0") and live.replies == []
    )
    status = {"step": 7, "asked_checkpoint": 1, "asked_step": 7}
    report = NodeReport(
        status=status, seconds=SECONDS, rows_in=0, rows_out=0, ended=False, blocked=False
    )
    live.say("trainer-0", Heartbeat, nodes={"trainer": report})
    live.turn()
    live.turn()
    assert live.replies == [CheckpointKept("'trainer' has the checkpoint of step 7")]
    live.server.requested.append((SOMEBODY, KeepCheckpoint("anna@here")))
    live.turn()
    assert NodeCommand("trainer", {"checkpoint": 2}) in heard(live, "trainer-0")
    assert live.run.table.run.commands_for("trainer") == [NodeCommand("trainer", {"checkpoint": 2})]
    live.turn(WRITTEN_S / 2)
    live.all_heartbeats()
    live.turn(WRITTEN_S / 2 + 0.1)
    assert "have not written it" in str(live.replies[-1])
