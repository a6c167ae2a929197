"""A scheduler that takes another's place: whoever is at work stays, all others are started again or are done."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_control import Play, PlayedDesk

from dataflow.folder.faults import FILE
from dataflow.scheduler.control import Limits
from dataflow.scheduler.failover import Successor
from dataflow.worker.host import Settings


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path, monkeypatch).begin()


def left_by(play: Play) -> dict[str, Any]:
    play.run.handover.write()
    found: dict[str, Any] = json.loads((play.desk.folder / "scheduler-0.json").read_text())
    return found


def successor(
    play: Play, left: dict[str, Any], change: Callable[[dict[str, dict[str, Any]]], None] = lambda handed: None
) -> Successor:
    """Takes over from a run that is played; change: what has become of its workers meanwhile, by name."""
    desk = PlayedDesk()
    handed = {
        name: {
            "name": name, "pid": 1, "alive": True, "status": None,
            "settings": {**state.settings.to_plain(), "control": desk.address},
        }
        for name, state in play.run.workers.items()
    }  # fmt: skip
    change(handed)
    desk.handed, desk.alone_s, desk.number = list(handed.values()), 2.5, 1  # type: ignore[attr-defined]
    settings = Settings(folder=str(play.folder))
    made = Successor(play.run.graph, play.run.plan, settings, desk, left, limits=Limits(), clock=lambda: play.now)  # type: ignore[arg-type]
    made.start()
    return made


def states(run: Successor) -> dict[str, str]:
    return {name: state.state for name, state in run.workers.items()}


def test_whoever_was_at_work_stays_so_and_hears_again_what_it_may_have_missed(begun: Play) -> None:
    run = successor(begun, left_by(begun))
    assert set(states(run).values()) == {"ready"}
    desk: Any = run._desk
    assert desk.spawned == [] and desk.killed == []
    assert sorted(name for name, word in desk.sent if word["kind"] == "start") == sorted(begun.NAMES)
    assert ("held_out-0", {"kind": "tell", "node": "held_out", "message": {"evaluate": 0}}) in desk.sent
    assert desk.stays == (Limits().adopt_s, Limits().drain_s, Limits().silent_s)
    (line,) = [json.loads(text) for text in (begun.folder / FILE).read_text().splitlines()]
    assert (line["worker"], line["noticed_s"]) == ("scheduler", 2.5)


def test_one_that_died_meanwhile_is_started_again_under_its_next_number(begun: Play) -> None:
    def change(handed: dict[str, dict[str, Any]]) -> None:
        handed["generator-0"] |= {"alive": False, "status": -signal.SIGKILL}

    run = successor(begun, left_by(begun), change)
    desk: Any = run._desk
    assert states(run)["generator-0"] == "down"
    begun.now += 1.0
    run.turn(0.0)
    assert desk.spawned == [("generator-0", 1)]


def test_one_that_was_not_at_work_is_ended_so_that_it_is_started_again(begun: Play) -> None:
    left = left_by(begun)
    left["workers"]["eval-0"]["state"] = "starting"
    run = successor(begun, left)
    desk: Any = run._desk
    assert states(run)["eval-0"] == "dying" and desk.killed == [("eval-0", signal.SIGKILL)]


def test_one_that_no_forkserver_ever_saw_is_started_for_the_first_time(begun: Play) -> None:
    left = left_by(begun)
    left["workers"]["eval-0"]["state"] = "forked"
    run = successor(begun, left, lambda handed: handed.pop("eval-0"))
    assert states(run)["eval-0"] == "down" and run.workers["eval-0"].cause == "was never started"


def test_workers_that_had_ended_when_all_was_done_are_missed_by_nobody(begun: Play) -> None:
    left = left_by(begun)
    left["conductor"]["phase"] = "over"

    def change(handed: dict[str, dict[str, Any]]) -> None:
        for event in handed.values():
            event |= {"alive": False, "status": 0}

    run = successor(begun, left, change)
    assert run.conductor.over and set(states(run).values()) == {"gone"}
