"""The benches of the live page: an interval over windows, pages without a browser, and a large
run's answers.
"""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.live import __main__ as cost
from bench.live import scale
from bench.live.clients import Clients, Done, PageClient
from bench.live.intervals import NONE, differences, interval, percent_less
from bench.live.large import write
from bench.live.windows import said_line


def windows(slower: float, noise: float, count: int, pieces: int = 1) -> Iterator[dict[str, Any]]:
    """Of a run that becomes slower from window to window, and with a page once more; with noise."""
    chance, more = (
        random.Random(0),
        {"foreign": 0.0, "server_cpu": 1.0, "client_cpu": 2.0, "idle": 3.0},
    )
    for piece in range(pieces):
        for at in range(count):
            page = at % 2 == 1
            rate = 8.0 * 0.999**at * (1 - slower * page) * math.exp(chance.gauss(0, noise))
            yield {
                "piece": piece,
                "case": "one page" if page else NONE,
                "steps_per_s": rate,
                "cpu_per_step": 2 / rate,
                "answers": 3,
                "failed": 0,
                **more,
            }


def rate(window: Any) -> float:
    return float(window["steps_per_s"])


def test_an_interval_holds_the_mean_and_narrows_with_more_windows() -> None:
    mean, low, high = interval([0.01, -0.01, 0.02])
    assert low < mean < high and mean == pytest.approx(0.02 / 3)
    assert interval([0.01])[1:] == (-math.inf, math.inf)
    wide, narrow = interval([0.0, 0.1] * 3), interval([0.0, 0.1] * 30)
    assert narrow[2] - narrow[1] < (wide[2] - wide[1]) / 2


def test_windows_beside_each_other_tell_what_a_page_takes_of_a_run_that_drifts() -> None:
    found = differences(list(windows(0.05, 0.0, 41)), "one page", rate)
    assert len(found) == 20 and percent_less(found) == pytest.approx((5.0, 5.0, 5.0), abs=1e-3)
    less, low, high = percent_less(
        differences(list(windows(0.02, 0.03, 61, pieces=6)), "one page", rate)
    )
    assert low < 2.0 < high and low < less < high and high - low < 2.0
    _, low, high = percent_less(differences(list(windows(0.02, 0.03, 61, pieces=6)), NONE, rate))
    assert low < 0.0 < high, "windows without a page differ by chance alone"


def test_windows_that_others_disturbed_and_the_ends_of_pieces_do_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = list(windows(0.02, 0.0, 9, pieces=2))
    assert len(differences(made, "one page", rate)) == 8
    made[0]["foreign"] = 50.0
    made[2]["steps_per_s"] = 0.0
    cost.tell(made)
    told = capsys.readouterr().out
    assert (
        "16 windows" in told and "one page" in told and "2.00" in told and "2 of 18 windows" in told
    )


def test_a_page_without_a_browser_asks_for_what_the_scripts_ask(tmp_path: Path) -> None:
    with scale.served(write(tmp_path, 50, 200), 50) as port:
        client = PageClient(f"http://127.0.0.1:{port}/{scale.TOKEN}/")
        client.load()
        assert (
            client.done.failed == 0 and client.done.answers == 12 and client.done.received > 50_000
        )
        client.look(10.0)
        assert client.done.failed == 0 and client.done.answers == 16
        client.look(10.5)
        assert client.done.answers == 17, "series come every two seconds"
        names = json.loads(client.get("api/names"))["series"]
        assert sum(each["first"] for each in names) >= 6
        clients = Clients(f"http://127.0.0.1:{port}/{scale.TOKEN}/")
        clients.load()
        assert clients.show("0").failed == 0 and clients.show("0") == Done()


@pytest.mark.slow
def test_answers_about_a_large_run_are_bounded(tmp_path: Path) -> None:
    with scale.served(write(tmp_path, 1000, 100_000), 1000) as port:
        sizes = {name: figures["bytes"] for name, figures in scale.answers(port).items()}
        assert (
            json.loads(scale.get(port, "api/series?points=600&key=trainer/loss"))["series"][
                "trainer/loss"
            ]["of"]
            == 100_000
        )
    assert sizes["graph"] < 3_000_000 and sizes["now"] < 1_000_000
    assert (
        sizes["twelve series"] < 400_000 and max(sizes["rollouts"], sizes["one rollout"]) < 100_000
    )


@pytest.mark.parametrize(
    ("says", "found"), [("print('half', end=''); time.sleep(600)", "half"), ("pass", "")]
)
def test_who_says_no_line_in_time_is_ended_and_named(says: str, found: str) -> None:
    silent = subprocess.Popen(
        [sys.executable, "-uc", f"import time; {says}"], stdout=subprocess.PIPE, text=True
    )
    with (
        silent,
        pytest.raises(
            RuntimeError, match=f"the silent one said nothing within 3 s, .* found '{found}'"
        ),
    ):
        said_line(silent, "the silent one", 3.0)
    assert silent.wait(10) is not None
