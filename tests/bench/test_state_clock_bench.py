"""The bench of what it takes to know what nodes are at: a switch around their loops, what windows
and clocks say.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import state_clock
from bench.state_clock import COUNT, OFF, ON, Switch, switched, tell, transitions
from dataflow.folder.trace import WORK
from dataflow.runtime import Batch, Runtime
from dataflow.worker.loop import NodeLoop


class Counted(Runtime):
    """Works at each turn, and counts how often it is asked whether it is starved."""

    worked = asked = 0

    def room(self) -> int:
        return 0

    def push(self, batch: Batch) -> None:
        raise AssertionError("it has no room")

    def work(self) -> list[Batch]:
        self.worked += 1
        return []

    def pending(self) -> int:
        return 0

    def starved(self) -> bool:
        self.asked += 1
        return False


def test_a_loop_works_alike_with_its_switch_off_and_knows_nothing_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, other = Switch(tmp_path / "switch"), Switch(tmp_path / "switch")
    monkeypatch.setattr(NodeLoop, "turn", switched(switch, tmp_path))
    runtime, works = Counted(), list[str]()
    loop = NodeLoop("n", runtime, [], {}, span=lambda node, what, began, ended: works.append(what))
    for to, asked in ((ON, 2), (OFF, 2), (COUNT, 4), (ON, 6)):
        other.put(to)
        busy = loop.spent()["seconds"]["busy"]
        assert loop.turn() and loop.turn()
        assert runtime.asked == asked and (loop.spent()["seconds"]["busy"] > busy) == (to != OFF)
    assert runtime.worked == 8 and works.count(WORK) == 8
    (counts,) = tmp_path.glob("turns-*.json")
    assert json.loads(counts.read_text()) == {"n": 2}


def windows(slower: float, noise: float, count: int) -> Iterator[dict[str, Any]]:
    """Of a run that becomes slower from window to window, and with the clock once more."""
    chance = random.Random(0)
    for at in range(count):
        rate = 8.0 * 0.999**at * (1 - slower * (at % 2)) * math.exp(chance.gauss(0, noise))
        yield {
            "piece": 0,
            "case": ("without", "with")[at % 2],
            "steps_per_s": rate,
            "cpu_per_step": 2 / rate,
            "foreign": 0.0,
            "turns_per_s": 1000.0,
        }


def test_windows_with_and_without_tell_what_the_clock_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = list(windows(0.02, 0.0, 41))
    made[20]["foreign"] = 50.0
    tell(made, {"a turn that worked": 2000.0})
    told = capsys.readouterr().out
    assert "2.00 to 2.00" in told and "1 of 41 windows" in told
    assert "0.2" in told, "of a core: 1,000 turns of 2 us in a second"
    tell([], {"a turn that worked": 2000.0})
    assert "2,000" in capsys.readouterr().out


def test_a_transition_takes_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_clock, "TURNS", 100)
    monkeypatch.setattr(state_clock, "REPEATS", 2)
    found = transitions()
    assert len(found) == 5 and all(0 < each < 1e7 for each in found.values())
