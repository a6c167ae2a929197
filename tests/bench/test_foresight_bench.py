"""Published step times: constants are found again, and what cannot be predicted is said."""

from dataclasses import replace

import pytest

from bench.foresight.__main__ import MODELS
from bench.foresight.fit import by_costs, fitted, left_out
from bench.foresight.published import PRACTICES, Run, read_models, seen
from dataflow.foresight.rates import ASSUMED

ROW = {
    "system": "NeMo-RL-0.6",
    "model": "Qwen3-30B-A3B",
    "mode": "sync",
    "gpu": "H100",
    "gpus": "32",
    "max_tokens": "4096",
    "rollouts_per_generation": "2048",
    "rollouts_per_step": "512",
    "mean_tokens": "3203",
    "generator_tp": "2",
    "generator_pp": "1",
    "trainer_tp": "1",
    "trainer_cp": "1",
    "trainer_ep": "8",
    "trainer_pp": "1",
}
OTHERS = (
    {},
    {"mode": "async"},
    {"gpus": "64"},
    {"mode": "async", "gpus": "128"},
    {"model": "Qwen3-32B", "generator_tp": "4"},
)


def runs_at(memory: float, compute: float) -> list[Run]:
    """Runs that took as long as the costs say at these rates."""
    rates, found = replace(ASSUMED, memory=memory, compute=compute), []
    for other in OTHERS:
        run = seen(ROW | other, read_models(MODELS), PRACTICES["NeMo-RL-0.6"])
        found.append(replace(run, row={**run.row, "step_s": str(run.predicted_s(rates))}))
    return found


@pytest.mark.parametrize(("memory", "compute"), [(0.6, 0.2), (0.8, 0.1)])
def test_a_fit_finds_the_rates_at_which_runs_were_made_and_predicts_what_it_has_not_seen(
    memory: float, compute: float
) -> None:
    runs = runs_at(memory, compute)
    found = fitted(runs)
    assert (found.memory, found.compute) == pytest.approx((memory, compute), rel=0.05)
    assert left_out(runs, by_costs) == pytest.approx([run.step_s for run in runs], rel=0.1)
