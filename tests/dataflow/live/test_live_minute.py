"""The trace of a run's last minute: what stands in it, and where it comes from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rigs.graphs import fake_graph

from dataflow import inline, run
from dataflow.folder.faults import FILE
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import BESIDE_WORK, MINUTE, WORK, RecentSpans
from dataflow.live.command import last_minute

WALL = 1.7e9


def written(
    folder: RunFolder, process: str, spans: list[tuple[str, str, float, float]], now: float
) -> None:
    """As one process would leave them; all at once."""
    recent = RecentSpans(process, lambda: now, lambda: WALL + now)
    for span in spans:
        recent.add(*span)
    recent.write(folder)


def events(text: str, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == kind]


def test_work_details_and_rests_of_each_node_stand_in_rows_of_their_own(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    trainer = [
        ("trainer", "waiting", 0.0, 10.0),
        ("trainer", "optimizer", 10.2, 10.9),
        ("trainer", WORK, 10.0, 11.0),
    ]
    written(folder, "trainer-0", [*trainer, ("reward", BESIDE_WORK, 1.0, 2.0)], 100.0)
    written(folder, "generator-0", [("generator", WORK, 3.0, 11.5)], 100.0)
    text = last_minute(folder, lambda begin, end: [(begin + 1.0, "step 7")])
    names = {(each["name"], each["pid"], each["tid"]): each["args"] for each in events(text, "M")}
    rows = {
        (pid, tid): args["name"]
        for (name, pid, tid), args in names.items()
        if name == "thread_name"
    }
    found = {
        (each["name"], rows[each["pid"], each["tid"]]): (each["ts"], each["dur"])
        for each in events(text)
    }
    assert found == {
        ("waiting", "trainer, waits"): (0, 10_000_000),
        ("optimizer", "trainer"): (10_200_000, 700_000),
        ("trainer", "trainer"): (10_000_000, 1_000_000),
        ("generator", "generator"): (3_000_000, 8_500_000),
        (BESIDE_WORK, "reward, waits"): (1_000_000, 1_000_000),
    }
    assert [(each["name"], each["ts"], each["s"]) for each in events(text, "i")] == [
        ("step 7", 1_000_000, "g")
    ]
    assert len({pid for pid, _ in rows}) == 2


def test_a_rest_that_was_told_in_pieces_is_one_and_what_is_older_than_a_minute_is_not_there(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "test")
    recent = RecentSpans("a-0", lambda: 0.0, lambda: WALL)
    for piece in range(50):
        recent.add("a", "starved", 2.0 * piece, 2.0 * piece + 2.0)
        recent.write(folder)
    recent.add("a", "starved", 101.0, 102.0)
    recent.write(folder)
    found = [(each["ts"], each["dur"]) for each in events(last_minute(folder))]
    assert found == [(0, 58_000_000), (59_000_000, 1_000_000)]


def test_the_page_gives_it_with_steps_and_faults_and_of_a_run_without_it_the_end_of_its_trace(
    folder: RunFolder, serve: Callable[..., Any]
) -> None:
    page = serve([folder])
    assert page.json("now")["has_minute"] is False and page.get("trace?part=minute")[0] == 404
    whole = [
        {"name": "a", "ph": "X", "pid": 1, "tid": "a", "ts": at * 1e6, "dur": 1e6}
        for at in range(100)
    ]
    folder.trace.write_text(
        json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *whole]})
    )
    page = serve([folder])
    assert page.json("now")["has_minute"] is True
    status, body, headers = page.get("trace?part=minute")
    assert status == 200 and "last-minute.json" in headers["content-disposition"]
    assert [each["ts"] for each in events(body.decode())] == [at * 1e6 for at in range(40, 100)]
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        last = ledger.step_times("trainer", 5)[-1][1]
    (folder.path / FILE).write_text(
        json.dumps(
            {
                "at": last,
                "worker": "a-0",
                "cause": "was killed",
                "attempt": 0,
                "noticed_s": 0.1,
                "rollouts_again": 0,
                "recovered_s": 1.0,
            }
        )
        + "\n"
    )
    recent = RecentSpans("a-0", lambda: 5.0, lambda: last)
    recent.add("a", WORK, 0.0, 10.0)
    recent.write(folder)
    page = serve([folder])
    assert page.json("now")["has_minute"] is True
    found = events(page.get("trace?part=minute")[1].decode(), "i")
    assert "step 6" in [each["name"] for each in found] and any(
        "was killed" in each["name"] for each in found
    )


def test_a_run_leaves_its_last_minute_while_it_goes_on(tmp_path: Path) -> None:
    result = run(fake_graph(), steps=3, runs=tmp_path, on=inline(), quiet=True)
    assert result.folder is not None
    found = events(last_minute(RunFolder.open(result.folder)))
    assert {"generator", "reward", "trainer"} <= {each["name"] for each in found}
    assert max(each["ts"] + each["dur"] for each in found) <= MINUTE * 1e6
