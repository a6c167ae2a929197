"""Runs that end in the middle of rollouts: when they go on, the rollouts do, and the losses are
what they would be.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import losses, tiny_graph
from rigs.operators import struck

from dataflow import Devices, Graph, inline, run
from dataflow.errors import OperatorError
from operators.generation.groups import PartialRollouts

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]

STEPS = 2


def graph(policy: Path, max_staleness: int) -> Graph:
    return tiny_graph(policy, max_staleness=max_staleness, prompts_per_step=2, max_tokens=40)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "finished").rglob("*.parts"))


@pytest.mark.parametrize(
    ("max_staleness", "slices"), [(0, 5), pytest.param(2, 5, marks=pytest.mark.slow)]
)
def test_rollouts_go_on_where_a_run_was_cut_off(
    max_staleness: int, slices: int, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalled: list[int] = []

    def noted(self: PartialRollouts, close: Any = PartialRollouts.close) -> None:
        recalled.append(self.recalled)
        close(self)

    monkeypatch.setattr(PartialRollouts, "close", noted)
    monkeypatch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
    undisturbed = run(
        graph(policy, max_staleness), steps=STEPS, on=inline(), runs=tmp_path / "whole", quiet=True
    )

    def boom() -> None:
        raise ValueError("boom")

    failing = graph(policy, max_staleness)
    generator = failing.operators["generator"]
    object.__setattr__(generator, "build", struck(generator, boom, after=slices).build)
    with pytest.raises(OperatorError, match="boom"):
        run(failing, steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    left = kept(tmp_path / "latest")
    assert left
    whole = run(
        graph(policy, max_staleness),
        steps=STEPS,
        on=inline(),
        resume=tmp_path / "latest",
        quiet=True,
    )
    assert whole.verdict.clean and whole.steps == STEPS, whole.verdict.line
    assert recalled[0] == 0 and recalled[-1] > 0
    if max_staleness == 0:
        assert losses(whole.folder) == losses(undisturbed.folder)
        assert not set(left) & set(kept(whole.folder)), "all that was in them has an outcome"
