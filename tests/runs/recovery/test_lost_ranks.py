"""A run of several ranks on both sides goes on whichever of them is killed, or is stopped for
longer than deadlines.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import tiny_graph
from rigs.policy import tiny_policy
from rigs.striking import Stopping, Striking

from dataflow import run, verify
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine", "one_core"),
    pytest.mark.timeout(600),
]

SIZES = {"trainer": 4, "generator": 2}
RANKS = [(worker, rank) for worker, size in SIZES.items() for rank in range(size)]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), heads=4)


@contextlib.contextmanager
def goes_on(
    striking: Striking, policy: Path, runs: Path, weights: str, limits: Limits, steps: int
) -> Iterator[Any]:
    """A run during which ranks are struck: it comes to its end with every group trained once, by
    the newest weights.
    """
    graph = tiny_graph(
        policy,
        max_staleness=0,
        max_tokens=8,
        prompts_per_step=2,
        generator_knobs={"tensor_parallel": 2},
    )
    striking.start()
    result = run(
        graph,
        ranks={"trainer": 4},
        steps=steps,
        weights=weights,
        runs=runs,
        quiet=True,
        limits=limits,
    )
    striking.join(10)
    assert striking.error is None, striking.error
    assert not striking.is_alive(), (
        f"the run was over before all were struck; struck were {striking.struck}"
    )
    assert result.steps == steps and result.verdict.clean, result.verdict.line
    assert verify(result.folder).clean
    versions = (
        RunFolder.open(result.folder).rollouts_of().read(steps).column("versions").to_pylist()
    )
    assert {max(row) for row in versions} == {steps - 1}
    yield result


@pytest.mark.parametrize("weights", ["gloo", "shared_memory"])
def test_whichever_rank_is_killed_the_run_goes_on_and_every_group_is_trained_once(
    weights: str, four_heads: Path, tmp_path: Path
) -> None:
    limits = Limits(patience=Patience(first_s=0.05, of_one=5))
    striking = Striking(tmp_path, SIZES, RANKS)
    with goes_on(striking, four_heads, tmp_path, weights, limits, steps=40) as result:
        found = read_faults(result.folder)
        assert striking.struck == RANKS
        assert len(found) >= len(RANKS) and all(fault["recovered_s"] is not None for fault in found)
        assert {fault["worker"] for fault in found} == {"trainer-0", "generator-0"}


@pytest.mark.parametrize(("exchange_s", "stopped_s"), [(120.0, 60.0), (5.0, 25.0)])
@pytest.mark.parametrize("weights", ["gloo", "shared_memory"])
def test_a_rank_that_is_stopped_for_longer_than_deadlines_and_goes_on_ends_no_run(
    weights: str, exchange_s: float, stopped_s: float, four_heads: Path, tmp_path: Path
) -> None:
    """The weight plane strikes off a rank that is silent for 20 s."""
    limits = Limits(exchange_s=exchange_s, patience=Patience(first_s=0.05, of_one=5))
    striking = Stopping(tmp_path, SIZES, [("trainer", 2), ("generator", 1)], stopped_s)
    with goes_on(striking, four_heads, tmp_path, weights, limits, steps=24) as result:
        if exchange_s < stopped_s:
            assert {"trainer-0", "generator-0"} <= {
                fault["worker"] for fault in read_faults(result.folder)
            }
