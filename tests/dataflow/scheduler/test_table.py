"""What is known of a worker over its attempts, its deadlines and its faults, as plain values."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from small_table import small_table

from dataflow.folder.faults import FILE, Faults, describe_faults, read_faults, restarts
from dataflow.limits import Limits
from dataflow.scheduler import recovery
from dataflow.scheduler.recovery import overdue
from dataflow.scheduler.table import (
    Failure,
    Membership,
    ProcessState,
    Table,
    WorkerRecord,
    together,
)
from dataflow.system.files import to_json
from dataflow.worker.messages import Heartbeat, NodeReport, Start
from transport.life import Life


def heartbeat(rows: int, busy: float, ended: bool = False) -> Heartbeat:
    report = NodeReport(
        status={"tokens": 10 * rows, "queue": 3},
        seconds={"busy": busy, "waiting": 1.0, "blocked": 0.0, "starved": 0.0},
        rows_in=rows,
        rows_out=2 * rows,
        ended=ended,
        blocked=True,
    )
    return Heartbeat(life=Life(), nodes={"node": report}, edges={"e": (1, 2)})


def stuck(**seconds: float) -> Heartbeat:
    return Heartbeat(life=Life(), nodes={}, **seconds)  # type: ignore[arg-type]


def worker(process: ProcessState = ProcessState.READY, **more: Any) -> WorkerRecord:
    return WorkerRecord(name="w-0", worker="w", replica=0, nodes=("node",), process=process, **more)


def test_sums_of_a_worker_never_go_backwards_over_its_attempts() -> None:
    record = worker()
    seen = []
    for attempt in range(3):
        for rows in (0, 4, 9):
            record.heartbeat = heartbeat(rows, rows / 2)
            seen.append(record.told["nodes"]["node"])
        record.fall("died")
        seen.append(record.told["nodes"]["node"])
        record.life = Life(attempt=attempt + 1)
        record.fork(1.0, 0)
    for key in ("rows_in", "rows_out"):
        values = [report[key] for report in seen]
        assert values == sorted(values) and values[-1] == 27 * (1 if key == "rows_in" else 2)
    assert [report["seconds"]["busy"] for report in seen] == sorted(
        report["seconds"]["busy"] for report in seen
    )
    assert seen[-1]["status"]["tokens"] == 270


def test_how_things_stand_is_what_the_attempt_under_way_says() -> None:
    found = together(together({}, heartbeat(5, 1.0, ended=True)), heartbeat(1, 1.0))["nodes"][
        "node"
    ]
    assert (found["status"]["queue"], found["ended"], found["blocked"]) == (3, False, True)
    away = together(together({}, heartbeat(5, 1.0, ended=True)), None)["nodes"]["node"]
    assert (away["rows_in"], away["ended"], away["blocked"]) == (5, False, False)


def test_failures_of_an_attempt_count_by_cause_after_it() -> None:
    first, second = heartbeat(5, 1.0), heartbeat(1, 1.0)
    first.nodes["node"].status.update({"failed": 3, "failed_hung": 3, "retried": 1})
    second.nodes["node"].status.update({"failed": 1, "failed_raised": 1})
    status = together(together({}, first), second)["nodes"]["node"]["status"]
    assert {
        name: status[name] for name in status if name.startswith("failed") or name == "retried"
    } == {
        "failed": 4,
        "failed_hung": 3,
        "failed_raised": 1,
        "retried": 1,
    }


@pytest.mark.parametrize(
    "key", ["does_not_apply", "decode_steps", "decode_16_rollouts", "decode_16_s"]
)
def test_what_each_process_counts_from_0_is_added_up_over_attempts(key: str) -> None:
    first, second = heartbeat(5, 1.0), heartbeat(1, 1.0)
    first.nodes["node"].status[key] = 5
    second.nodes["node"].status[key] = 2
    assert together(together({}, first), second)["nodes"]["node"]["status"][key] == 7


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, "died (SIGKILL)"),
        (3, "ended with status 3"),
        (0, "ended with status 0"),
        (None, "for an unknown reason"),
    ],
)
def test_an_end_is_told_by_its_signal_or_its_status(status: int | None, said: str) -> None:
    assert said in recovery.how(status)


def table(**more: Any) -> Table:
    return small_table(limits=LIMITS, **more)


LIMITS = Limits(hang_s=15.0, stuck_s=600.0, asleep_s=120.0, start_s=300.0)


@pytest.mark.parametrize(
    ("record", "now", "said"),
    [
        (worker(), 15.0, None),
        (worker(), 16.0, "not answered for 16 s"),
        (worker(heartbeat=stuck(turned_s=601.0)), 1.0, "stuck in one slice of work for 601 s"),
        (worker(heartbeat=stuck(turned_s=599.0)), 1.0, None),
        (
            worker(heartbeat=stuck(turned_s=130.0, asleep_s=121.0)),
            1.0,
            "computed nothing for 121 s",
        ),
        (worker(heartbeat=stuck(turned_s=500.0, asleep_s=119.0)), 1.0, None),
        (worker(ProcessState.STARTING), 59.0, None),
        (worker(ProcessState.STARTING), 61.0, "while it started"),
        (worker(ProcessState.DOWN), 1e6, None),
        (worker(ProcessState.ENDING), 1e6, None),
        (worker(ProcessState.DYING, cause="failed: so", dying_since=10.0), 14.0, None),
        (worker(ProcessState.DYING, cause="failed: so", dying_since=10.0), 16.0, "failed: so"),
    ],
)
def test_a_worker_is_killed_when_it_is_silent_or_stuck_for_too_long_in_the_life_it_is_in(
    record: WorkerRecord, now: float, said: str | None
) -> None:
    found = overdue(table(begun=True), record, now)
    assert found is None if said is None else found is not None and said in found


def test_a_restart_has_the_deadline_of_a_start() -> None:
    record = worker(life=Life(attempt=1))
    record.fork(50.0, 0)
    assert overdue(table(begun=True), record, 349.0) is None
    assert "not ready within 300 s" in (overdue(table(begun=True), record, 351.0) or "")


def test_a_table_survives_its_encoding_but_for_what_is_of_this_scheduler_alone() -> None:
    before = table(begun=True)
    before.workers = {
        "w-0": worker(
            process=ProcessState.DOWN,
            membership=Membership.LEAVING,
            life=Life(1, 2),
            gpus=(1, 2),
            cause="died",
            lasting=True,
            earlier=json.loads(to_json(together({}, heartbeat(3, 1.0)))),
            restart_at=7.5,
            at_work_since=3.0,
            delay_s=0.5,
            addresses={"e": "at"},
            senders={"a-0", "b-0"},
            unconfirmed={7: "a-0"},
            wired=True,
            may_miss_ends=True,
            drained=True,
            pid=9,
            heard_at=5.0,
            deferred=[Start()],
            is_reachable=False,
        )
    }
    before.wishes, before.last_ticket, before.schedule = {"w": 2}, 7, [(3, {"w": 1})]
    before.failures, before.made, before.progressed_at = [Failure("w-0", 1, "died", 2.0)], 4, 1.5
    after = table()
    after.take_up(json.loads(to_json(before.to_plain())))
    assert to_json(after.to_plain()) == to_json(before.to_plain()) and after.begun
    of_this = {"pid": 0, "heard_at": 0.0, "deferred": [], "is_reachable": True}
    assert after.workers["w-0"] == dataclasses.replace(before.workers["w-0"], **of_this)


def test_every_fault_is_a_line_of_its_own_with_how_it_ended(tmp_path: Path) -> None:
    now = [10.0]
    said: list[str] = []
    faults = Faults(str(tmp_path), lambda: now[0], said, wall=lambda: 1e9 + now[0])
    faults.recovered("a-0")
    faults.noticed("a-0", "died (SIGKILL)", 0, heard_at=9.5)
    now[0] = 10.25
    faults.recovered("a-0")
    assert said == ["worker a-0 died (SIGKILL), restarted after 0.2 s"]
    faults.noticed("a-0", "died (SIGSEGV)", 1, heard_at=10.25, rollouts=7)
    faults.noticed("a-0", "failed: so", 2, heard_at=10.0)
    faults.noticed("b-0", "died (SIGKILL)", 0, heard_at=10.0)
    assert restarts(tmp_path) == 1
    faults.close()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert lines[0] == {
        "at": 1e9 + 10.0,
        "worker": "a-0",
        "cause": "died (SIGKILL)",
        "attempt": 0,
        "noticed_s": 0.5,
        "rollouts_again": 0,
        "recovered_s": 0.25,
    }
    told = [(line["worker"], line["attempt"], line["recovered_s"]) for line in lines]
    assert told[1:] == [("a-0", 1, None), ("a-0", 2, None), ("b-0", 0, None)]
    assert describe_faults(read_faults(tmp_path))[:2] == [
        "a-0 died (SIGKILL): noticed after 0.5 s, back after 0.2 s",
        "a-0 died (SIGSEGV): noticed after 0.0 s, not back, 7 rollouts drawn again",
    ]
    assert restarts(tmp_path) == 1


def test_workers_that_fell_with_their_host_are_one_fault_for_people() -> None:
    def line(
        worker: str,
        at: float,
        rollouts: int,
        back: float | None,
        cause: str = "was on host 'b', ...",
    ) -> Any:
        told = {
            "worker": worker,
            "cause": cause,
            "noticed_s": 6.04,
            "rollouts_again": rollouts,
            "recovered_s": back,
        }
        return {"at": at, "attempt": 0, **told}

    lines = [
        line("a-0", 1.0, 0, 2.0),
        line("g-0", 1.1, 3, 4.0),
        line("g-1", 1.2, 1, None, "died (SIGKILL)"),
    ]
    assert describe_faults(lines) == [
        (
            "a-0, g-0 was on host 'b', ...: noticed after 6.0 s, back after 4.0 s, 3 rollouts drawn"
            " again"
        ),
        "g-1 died (SIGKILL): noticed after 6.0 s, not back, 1 rollout drawn again",
    ]
    assert len(describe_faults([line("a-0", 1.0, 0, 2.0), line("a-0", 100.0, 0, 2.0)])) == 2
    assert describe_faults([{"worker": "a-0"}]) == ["a-0 None: noticed after 0.0 s, not back"]


def test_a_disk_that_refuses_a_line_is_told_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    faults = Faults(str(tmp_path / "gone"), lambda: 0.0, said)
    faults.noticed("a-0", "died (SIGKILL)", 0, heard_at=0.0)
    faults.recovered("a-0")
    assert said[0].startswith("worker a-0 died (SIGKILL), restarted") and FILE in said[1]
    faults.noticed("a-0", "died (SIGKILL)", 1, heard_at=0.0)
    faults.close()
    assert len(said) == 2, "one word for each file"


def test_a_run_without_faults_has_no_restarts_and_no_book(tmp_path: Path) -> None:
    Faults(str(tmp_path), lambda: 0.0, []).close()
    assert restarts(tmp_path) == 0 and not (tmp_path / FILE).exists()
