"""Laws of the paused bench: memory at two moments, queues against their bounds, the pace against
the one before.
"""

import json
from pathlib import Path

import pytest

from bench import paused
from bench.paused import MIB, Memory, group_rows, memory_rows, pace_rows, percent, queue_rows


def reading(**mib: int) -> dict[str, Memory]:
    return {name: Memory(each * MIB, each * MIB // 2) for name, each in mib.items()}


def test_memory_is_the_median_of_three_readings_of_processes_that_were_there_all_the_time() -> None:
    readings = [
        reading(a=900, b=1),
        *[reading(a=100, b=1)] * 2,
        reading(a=500, b=1),
        reading(a=300),
        reading(a=90),
        reading(a=110),
        reading(a=800),
    ]
    (row,) = memory_rows(readings, 1)
    assert row == {
        "process": "a",
        "rss_start": 100,
        "rss_end": 110,
        "rss_percent": pytest.approx(10.0),
        "own_start": 50,
        "own_end": 55,
        "own_percent": pytest.approx(10.0),
    }
    assert percent(0, 5) == 0.0 and percent(200, 100) == -50.0


def test_a_queue_deeper_than_its_bound_is_told_at_whatever_moment_it_was() -> None:
    rows = queue_rows([{"a": (9, 8), "b": (0, 8)}, {"a": (1, 8), "b": (8, 8)}, {"a": (2, 8)}])
    assert rows == [
        {"edge": "a", "start": 1, "end": 2, "most": 9, "bound": 8, "within": "NO"},
        {"edge": "b", "start": 8, "end": 8, "most": 8, "bound": 8, "within": "yes"},
    ]


def test_groups_count_as_begun_once_a_generator_has_them() -> None:
    readings = [
        {"issued": 5, "generating": 2},
        {"issued": 3, "scored": 3},
        {"issued": 3, "scored": 5},
    ]
    rows = {row.pop("state"): row for row in group_rows(readings, 4)}
    assert rows["begun"] == {
        "at_once": 2,
        "start": 3,
        "end": 5,
        "most": 5,
        "bound": 4,
        "within": "NO",
    }
    assert rows["generating"] == {"at_once": 2, "start": 0, "end": 0, "most": 2}
    assert rows["issued"] == {"at_once": 5, "start": 3, "end": 3, "most": 5}


def test_the_pace_after_a_pause_is_a_share_of_the_median_before_it() -> None:
    before = [step / 2 for step in range(60)]
    after = [100 + step for step in range(10)] + [110 + step / 2 for step in range(40)]
    rows = pace_rows([*before, *after], 30.0, 100.0)
    assert [(row["window"], row["steps_per_s"], row["share"]) for row in rows] == [
        ("30 s before", 2.0, 1.0),
        ("20 s before", 2.0, 1.0),
        ("10 s before", 2.0, 1.0),
        ("0 s after", 1.0, 0.5),
        ("10 s after", 2.0, 1.0),
        ("20 s after", 2.0, 1.0),
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_paused_run_is_measured_from_outside_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paused, "WINDOW_S", 2.0)
    arguments = [
        "--seconds",
        "6",
        "--warm",
        "1",
        "--settle",
        "1",
        "--policy",
        str(tmp_path / "policy"),
    ]
    assert paused.main([*arguments, "--json", str(tmp_path / "figures")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "figures").read_text().splitlines()]
    names = {line["system"] for line in lines if line["case"] == "memory"}
    assert {"scheduler", "forkserver", "trainer-0", "generator-0", "reward-0", "prompts-0"} <= names
    assert {line["within"] for line in lines if "within" in line} == {"yes"}
    assert all(line["steps_per_s"] > 0 for line in lines if line["case"] == "pace")
    (verdict,) = [line for line in lines if line["case"] == "verdict"]
    assert verdict["clean"] == "yes" and not verdict["faults"] and verdict["paused_s"] >= 6
