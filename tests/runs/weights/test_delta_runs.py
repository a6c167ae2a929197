"""Whole runs over a slow link: what changed travels in place of everything, and the generator has
the same weights.
"""

from functools import partial
from pathlib import Path

import pytest
from rigs.graphs import tiny_graph

from dataflow import Result, run
from dataflow.folder.run_folder import RunFolder
from dataflow.planning.executors import SCAN_BYTES_PER_S
from transport.weights.sharded import delta

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(180)]

STEPS = 3


def generated(result: Result) -> list[object]:
    """Tokens, and their log-probabilities to the bit."""
    rows = [RunFolder.open(result.folder).rollouts_of().read(step) for step in range(1, STEPS + 1)]
    return [
        table.column(name).to_pylist()
        for table in rows
        for name in ("tokens", "logprobs", "versions")
    ]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_generator_behind_a_slow_link_has_the_same_weights_from_fewer_bytes(
    policy: Path, tmp_path: Path, ranks: int
) -> None:
    graph = partial(
        tiny_graph,
        policy,
        max_staleness=0,
        max_tokens=6,
        lr=1e-5,
        eps=1e-3,
        model_knobs={"dtype": "bfloat16"},
    )
    how = {"steps": STEPS, "seed": 1, "quiet": True, "weights": "gloo", "ranks": {"trainer": ranks}}
    whole = run(graph(), runs=tmp_path / "whole", **how)
    changed = run(graph(), runs=tmp_path / "changed", link_gbps=0.1, **how)
    assert whole.verdict.clean and changed.verdict.clean
    assert generated(changed) == generated(whole)
    first, *later = [
        (line["weights_sent_bytes"], line["weights_saved_bytes"]) for line in changed.metrics
    ]
    assert first[0] > 0 and first[1] == 0, "nobody has a version before the first"
    everything = [
        (line["weights_sent_bytes"], line["weights_saved_bytes"]) for line in whole.metrics
    ]
    assert {saved for _, saved in everything} == {0}
    for (sent, saved), (all_of_it, _) in zip(later, everything[1:], strict=True):
        assert sent + saved == all_of_it
        assert 0 < sent < all_of_it / 2, "a step at this rate changes few words of bfloat16"


def test_the_planner_s_rate_is_the_one_that_deltas_are_found_at():
    assert SCAN_BYTES_PER_S == delta.SCAN_BYTES_PER_S
