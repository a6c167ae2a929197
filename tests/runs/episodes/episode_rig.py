"""Small runs of episodes, whoever plays them, and what holds of them: after a kill, after they were
cut off.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rigs.graphs import losses
from rigs.operators import struck

from dataflow import Devices, Graph, Model, Result, inline, run
from dataflow.errors import OperatorError
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from operators import Evaluate, Generator, Prompts, Trainer
from operators.credit import advantage
from operators.episodes.runtime import EpisodesRuntime
from operators.losses import aipo

STEPS, TURNS = 4, 3
LIMITS = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=3))
AFTER = {"trainer": 2}
"""Slices of work before a kill, where 12 would be too late to strike."""


def rows(count: int = 40) -> list[dict[str, str]]:
    return [
        {"prompt": f"{chr(97 + n % 26)}{n}=", "answer": str(1 + n % TURNS)} for n in range(count)
    ]


def episode_graph(
    policy: Path,
    function: Any,
    reward: Any,
    *,
    max_staleness: int = 1,
    eval_every: int = 2,
    name: str = "episodes",
) -> Graph:
    g, model = Graph(name), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=8, slots=16, segment_tokens=2)
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=4,
        lr=1e-2,
        normalize="rollouts",
        checkpoint_every=1,
    )
    prompts = Prompts(rows(), columns=("answer",), epochs=None)
    held_out = Prompts(rows(6), columns=("answer",), name="held_out", group_size=1)
    trainer(advantage(reward(function(generator, g.source(prompts)))))
    Evaluate(every_steps=eval_every)(reward(function(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def rollouts(result: Result) -> pa.Table:
    files = RunFolder.open(result.folder).rollouts_of()
    return pa.concat_tables([files.read(step) for step in range(1, result.steps + 1)])


def nothing_is_left(result: Result) -> None:
    assert not list((result.folder / "finished").rglob("*.turns"))


def goes_on_after_a_kill(
    g: Graph, victim: str, tmp_path: Path, *, replicas: Mapping[str, int] | None = None
) -> Result:
    """With one fault, a clean ledger and no rollout that failed for it."""
    mark = tmp_path / "struck"

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    operator = g.operators[victim]
    object.__setattr__(operator, "build", struck(operator, blow, after=AFTER.get(victim, 12)).build)
    result = run(
        g, steps=STEPS, runs=tmp_path / "runs", quiet=True, limits=LIMITS, replicas=replicas
    )
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
    (fault,) = read_faults(result.folder)
    assert fault["worker"] in {
        f"{victim}-{number}" for number in range((replicas or {}).get(victim, 1))
    }
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    nothing_is_left(result)
    return result


def goes_on_turn_by_turn(
    build: Callable[[], Graph],
    runtime: type[EpisodesRuntime],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut off and resumed: its losses are those of a run that nobody cut off, and the turns that it
    had are not drawn again. build: a graph whose bound is 0.
    """
    counts: list[tuple[int, int]] = []

    def noted(self: EpisodesRuntime, close: Any = runtime.close) -> None:
        status = self.status()
        counts.append((int(status["turns"]), int(status["played"])))
        close(self)

    monkeypatch.setattr(runtime, "close", noted)
    monkeypatch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
    undisturbed = run(build(), steps=2, on=inline(), runs=tmp_path / "whole", quiet=True)

    def boom() -> None:
        raise ValueError("boom")

    failing = build()
    generator = failing.operators["generator"]
    object.__setattr__(generator, "build", struck(generator, boom, after=14).build)
    with pytest.raises(OperatorError, match="boom"):
        run(failing, steps=2, on=inline(), runs=tmp_path, quiet=True)
    assert list((tmp_path / "latest").resolve().rglob("*.turns"))
    result = run(build(), steps=2, on=inline(), resume=tmp_path / "latest", quiet=True)
    assert result.verdict.clean and result.steps == 2, result.verdict.line
    assert losses(result.folder) == losses(undisturbed.folder)
    (whole, _), (cut, _), (rest, played) = counts
    assert played > 0 and cut + rest == whole, counts
    nothing_is_left(result)
