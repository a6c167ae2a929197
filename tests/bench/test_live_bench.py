"""The benches of the live page: an interval over rounds, pages without a browser, and a large run's answers."""

import json
import math
from pathlib import Path

import pytest

from bench import state_clock
from bench.live import __main__ as cost
from bench.live import scale
from bench.live.clients import PageClient
from bench.live.large import write
from bench.windows import interval


def test_an_interval_holds_the_mean_and_narrows_with_more_rounds() -> None:
    mean, low, high = interval([0.01, -0.01, 0.02])
    assert low < mean < high and mean == pytest.approx(0.02 / 3)
    assert interval([0.01])[1:] == (-math.inf, math.inf)
    wide, narrow = interval([0.0, 0.1] * 3), interval([0.0, 0.1] * 30)
    assert narrow[2] - narrow[1] < (wide[2] - wide[1]) / 2


def test_what_all_rounds_say_is_told_of_whole_rounds_alone(capsys: pytest.CaptureFixture[str]) -> None:
    window = {"steps_per_s": 2.0, "server_cpu": 1.0, "client_cpu": 2.0, "answers": 3, "failed": 0}
    windows = [{**window, "round": at, "case": case} for at in range(2) for case in cost.CASES]
    windows.append({**window, "round": 2, "case": "no page", "steps_per_s": 99.0})
    cost.tell(windows)
    told = capsys.readouterr().out
    assert "2 rounds" in told and "ten pages" in told and "99" not in told


def test_the_clock_s_cost_is_told_of_whole_rounds_with_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"with the clock": 1.98, "without": 2.0}
    windows = [
        {"steps_per_s": rate, "counted": 0.5, "round": at, "case": case}
        for at in range(3) for case, rate in rates.items()
    ]  # fmt: skip
    windows.append({"steps_per_s": 99.0, "counted": 0.5, "round": 3, "case": "without"})
    state_clock.tell(windows)
    told = capsys.readouterr().out
    assert "3 rounds" in told and "0.99" in told and "0.9900 to 0.9900" in told and "99.0" not in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_while_its_nodes_clocks_are_taken_away_and_given_back(tmp_path: Path) -> None:
    out = tmp_path / "windows.json"
    assert state_clock.main(["--json", str(out), "--minutes", "0.15", "--window", "3"]) == 0
    found = {window["case"]: window for window in json.loads(out.read_text())}
    assert found["with the clock"]["counted"] > 0.1 and found["without"]["counted"] == 0
    assert all(window["steps"] > 1 for window in found.values())


def test_a_page_without_a_browser_asks_for_what_the_scripts_ask(tmp_path: Path) -> None:
    with scale.served(write(tmp_path, 50, 200), 50) as port:
        client = PageClient(f"http://127.0.0.1:{port}/{scale.TOKEN}/")
        client.run(0.0)
        assert client.failed == 0 and client.answers == 12 and client.received > 50_000
        names = json.loads(client.get("api/names"))["series"]
        assert sum(each["first"] for each in names) >= 6


@pytest.mark.slow
def test_answers_about_a_large_run_are_bounded(tmp_path: Path) -> None:
    with scale.served(write(tmp_path, 1000, 100_000), 1000) as port:
        sizes = {name: figures["bytes"] for name, figures in scale.answers(port).items()}
        assert json.loads(scale.get(port, "api/series?points=600&key=trainer/loss"))["series"]["trainer/loss"][
            "of"
        ] == 100_000  # fmt: skip
    assert sizes["graph"] < 3_000_000 and sizes["now"] < 1_000_000
    assert sizes["twelve series"] < 400_000 and max(sizes["rollouts"], sizes["one rollout"]) < 100_000
