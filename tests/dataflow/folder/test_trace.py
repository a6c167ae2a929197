"""The trace tells who worked when, in a form that browsers open."""

import json
from itertools import pairwise
from pathlib import Path

from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import WORK, Spans, Trace, merge


def test_spans_of_all_processes_stand_in_one_trace_that_starts_at_zero(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    for process, begin in {"generator-0": 100.5, "trainer-0": 100.0}.items():
        trace = Trace(process)
        trace.add(process[:-2], WORK, begin, begin + 0.25)
        trace.write(folder)
    merge(folder)
    events = json.loads(folder.trace.read_text())["traceEvents"]
    assert {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X"} == {
        "generator": (500_000.0, 250_000.0),
        "trainer": (0.0, 250_000.0),
    }
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"generator-0", "trainer-0"}
    assert not list(folder.logs.glob("*.trace"))


def test_neighbouring_spans_are_joined(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    trace = Trace("a-0")
    trace.add("a", WORK, 0.0, 1.0)
    trace.add("b", WORK, 0.5, 1.5)
    trace.add("a", WORK, 1.0001, 2.0)
    trace.write(folder)
    merge(folder)
    events = [e for e in json.loads(folder.trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["dur"]) for e in events] == [("a", 2_000_000.0), ("b", 1_000_000.0)]


def test_however_long_a_run_its_trace_is_whole_and_holds_so_many_spans() -> None:
    spans = Spans(100)
    for turn in range(10_000):
        spans.add("even", turn, turn + 0.5)
        if turn % 100 == 0:
            spans.add("rare", turn, turn + 0.25)
    found = list(spans)
    assert 40 <= len(found) <= 100
    for node, last in (("even", 9_999.5), ("rare", 9_900.25)):
        own = [(begin, end) for name, begin, end in found if name == node]
        assert own[0][0] == 0.0 and own[-1][1] == last
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
    assert sum(1 for name, *_ in found if name == "rare") > 1, "the shorter pauses go first"


def test_a_long_pause_is_still_seen_where_short_ones_are_joined() -> None:
    spans = Spans(10)
    for turn in range(1_000):
        spans.add("a", turn + (500 if turn >= 300 else 0), turn + (500 if turn >= 300 else 0) + 0.9)
    assert any(end <= 300.0 and begin >= 800.0 for (_, _, end), (_, begin, _) in pairwise(spans))
