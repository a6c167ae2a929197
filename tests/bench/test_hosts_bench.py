"""What bench.hosts reads from a run's folder."""

import time
from pathlib import Path

import pytest
from rigs.graphs import tiny_graph

from bench.hosts import WARM, figures, medians
from dataflow import inline, run


def test_figures_leave_the_first_steps_out_and_agree_with_each_other(
    policy: Path, tmp_path: Path
) -> None:
    began = time.time()
    result = run(
        tiny_graph(policy, max_tokens=4), on=inline(), steps=WARM + 5, runs=tmp_path, quiet=True
    )
    found = figures(result.folder, policy, 2, began)
    steps_per_s, versions_per_s = found["steps_per_s"], found["versions_per_s"]
    assert isinstance(steps_per_s, float) and isinstance(versions_per_s, float)
    assert found["rows_per_s"] == pytest.approx(16 * steps_per_s)
    counted_s = 5 / steps_per_s
    assert (
        0 < counted_s < result.metrics[-1]["seconds"]
        and 3 <= round(versions_per_s * counted_s) <= 7
    )
    size = sum(path.stat().st_size for path in policy.glob("*.safetensors"))
    assert found["weights_mb_per_s"] == pytest.approx(2 * versions_per_s * size / 1e6)
    assert found["link_mb_a_version"] is None
    assert min(found["weights_ms"], found["start_s"]) > 0  # type: ignore[type-var]


def test_a_figure_that_a_repeat_lacks_is_taken_from_the_others() -> None:
    assert medians(
        [{"ms": 1.0, "none": None}, {"ms": 3.0, "none": None}, {"ms": None, "none": None}]
    ) == {
        "ms": 2.0,
        "none": None,
    }
