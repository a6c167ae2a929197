"""The benches of the live page: an interval over windows, pages without a browser, and a large
run's answers.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.live import scale
from bench.live.intervals import NONE
from bench.live.large import write


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
