"""Real runs beside their simulation: one rule for both, and what a run's folder tells of its
seconds.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.graphs import tiny_graph

from dataflow import Graph, GraphError, Model, inline, run, scorer
from dataflow.cli import calibrate
from dataflow.display import Summary
from dataflow.folder.run_folder import RunFolder
from dataflow.foresight.command import told
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.seen import look
from dataflow.foresight.simulation.scenario import GeneratorCosts, Scenario, TrainerCosts
from dataflow.foresight.simulation.simulate import simulate
from dataflow.history.summary import summarize
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Generator, Prompts, Trainer, episode
from operators.credit import advantage
from operators.losses import aipo

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


BOUND = 2


def oldest(policy: Path, folder: Path) -> int:
    """Versions that the oldest trained token of a run was behind."""
    found = run(
        tiny_graph(policy, max_staleness=BOUND), steps=6, on=inline(), runs=folder, quiet=True
    )
    return max(line["staleness_max"] for line in found.metrics if "loss" in line)


def simulated() -> int:
    found = simulate(
        Scenario(
            steps=20,
            prompts_per_step=4,
            group_size=4,
            max_staleness=BOUND,
            lengths=Lengths.of([8.0]),
            prompt_tokens=4,
            generator=GeneratorCosts(step_s=np.full(33, 1e-3)),
            trainer=TrainerCosts(step_s=0.2),
        )
    )
    return max(found.staleness)


def test_a_rule_that_is_changed_changes_the_run_and_its_simulation(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's groups fewer may be under way: neither falls as far behind as before."""
    before = oldest(policy, tmp_path / "before"), simulated()
    monkeypatch.setattr(
        "dataflow.staleness.capacity", lambda prompts, staleness: staleness * prompts
    )
    after = oldest(policy, tmp_path / "after"), simulated()
    assert before == (BOUND, BOUND) and after == (BOUND - 1, BOUND - 1)


@scorer(name="reward", concurrency=3, processes=2)
def pooled(completion: str) -> float:
    """Several calls at once."""
    return float(len(completion))


def test_a_run_folder_calibrates_and_says_what_was_foreseen(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dataflow.scheduler.execute.activity_every", lambda seconds: 0.0)
    foreseen: dict[str, Any] = {"step_s": 0.5, "efficiency": 1.0, "staleness_mean": 1.5}
    made = run(
        tiny_graph(policy, max_staleness=0, scorers=(pooled,)),
        steps=16,
        on=inline(),
        runs=tmp_path,
        quiet=True,
        foreseen=foreseen,
    )
    seen = look(made.folder)
    assert seen.calls_at_once["reward"] == 6 and seen.calls_at_once["advantage"] == 1
    assert seen.scorers == {"reward", "advantage"}
    assert (seen.group_size, seen.prompts_per_step, seen.max_staleness) == (4, 4, 0)
    assert seen.stretches["generator"] and 0 < seen.efficiency <= 1 and 0 < seen.computed <= 1.01
    out = tmp_path / "constants.json"
    assert calibrate((made.folder,), out=out) == 0 and out.is_file()
    assert "a decode step" in capsys.readouterr().out
    told_of_run = told(
        tiny_graph(policy, max_staleness=2), str(made.folder), gpus=None, workload="", steps=20
    )
    assert (
        f"rates: calibrated on {made.folder.name}" in told_of_run
        and "as a run had them" in told_of_run
    )
    assert f"prompts of {seen.prompt_tokens:,.0f} tokens" in told_of_run
    assert told_of_run.count("1 x cpu") == 2
    said: Summary = summarize(RunFolder.open(made.folder), "", is_clean=True)
    assert [line.split()[0] for line in said.foreseen] == [
        "0.5",
        "1",
        "1.5",
    ] and "came 0" in said.foreseen[2]
    (made.folder / "activity.jsonl").unlink()
    with pytest.raises(GraphError, match=r"has no activity.jsonl"):
        look(made.folder)


@episode(max_turns=3, isolate=False)
async def talk(chat: Any) -> float:
    """Two turns, between which the world thinks."""
    await chat.say(max_tokens=3)
    await asyncio.sleep(0.02)
    chat.hear("so=")
    return float(len(await chat.say(max_tokens=3)))


@scorer(isolate=False)
def reward(talk: float) -> float:
    return talk


@pytest.mark.slow
def test_a_run_of_episodes_tells_its_turns_and_the_seconds_of_its_world(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an episode is foreseen with them."""
    monkeypatch.setattr("dataflow.scheduler.execute.activity_every", lambda seconds: 0.0)
    g, model = Graph("talks"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=6, slots=16, segment_tokens=50)
    trainer = Trainer(model, loss=aipo, prompts_per_step=2, lr=1e-3, checkpoint_every=5)
    prompts = Prompts([{"prompt": f"{letter}="} for letter in "abcdefgh"], epochs=None)
    trainer(advantage(reward(talk(generator, g.source(prompts)))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    made = run(g, steps=16, on=inline(), runs=tmp_path, quiet=True)
    seen = look(made.folder)
    assert seen.turns == {"talk": 2.0} and 0.01 <= seen.world_s["talk"] < 10.0
    text = " ".join(told(g, str(made.folder), gpus=None, workload="", steps=20).split())
    assert "rollouts of 'talk' in 2 turns of like length" in text


def test_a_run_that_is_too_short_calibrates_nothing(policy: Path, tmp_path: Path) -> None:
    made = run(tiny_graph(policy, max_staleness=1), steps=4, on=inline(), runs=tmp_path, quiet=True)
    with pytest.raises(
        GraphError, match=r"has 4 steps, of which 0 can be counted; .* let it make 19 or more"
    ):
        look(made.folder)


def test_steps_count_whether_or_not_the_trainer_records_a_loss(tmp_path: Path) -> None:
    g, model = Graph("fakes"), Model("policy")
    generator = FakeGenerator(model=model)
    trainer = FakeTrainer(model=model, prompts_per_step=2)
    trainer(generator(g.source(FakePrompts())))
    g.feedback(trainer.weights, generator, max_staleness=1)
    made = run(g, steps=4, on=inline(), runs=tmp_path, quiet=True)
    with pytest.raises(GraphError, match="has 4 steps, of which 0 can be counted"):
        look(made.folder)
    assert summarize(RunFolder.open(made.folder), "", True).steps == 4
