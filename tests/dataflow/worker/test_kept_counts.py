"""Counts of edges outlive the process that counts."""

import os
import signal
from pathlib import Path

from dataflow.worker.kept_counts import KeptCounts, known_edges, total
from transport.data import EdgeCounts, EndCounts

EDGES = ["a>b:a", "b>c:a"]


def ends(kept: KeptCounts, edge: str) -> EndCounts:
    return EndCounts(*map(EdgeCounts, kept.cells(edge)))


def test_who_is_started_again_goes_on_with_what_was_counted_up_to_the_kill(tmp_path: Path) -> None:
    first = KeptCounts(tmp_path / "counts", EDGES)
    child = os.fork()
    if not child:
        counts = ends(KeptCounts(tmp_path / "counts", EDGES), "b>c:a")
        counts.sent.add(2, 16, 900)
        counts.received.add(1, 8, 450)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    again = KeptCounts(tmp_path / "counts", EDGES)
    assert again.name == first.name
    ends(again, "b>c:a").sent.add(1, 8, 450)
    assert again.read() == {again.name: {"b>c:a": {"sent": (3, 24, 1350), "received": (1, 8, 450)}}}


def test_other_edges_or_another_host_are_counted_in_a_file_of_their_own(tmp_path: Path) -> None:
    kept = KeptCounts(tmp_path / "counts", EDGES)
    ends(kept, EDGES[0]).sent.add(1, 8, 100)
    other = KeptCounts(tmp_path / "counts", [*EDGES, "c>d:a"])
    assert other.read() == {other.name: {}} and other.name != kept.name
    alone = KeptCounts(None, EDGES)
    assert alone.read() == {alone.name: {}}


def test_the_last_word_of_each_file_counts_and_files_add_up() -> None:
    said = [{"x": {"a>b:a": {"sent": (1, 8, 100)}}}, {"y": {"a>b:a": {"sent": (2, 9, 50), "received": (3, 17, 150)}}}]
    summed = total(said)
    assert summed == {"a>b:a": {"sent": [3, 17, 150], "received": [3, 17, 150], "acknowledged": [0, 0, 0]}}
    assert known_edges(summed) == summed
    assert known_edges({"a": 1, "b": {"sent": [1]}, "c": {"sent": "x"}}) == known_edges([]) == known_edges(None) == {}
