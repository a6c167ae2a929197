"""Where nothing is learned, trainer and generator agree on every token's probability, however many
versions go by.
"""

from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import tiny_graph

from dataflow import inline, run

VERSIONS = 50
ROUNDING = 1e-5

pytestmark = [pytest.mark.usefixtures("one_core", "machine"), pytest.mark.timeout(180)]


def lines_of(policy: Path, runs: Path, on: Any) -> list[dict[str, Any]]:
    graph = tiny_graph(policy, lr=0.0, max_staleness=4, prompts_per_step=2, max_tokens=16)
    result = run(graph, on=on, steps=VERSIONS, runs=runs, quiet=True)
    return result.metrics


@pytest.mark.parametrize(
    "on", [inline(), pytest.param(None, marks=pytest.mark.slow)], ids=["inline", "processes"]
)
@pytest.mark.slow
def test_at_learning_rate_zero_the_mismatch_stays_where_it_started_over_50_versions(
    policy: Path, tmp_path: Path, on: Any
) -> None:
    lines = lines_of(policy, tmp_path, on)
    assert [line["version"] for line in lines] == list(range(1, VERSIONS + 1))
    assert all(line["grad_norm"] > 0 for line in lines[:5]), (
        "the steps had no gradient: nothing was kept from learning"
    )
    assert max(line["staleness_max"] for line in lines) > 0, "every token was of the newest version"
    same = [line["mismatch"] for line in lines if line["mismatch"] is not None]
    assert same and max(same) < ROUNDING
    assert all(
        -ROUNDING < line["kl"] < ROUNDING and abs(line["ratio_max"] - 1) < 10 * ROUNDING
        for line in lines
    )


def test_a_learning_rate_above_zero_is_seen_in_the_kl_of_stale_tokens(
    policy: Path, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, lr=1e-2, max_staleness=4, prompts_per_step=2, max_tokens=16)
    lines = run(graph, on=inline(), steps=12, runs=tmp_path, quiet=True).metrics
    stale = [line for line in lines if line["staleness_max"] > 0]
    assert stale and max(line["kl"] for line in stale) > 100 * ROUNDING
    assert max(line["mismatch"] for line in lines if line["mismatch"] is not None) < ROUNDING
