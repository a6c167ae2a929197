"""Counts of edges outlive the process that counts, and the folder that they are counted in."""

import os
import shutil
import signal
from pathlib import Path

from dataflow.worker.kept_counts import Crossed, KeptCounts, KeptFiles, known_edges, path_of, total

EDGES = ["a>b:a", "b>c:a"]


def test_who_is_started_again_goes_on_with_what_was_counted_up_to_the_kill(tmp_path: Path) -> None:
    first = KeptCounts(tmp_path / "counts", EDGES)
    child = os.fork()
    if not child:
        counts = KeptCounts(tmp_path / "counts", EDGES).edges["b>c:a"]
        counts.sent.add(2, 16, 900)
        counts.received.add(1, 8, 450)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    again = KeptCounts(tmp_path / "counts", EDGES)
    assert again.name == first.name
    again.edges["b>c:a"].sent.add(1, 8, 450)
    assert again.read() == {again.name: {"b>c:a": {"sent": (3, 24, 1350), "received": (1, 8, 450)}}}


def test_other_edges_or_another_host_are_counted_in_a_file_of_their_own(tmp_path: Path) -> None:
    kept = KeptCounts(tmp_path / "counts", EDGES)
    kept.edges[EDGES[0]].sent.add(1, 8, 100)
    other = KeptCounts(tmp_path / "counts", [*EDGES, "c>d:a"])
    assert other.read() == {other.name: {}} and other.name != kept.name
    alone = KeptCounts(None, EDGES)
    assert alone.read() == {alone.name: {}}


def test_what_workers_have_counted_is_read_without_them_and_without_their_folder(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    kept = []
    for folder, worker, edges in ((here, "a", EDGES[:1]), (here, "b", EDGES), (there, "b", EDGES)):
        folder.mkdir(exist_ok=True)
        kept.append(KeptCounts(path_of(str(folder), worker, 0), edges))
    (here / "counts.torn").write_bytes(b"no counts")
    (here / "counts.long").write_bytes(b"x" * 16 + b"\xff" * 8 + b"[]")
    with KeptFiles([here, there, tmp_path / "nowhere"]) as files:
        kept[0].edges["a>b:a"].sent.add(1, 8, 100)
        kept[1].edges["a>b:a"].received.add(1, 8, 100)
        kept[2].edges["b>c:a"].acknowledged.add(2, 9, 50)
        for folder in (here, there):
            shutil.rmtree(folder)
        found = files.read()
    assert found == {name: edges for each in kept for name, edges in each.read().items()}
    assert total([found])["b>c:a"]["acknowledged"] == [2, 9, 50]
    assert found[kept[0].name]["a>b:a"]["sent"] == Crossed(batches=1, rows=8, bytes=100)


def test_the_last_word_of_each_file_counts_and_files_add_up() -> None:
    said = [
        {"x": {"a>b:a": {"sent": (1, 8, 100)}}},
        {"y": {"a>b:a": {"sent": (2, 9, 50), "received": (3, 17, 150)}}},
    ]
    summed = total(said)
    assert summed == {
        "a>b:a": {"sent": [3, 17, 150], "received": [3, 17, 150], "acknowledged": [0, 0, 0]}
    }
    assert total([*said, {"x": {"a>b:a": {"sent": (2, 9, 101)}}}])["a>b:a"]["sent"] == [4, 18, 151]
    assert known_edges(summed) == summed
    assert (
        known_edges({"a": 1, "b": {"sent": [1]}, "c": {"sent": "x"}})
        == known_edges([])
        == known_edges(None)
        == {}
    )
