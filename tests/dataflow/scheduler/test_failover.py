"""A scheduler that takes another's place: whoever is at work stays, all others are started again or
are done.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_control import Play, PlayedServer

from dataflow.folder.faults import FILE
from dataflow.limits import Limits
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.events import Drain, Received
from dataflow.worker.host import Settings
from dataflow.worker.messages import AddReceivers, Heard, Heartbeat, Hello, NodeCommand, Start, Wire
from transport.life import Life


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path, monkeypatch).begin()


def left_by(play: Play) -> dict[str, Any]:
    play.run.snapshot.write()
    found: dict[str, Any] = json.loads((play.server.folder / "scheduler-0.json").read_text())
    return found


def of(left: dict[str, Any], name: str) -> dict[str, Any]:
    """What is left of one worker."""
    (found,) = [each for each in left["table"]["workers"] if each["name"] == name]
    return found  # type: ignore[no-any-return]


def successor(
    play: Play,
    left: dict[str, Any],
    change: Callable[[dict[str, dict[str, Any]]], None] = lambda handed: None,
) -> Scheduler:
    """Takes over from a run that is played; change: what has become of its workers meanwhile, by
    name.
    """
    server = PlayedServer()
    handed = {
        name: {
            "name": name,
            "pid": 1,
            "alive": True,
            "status": None,
            "settings": {"life": list(record.life), "keys": {}},
        }
        for name, record in play.run.table.workers.items()
    }
    change(handed)
    server.handed, server.alone_s, server.number = list(handed.values()), 2.5, 1  # type: ignore[misc]
    settings = Settings(folder=str(play.folder))
    made = Scheduler(
        play.run.table.graph,
        play.run.table.plan,
        settings,
        clock=lambda: play.now,
        server=server,
        snapshot=left,  # type: ignore[arg-type]
    )
    made.start()
    return made


def states(run: Scheduler) -> dict[str, str]:
    return {record.name: str(record.process) for record in run.table}


def test_whoever_was_at_work_stays_so_and_hears_again_what_it_may_have_missed(begun: Play) -> None:
    run = successor(begun, left_by(begun))
    assert set(states(run).values()) == {"ready"}
    server: Any = run._server
    assert server.spawned == [] and server.killed == []
    assert server.sent == [], "nobody has found this scheduler's socket"
    server.received = [Received(name, Heartbeat(life=Life(), nodes={})) for name in begun.NAMES]
    run.turn(0.0)
    assert sorted(name for name, message in server.sent if message == Start()) == sorted(
        begun.NAMES
    )
    assert ("held_out-0", NodeCommand("held_out", {"evaluate": 0})) in server.sent
    assert server.stays == (Limits().adopt_s, Limits().drain_s, Limits().silent_s)
    (line,) = [json.loads(text) for text in (begun.folder / FILE).read_text().splitlines()]
    assert (line["worker"], line["noticed_s"]) == ("scheduler", 2.5)


def test_one_that_died_meanwhile_is_started_again_under_its_next_number(begun: Play) -> None:
    def change(handed: dict[str, dict[str, Any]]) -> None:
        handed["generator-0"] |= {"alive": False, "status": -signal.SIGKILL}

    run = successor(begun, left_by(begun), change)
    server: Any = run._server
    assert states(run)["generator-0"] == "down"
    begun.now += 1.0
    run.turn(0.0)
    assert server.spawned == [("generator-0", 1)]


def test_one_that_was_not_at_work_is_ended_so_that_it_is_started_again(begun: Play) -> None:
    left = left_by(begun)
    of(left, "eval-0")["process"] = "starting"
    run = successor(begun, left)
    server: Any = run._server
    assert states(run)["eval-0"] == "dying" and server.killed == [("eval-0", signal.SIGKILL)]


def test_one_that_no_forkserver_ever_saw_is_started_for_the_first_time(begun: Play) -> None:
    left = left_by(begun)
    of(left, "eval-0")["process"] = "forked"
    run = successor(begun, left, lambda handed: handed.pop("eval-0"))
    assert (
        states(run)["eval-0"] == "down" and run.table.workers["eval-0"].cause == "was never started"
    )


def test_workers_that_had_ended_when_all_was_done_are_missed_by_nobody(begun: Play) -> None:
    left = left_by(begun)
    left["table"]["run"]["phase"] = "over"

    def change(handed: dict[str, dict[str, Any]]) -> None:
        for event in handed.values():
            event |= {"alive": False, "status": 0}

    run = successor(begun, left, change)
    assert run.table.run.over and set(states(run).values()) == {"gone"}


def test_what_is_deferred_is_sent_in_order_once_its_worker_speaks_and_not_to_its_next_attempt(
    begun: Play,
) -> None:
    run = successor(begun, left_by(begun))
    server: Any = run._server
    run._apply(Drain())
    server.received = [Received("prompts-0", Heartbeat(life=Life(), nodes={}))]
    run.turn(0.0)
    drain = NodeCommand("prompts", {"drain": True})
    received = [
        message for _, message in server.sent if not isinstance(message, Heard | AddReceivers)
    ]
    pause, go_on = (NodeCommand("prompts", {"pause": is_paused}) for is_paused in (True, False))
    assert received == [Start(), pause, drain, go_on]
    assert {name for name, _ in server.sent} == {"prompts-0"}


def test_the_next_attempt_is_sent_nothing_that_was_deferred_for_the_one_before(begun: Play) -> None:
    run = successor(begun, left_by(begun))
    server: Any = run._server
    server.events.append(
        {"event": "exited", "name": "held_out-0", "pid": 1, "status": -signal.SIGKILL}
    )
    run.turn(0.0)
    begun.now += 1.0
    run.turn(0.0)
    server.received = [Received("held_out-0", Hello(life=Life(1, 1), pid=2, addresses={}))]
    run.turn(0.0)
    assert [type(message) for name, message in server.sent if name == "held_out-0"] == [Wire]
    assert server.spawned == [("held_out-0", 1)]


def test_one_that_waits_for_its_restart_waits_no_longer_and_has_failed_once(begun: Play) -> None:
    begun.exits("generator-0")
    begun.turn()

    def change(handed: dict[str, dict[str, Any]]) -> None:
        handed["generator-0"] |= {"alive": False, "status": -signal.SIGKILL}

    run = successor(begun, left_by(begun), change)
    assert [failure.worker for failure in run.table.failures] == ["generator-0"]
    begun.now += 0.25
    run.turn(0.0)
    server: Any = run._server
    assert server.spawned == [("generator-0", 1)]
