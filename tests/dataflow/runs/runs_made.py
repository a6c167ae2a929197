"""One small run of fakes, in one process: 12 steps of 4 groups of 3 rollouts, with two scorers."""

import sys
from pathlib import Path

import pytest
from rigs.graphs import fake_graph

from dataflow import Devices, Model, inline, run, scorer
from dataflow.testing import FakeGenerator

STEPS, PROMPTS, GROUP = 12, 4, 3


@scorer(isolate=False)
def reward(rollout_id: int) -> float:
    """Tells siblings apart in all groups but every fourth."""
    group, position = divmod(rollout_id, GROUP)
    return float(position == group % GROUP) if group % 4 else 0.5


@scorer(isolate=False)
def length(completion: str) -> int:
    return len(completion)


def one_run(runs: Path, steps: int = STEPS, **knobs: object) -> Path:
    """The folder of such a run."""
    graph = fake_graph(
        generator=FakeGenerator(model=Model("fake-policy"), group_size=GROUP),
        scorers=(reward, length),
        prompts_per_step=PROMPTS,
        **knobs,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        return run(graph, steps=steps, on=inline(), runs=runs, quiet=True).folder
