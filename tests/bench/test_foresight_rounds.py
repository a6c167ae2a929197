"""Runs of the bench are made once, disturbed ones again; noise is that of the same run made
twice.
"""

from pathlib import Path

import pytest

from bench.foresight import rounds
from bench.foresight.rounds import Measured, Noise, Planned, Processor, Rounds, contenders


def planned(made: list[str], name: str, number: int = 0) -> Planned:
    def make(runs: Path) -> None:
        made.append(name)
        (runs / f"run-{len(made)}").mkdir()

    return Planned(name=name, make=make, round=number)


def quiet(monkeypatch: pytest.MonkeyPatch, others: list[float]) -> None:
    """A machine on which others take so many seconds of each run's one."""
    state = {"at": 0.0, "busy": 0.0, "calls": 0}

    def now() -> Processor:
        if state["calls"] % 2:
            state["at"] += 1
            state["busy"] += others.pop(0)
        state["calls"] += 1
        return Processor(busy_s=state["busy"], own_s=0.0, at_s=state["at"])

    monkeypatch.setattr(rounds.Processor, "now", staticmethod(now))


def test_a_run_is_made_once_and_one_that_others_disturbed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch, [0.01, 0.9, 0.02])
    made: list[str] = []
    first = Rounds(tmp_path, None)
    found = first.run([planned(made, "a, b"), planned(made, "c")])
    assert made == ["a, b", "c", "c"] and first.missing == 0
    assert [path.name for path in found["c"]] == ["run-3"]
    again = Rounds(tmp_path, 0.0)
    assert again.run([planned(made, "a, b"), planned(made, "c"), planned(made, "c", 1)]) == found
    assert made == ["a, b", "c", "c"] and again.missing == 1


def test_a_tie_is_what_the_same_run_differs_by_and_rounds_make_it_narrower() -> None:
    noise = Noise.of(
        [Measured(steps_s=[1.0, 1.02]), Measured(steps_s=[2.0, 1.96]), Measured(steps_s=[5.0])]
    )
    assert noise.freedom == 2 and noise.deviation == pytest.approx(0.0142, abs=2e-4)
    once, often = Measured(steps_s=[1.0]), Measured(steps_s=[1.0] * 4)
    assert noise.tie(often, often) == pytest.approx(2.92 * noise.deviation * 0.5**0.5, rel=0.02)
    assert noise.tie(once, once) > noise.tie(once, often) > noise.tie(often, often)
    with pytest.raises(ValueError, match="make a second round"):
        Noise.of([once])


def test_later_rounds_run_those_that_may_win() -> None:
    ways = {
        name: Measured(steps_s=[seconds]) for name, seconds in (("a", 1.0), ("b", 1.1), ("c", 1.2))
    }
    assert contenders(ways) == ["a", "b"]


def test_processors_of_this_machine_are_counted() -> None:
    before = Processor.now()
    total = sum(number * number for number in range(200_000))
    after = Processor.now()
    assert (
        total
        and after.own_s >= before.own_s
        and after.at_s > before.at_s
        and after.busy_s >= before.busy_s
    )
