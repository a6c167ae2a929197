"""The doctor's pieces: states from heartbeats, stacks, errors of a log, processes, and the report
itself.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from rigs.machine import wait_until

from dataflow.doctor.facts import gather
from dataflow.doctor.history import History, marks
from dataflow.doctor.report import examine, last_error, report
from dataflow.errors import DeadlineError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.runtime import RunSettings
from dataflow.scheduler.requests import ask_for_facts
from dataflow.scheduler.stall_watch import StallWatch
from dataflow.scheduler.table import ProcessState
from dataflow.system import processes, stacks
from dataflow.system.processes import machine
from dataflow.system.stacks import StackFrame, Thread
from dataflow.worker.host import Settings
from transport.life import Life

# States from heartbeats


def beat(node: str = "trainer", at: str = "", **told: Any) -> dict[str, Any]:
    seconds = {
        "busy": 0.0,
        "waiting": 0.0,
        "blocked": 0.0,
        "starved": 0.0,
        **told.pop("seconds", {}),
    }
    plain = {"status": {}, "rows_in": 0, "rows_out": 0, "ended": False, "blocked": False}
    return {
        "nodes": {node: {**plain, "seconds": seconds, **told}},
        "at": at,
        "at_s": 0.0,
        "edges": {},
    }


def states(*beats: dict[str, Any]) -> list[tuple[str, float]]:
    """State and its seconds after each of the beats, which come a second apart."""
    history, found = History(), []
    for now, told in enumerate(beats):
        history.note({"trainer-0": {"heartbeat": told}}, float(now))
        node = history.plain(float(now))["trainer-0"]["trainer"]
        found.append((node["state"], node["for_s"]))
    return found


def test_a_node_is_in_the_state_in_which_it_spent_most_of_the_last_seconds_and_since_then() -> None:
    idle = [beat(seconds={"waiting": float(at)}) for at in range(1, 4)]
    busy = [beat(seconds={"waiting": 3.0, "busy": float(at)}) for at in range(1, 6)]
    found = states(*idle, *busy)
    assert found[:3] == [("waiting", 0.0), ("waiting", 1.0), ("waiting", 2.0)]
    assert found[-1] == ("working", found[-1][1]) and 1.0 < found[-1][1] < 5.0


def test_one_that_waits_has_waited_since_it_last_worked_if_only_for_a_moment() -> None:
    worked = [0.0, 0.0, 0.01, 0.01, 0.01]
    found = states(
        *[beat(seconds={"waiting": float(at), "busy": busy}) for at, busy in enumerate(worked)]
    )
    assert found[-1] == ("waiting", 2.0)


def test_a_slice_that_has_not_ended_counts_as_work_though_no_second_of_it_is_told() -> None:
    assert states(*[beat(at="trainer")] * 4)[-1] == ("working", 3.0)


def test_one_that_has_ended_or_says_so_is_done_and_one_that_is_paused_is_so() -> None:
    assert states(beat(ended=True))[-1][0] == "done"
    assert states(beat(status={"done": 1}))[-1][0] == "done"
    assert states(beat(paused=True))[-1][0] == "paused"


@pytest.mark.parametrize(
    "told", [{"rows_in": 1}, {"rows_out": 1}, {"status": {"tokens": 9}}, {"status": {"version": 2}}]
)
def test_rows_tokens_steps_and_versions_are_movement_and_seconds_are_not(
    told: dict[str, Any],
) -> None:
    still = {"trainer-0": {"heartbeat": beat()}}
    assert marks(still) == marks({"trainer-0": {"heartbeat": beat(seconds={"busy": 5.0})}})
    assert marks(still) != marks({"trainer-0": {"heartbeat": beat(**told)}})


# Stacks


def test_stacks_show_where_every_other_thread_is() -> None:
    held, there = threading.Event(), threading.Event()

    def wait_for_the_answer() -> None:
        there.set()
        held.wait(30.0)

    thread = threading.Thread(target=wait_for_the_answer, name="waiter")
    thread.start()
    try:
        assert there.wait(30.0)
        found = {each.name: each for each in stacks.read(stacks.take())}
    finally:
        held.set()
        thread.join()
    assert "MainThread" not in found, "the thread that takes them is left out"
    own = stacks.own(found["waiter"])
    assert own[-1].function.endswith("wait_for_the_answer") and own[-1].file == __file__


def test_the_short_form_leaves_installed_packages_out_unless_there_is_nothing_else() -> None:
    ours, theirs = (
        StackFrame(file="/a/run.py", line=1, function="f"),
        StackFrame(file="/x/site-packages/y.py", line=2, function="g"),
    )
    assert stacks.own(Thread(name="t", frames=(ours, theirs))) == (ours,)
    assert stacks.own(Thread(name="t", frames=(theirs,))) == (theirs,)


# Logs

TRACE = """2026 level='info' event='started'
Traceback (most recent call last):
  File "/a/dataflow/loop.py", line 12, in turn
    self.runtime.work()
  File "/x/site-packages/torch/nn.py", line 3, in f
    boom()
ValueError: no room

After it."""


def test_the_last_traceback_is_its_last_line_and_the_innermost_own_place() -> None:
    found = last_error("trainer-0.log", TRACE)
    assert found is not None
    assert (found.text, found.where, found.lines_ago) == (
        "ValueError: no room",
        "/a/dataflow/loop.py:12",
        2,
    )


def test_a_later_error_line_counts_more_than_an_earlier_traceback() -> None:
    found = last_error("a.log", TRACE + "\ntimestamp='x' level='error' event='lost'")
    assert found is not None and "event='lost'" in found.text


@pytest.mark.parametrize("text", ["", "level='info' event='started'", "all is well\n"])
def test_a_log_without_errors_has_none(text: str) -> None:
    assert last_error("a.log", text) is None


def test_a_traceback_that_was_cut_is_told_as_one() -> None:
    found = last_error("a.log", 'Traceback (most recent call last):\n  File "/a.py", line 1, in f')
    assert found is not None and found.text == "a traceback without an end"


# Processes


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = (
        "import faulthandler, signal, sys, time; log = open(sys.argv[1],"
        " 'w');faulthandler.register(signal.SIGUSR1, file=log); log.write('up\\n'); log.flush();"
        " time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")]) as process:
        wait_until(
            lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text(),
            30.0,
            "the sleeper",
        )
        yield process
        process.kill()


def test_a_stopped_process_is_seen_as_one_and_an_ended_one_as_none(
    sleeper: subprocess.Popen[bytes],
) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(
        lambda: processes.look([sleeper.pid], 0.0)[sleeper.pid].state == "T", 30.0, "the stop"
    )
    sleeper.kill()
    sleeper.wait()
    assert processes.look([sleeper.pid], 0.0)[sleeper.pid].state == ""


def test_a_process_that_answers_no_message_still_dumps_its_stacks(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert "most recent call first" in processes.dump(sleeper.pid, tmp_path / "log")


def test_a_process_that_has_a_file_of_the_run_open_is_found(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert sleeper.pid in [pid for pid, _ in processes.using(tmp_path.resolve())]
    assert processes.using(tmp_path / "elsewhere") == []


# Processes


# Reports


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "t")
    names = {"prompts": "source", "trainer": "sink"}
    edge = {"from": "prompts", "to": "trainer", "plane": "data", "source": "prompts"}
    made.write_json(
        "graph.json", {"nodes": [{"name": n, "kind": k} for n, k in names.items()], "edges": [edge]}
    )
    made.write_json(
        "config.json", {"max_staleness": {"trainer": 0}, "leading": ["trainer"], "on_demand": []}
    )
    with Ledger.create(made.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(0, "a"), (1, "b"), (2, "c")])
        ledger.commit_step("trainer", 1, version=1, source="prompts", trained=[0])
        ledger.advance("prompts", [2], "scored")
    return made


def said(**told: Any) -> dict[str, Any]:
    """What a scheduler says of two workers."""
    plain = {
        "pid": 0,
        "state": "ready",
        "silent_s": 0.1,
        "threads": [],
        "threads_s": 0.0,
        "restarts": 0,
        "cause": "",
    }
    beats = {node: beat(node, **told.get(node, {})) for node in ("prompts", "trainer")}
    return {
        "pid": 0,
        "phase": "training",
        "draining": False,
        "step": 1,
        "steps": 2,
        "workers": {
            f"{node}-0": {**plain, "nodes": [node], "heartbeat": each}
            for node, each in beats.items()
        },
    }


def test_the_awaited_group_is_the_first_that_is_not_at_the_trainer(folder: RunFolder) -> None:
    facts = gather(folder, said(), during_s=0.0)
    assert (facts.awaited["trainer"].group_id, facts.awaited["trainer"].state) == (1, "issued")


def test_the_ledger_is_asked_what_is_awaited_once_nothing_has_moved_for_as_long_as_is_said(
    folder: RunFolder,
) -> None:
    moved, stands = (
        gather(folder, {**said(), "still_s": each}, during_s=0.0, still_s=2.0)
        for each in (1.9, 2.0)
    )
    assert moved.awaited == {} and set(stands.awaited) == {"trainer"}


def test_the_trainers_own_word_on_the_next_group_counts_more_and_the_worker_that_has_it_is_found(
    folder: RunFolder,
) -> None:
    told = said(trainer={"status": {"next": 2}}, prompts={"oldest": {"prompts": 2}})
    found = gather(folder, told, during_s=0.0).awaited["trainer"]
    assert (found.group_id, found.state, found.node, found.worker) == (
        2,
        "scored",
        "prompts",
        "prompts-0",
    )


def test_a_report_has_every_part(folder: RunFolder) -> None:
    (folder.logs / "trainer-0.log").write_text(TRACE)
    fault = {
        "at": 0,
        "worker": "trainer-0",
        "cause": "died (SIGKILL)",
        "attempt": 0,
        "noticed_s": 0.1,
        "recovered_s": 2,
    }
    (folder.path / "faults.jsonl").write_text(f'{json.dumps(fault)}\n{{"worker": "tor')
    text = report(folder, gather(folder, said(), during_s=0.0))
    for part in (
        "who waits for whom",
        "nodes",
        "workers",
        "stacks",
        "ValueError: no room",
        "back after 2.0 s",
        '{"worker": "tor',
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 200


def test_of_a_run_that_is_over_the_folder_tells(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1, "loss": 0.5})
    text = examine(folder.path, ask_for_facts)
    assert "it did not come to its end" in text and "none has a file of this run open" in text
    assert "3 groups issued = 1 trained + 0 dropped + 2 in flight (1 issued, 1 scored)" in text
    assert '"loss": 0.5' in text


def test_a_scheduler_that_was_killed_is_told_as_that(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    folder.write_json("control.json", {"address": "ipc:///nowhere", "pid": ended.pid})
    assert f"its scheduler (pid {ended.pid}) has ended without an end of the run" in examine(
        folder.path, ask_for_facts
    )


# Within the scheduler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """A watch of a table among fakes: what the run and the workers are, the test says."""

    folder: RunFolder
    clock: Clock = field(default_factory=Clock)
    asked: list[tuple[str, float]] = field(default_factory=list)
    workers: dict[str, Any] = field(default_factory=dict)
    run: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(phase="training", draining=False, step=1)
    )
    limits: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(stall_s=20.0, slice_s=100.0)
    )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.workers.values())

    def stall_watch(self) -> StallWatch:
        settings = Settings(folder=str(self.folder.path), run=RunSettings(steps=2))
        for node in ("prompts", "trainer"):
            self.workers[f"{node}-0"] = SimpleNamespace(
                name=f"{node}-0",
                nodes=[node],
                pid=0,
                process=ProcessState.READY,
                state="ready",
                cause="",
                life=Life(),
                heard_at=0.0,
                told=beat(node),
                stacks=None,
                host="",
                machine=machine(),
            )
        table: Any = self
        return StallWatch(
            table, lambda name, _: self.asked.append((name, self.clock.now)), settings, self.clock
        )

    def watch(self, seconds: float, change: Callable[[], object] = lambda: None) -> list[str]:
        """What is said over so many seconds."""
        watch, heard = self.stall_watch(), []
        while self.clock.now < seconds:
            self.clock.now += 1.0
            for each in self.workers.values():
                each.heard_at = self.clock.now
            change()
            heard += watch.look()
        return heard


def test_a_run_that_stands_still_is_warned_of_once_and_then_ended_with_a_report(
    folder: RunFolder,
) -> None:
    heard = Watched(folder).watch(39.0)
    assert len(heard) == 1 and heard[0].startswith("nothing has moved for 20 s: ")
    with pytest.raises(
        DeadlineError,
        match=r"nothing has moved for 4\d s: .*doctor-.*\.txt says who waits for whom",
    ):
        Watched(folder).watch(60.0)
    assert "who waits for whom" in next(folder.path.glob("doctor-*.txt")).read_text()


def test_a_report_that_the_disk_refuses_does_not_hide_why_a_run_is_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.scheduler.stall_watch.time.strftime", lambda form: "now")
    (folder.path / "doctor-now.txt").mkdir()
    with pytest.raises(
        DeadlineError,
        match=r"nothing has moved for 4\d s: .*doctor-now.txt' failed: Is a directory",
    ):
        Watched(folder).watch(60.0)


def test_a_run_that_moves_is_left_alone(folder: RunFolder) -> None:
    watched = Watched(folder)

    def move() -> None:
        watched.workers["trainer-0"].told = beat("trainer", rows_in=int(watched.clock.now))

    assert watched.watch(90.0, move) == [] and watched.asked == []


@pytest.mark.parametrize("busy", ["slice", "seconds", "starting"])
def test_work_without_movement_is_no_stall_before_its_own_limit(
    busy: str, folder: RunFolder
) -> None:
    watched = Watched(folder)

    def work() -> None:
        trainer = watched.workers["trainer-0"]
        if busy == "slice":
            trainer.told = beat("trainer", at="trainer")
        elif busy == "seconds":
            trainer.told = beat("trainer", seconds={"busy": watched.clock.now})
        else:
            trainer.state = "starting"

    assert watched.watch(99.0, work) == []


@pytest.mark.parametrize("change", [{"draining": True}, {"phase": "starting"}, {"phase": "over"}])
def test_what_has_limits_of_its_own_is_not_watched(
    change: dict[str, Any], folder: RunFolder
) -> None:
    watched = Watched(folder)
    vars(watched.run).update(change)
    assert watched.watch(90.0) == [] and watched.asked == []


def test_a_wish_asks_for_stacks_and_then_writes_a_report_with_them(folder: RunFolder) -> None:
    watched = Watched(folder)
    watch = watched.stall_watch()
    watch.wish()
    heard: list[str] = []
    while not heard and watched.clock.now < 10.0:
        watched.clock.now += 0.5
        threads = [{"name": "MainThread", "frames": [["/a/b.py", 7, "work"]]}]
        watched.workers["trainer-0"].stacks = (watched.clock.now, threads)
        heard = watch.look()
    assert watched.asked == [("prompts-0", 0.5), ("trainer-0", 0.5)] and watched.clock.now == 1.5
    path = next(folder.path.glob("doctor-*.txt"))
    assert heard[0].startswith(f"wrote {path}: ") and "a/b.py:7 work" in path.read_text()


def test_a_number_of_a_process_on_another_machine_is_not_looked_up_here(folder: RunFolder) -> None:
    watched = Watched(folder)
    watch = watched.stall_watch()
    for name, where in (("prompts-0", "another machine"), ("trainer-0", machine())):
        watched.workers[name].pid, watched.workers[name].machine = os.getpid(), where
        watched.workers[name].host = "h1"
    facts = gather(folder, watch.answer(), during_s=0.0)
    assert facts.workers["prompts-0"].process is None
    assert facts.workers["trainer-0"].process is not None
    lines = report(folder, facts).splitlines()
    assert any(line.split()[:5] == ["prompts-0", "h1", "ready", "-", "-"] for line in lines)


def test_an_answer_is_plain_values_that_facts_are_made_of(folder: RunFolder) -> None:
    watch = Watched(folder).stall_watch()
    facts = gather(folder, msgpack.unpackb(msgpack.packb(watch.answer())), during_s=0.0)
    assert list(facts.workers) == ["prompts-0", "trainer-0"] and facts.steps == 2
