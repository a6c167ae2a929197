"""The trace tells who worked when, in a form that browsers open."""

import json
from pathlib import Path

from dataflow.run_folder import RunFolder
from dataflow.trace import MOST_SPANS, Trace, merge


def test_spans_of_all_processes_stand_in_one_trace_that_starts_at_zero(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    for process, begin in {"generator-0": 100.5, "trainer-0": 100.0}.items():
        trace = Trace(process)
        trace.add(process[:-2], begin, begin + 0.25)
        trace.write(folder)
    merge(folder)
    events = json.loads(folder.trace.read_text())["traceEvents"]
    assert {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"} == {
        "generator": (500_000.0, 250_000.0),
        "trainer": (0.0, 250_000.0),
    }
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"generator-0", "trainer-0"}
    assert not list(folder.logs.glob("*.trace"))


def test_neighbouring_spans_are_joined_and_memory_is_bounded(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    trace = Trace("a-0")
    trace.add("a", 0.0, 1.0)
    trace.add("a", 1.0001, 2.0)
    for number in range(MOST_SPANS + 10):
        trace.add("b", number * 2.0, number * 2.0 + 1.0)
    trace.write(folder)
    merge(folder)
    events = [e for e in json.loads(folder.trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == MOST_SPANS
    assert [e["dur"] for e in events if e["name"] == "a"] == [2_000_000.0]
