"""Runs that play environments: worlds that fail in every way, workers that are killed; all sessions
come back.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from episode_rig import STEPS, goes_on_after_a_kill, rollouts
from rigs.machine import wait_until
from rigs.worlds.counted import held, known
from rigs.worlds.servers import Served, openenv

from dataflow import Graph, Model, Result, collect, inline, run
from operators import Evaluate, Generator, Trainer
from operators.credit import advantage
from operators.environments import environment
from operators.environments.declaration import PlayedEnvironment
from operators.losses import aipo

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where sessions leave their marks."""
    made = tmp_path / "sessions"
    made.mkdir()
    return made


def graph(policy: Path, world: PlayedEnvironment, **prompts: Any) -> Graph:
    g, model = Graph("environments"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=4, slots=16, segment_tokens=2)
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=4,
        lr=1e-2,
        normalize="rollouts",
        checkpoint_every=1,
    )
    trainer(advantage(world(generator, g.source(world.tasks(range(1000), **prompts)))))
    held_out = world.tasks(range(1000, 1006), name="held_out", group_size=1, **prompts)
    Evaluate(every_steps=2)(world(generator, g.source(held_out)))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


def is_whole(result: Result) -> None:
    """Every rollout has its two turns, with what each was worth, once."""
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
    table = rollouts(result)
    assert not pc.any(pc.is_valid(table.column("error"))).as_py()
    for row in table.to_pylist():
        assert set(row["turn"]) == {-1, 0, 1} and sum(row["turn_reward"]) == row["reward"]
    assert not list((result.folder / "finished").rglob("*.turns"))


@pytest.mark.parametrize("isolate", [True, False])
def test_a_run_plays_an_environment_and_gives_its_sessions_back(
    isolate: bool, policy: Path, folder: Path, tmp_path: Path
) -> None:
    world = environment(
        "counted:world", options={"folder": str(folder)}, sessions=8, isolate=isolate
    )
    result = run(graph(policy, world), steps=STEPS, on=inline(), runs=tmp_path / "runs", quiet=True)
    is_whole(result)
    assert len(list(folder.iterdir())) <= 12, "8, used again, and those that make prompts"
    assert {mark.read_text() for mark in folder.iterdir()} == {"closed"}, "in its own process, too"
    assert not held(folder)
    rounds = [line["eval_n"] for line in result.metrics if "eval_n" in line]
    assert set(rounds) == {6}


FAILS = {
    "raise": (
        "world: WorldFailed: 'counted:world' could not go on; found KeyError: 'the world is broken'"
    ),
    "hang": "hung: no answer within 10 s",
    "die": "died: its process ended with signal 9",
    "shout": "the world says too much between two turns",
    "lie": "a reward that is no finite number; found nan",
    "mute": "is over and has given no reward",
}


@pytest.mark.slow
def test_environments_that_fail_are_errors_of_their_rollouts_and_no_reward(
    policy: Path, folder: Path
) -> None:
    g = Graph("failing")
    world = environment(
        "counted:world", options={"folder": str(folder)}, sessions=32, timeout_s=10.0, tries=2
    )
    kinds = [*FAILS, None, None]
    rows = [{"prompt": f"{n}=", "seed": n, "does": kinds[n % len(kinds)]} for n in range(8)]
    generator = Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=4, slots=8)
    found = collect(
        advantage(world(generator, g.source(world.tasks(rows, epochs=1)))), rows=16
    ).to_pylist()
    assert len(found) == 16
    for row in found:
        wrong = FAILS.get(json.loads(row["task"])["does"] or "")
        if wrong is None:
            assert (
                row["error"] is None
                and row["reward"] is not None
                and row["finish_reason"] == "stop"
            )
        else:
            assert row["error"].startswith("reward: ") and wrong in row["error"], row["error"]
            assert (
                row["reward"] is None
                and row["advantage"] is None
                and row["finish_reason"] == "error"
            )
    wait_until(lambda: not held(folder), 20)


def test_an_episode_that_the_environment_cuts_off_is_no_failure_and_says_so(
    policy: Path, folder: Path
) -> None:
    g = Graph("cut")
    world = environment("counted:world", options={"folder": str(folder)}, isolate=False)
    rows = [{"prompt": f"{n}=", "seed": n, "cut": n % 2 == 0} for n in range(4)]
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=4, slots=8)
    found = collect(world(generator, g.source(world.tasks(rows, epochs=1))), rows=4).to_pylist()
    for row in found:
        cut = json.loads(row["task"])["cut"]
        assert row["error"] is None and row["reward"] is not None
        assert row["finish_reason"] == ("length" if cut else "stop")


# Kills


@pytest.fixture
def served() -> Iterator[Served]:
    pytest.importorskip(
        "websockets", reason="websockets is not installed; pip install dataflow-rl[openenv]"
    )
    with openenv(capacity=3) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["reward", "generator", pytest.param("trainer", marks=pytest.mark.slow)]
)
def test_a_run_whose_worker_is_killed_is_whole_and_the_server_has_its_sessions_back(
    victim: str, policy: Path, tmp_path: Path, served: Served
) -> None:
    world = environment(
        f"openenv:{served.url}", options={"field": "message"}, sessions=3, timeout_s=10.0
    )
    is_whole(goes_on_after_a_kill(graph(policy, world, intro="go "), victim, tmp_path))
    wait_until(lambda: served.open == 0, 20)
    assert 1 <= served.most <= 3


def test_the_process_of_an_environment_is_killed_and_its_episodes_are_played_again(
    policy: Path, folder: Path, tmp_path: Path
) -> None:
    """Each kills its process once, after its first turn; what the policy said is told again."""
    world = environment("counted:world", options={"folder": str(folder)}, sessions=4, tries=3)
    g = Graph("killed")
    rows = [
        {"prompt": f"{n}=", "seed": n, "kills_once": str(tmp_path / f"mark{n}")} for n in range(3)
    ]
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=4, slots=8)
    found = collect(world(generator, g.source(world.tasks(rows, epochs=1))), rows=3).to_pylist()
    assert [row["error"] for row in found] == [None] * 3
    assert all(set(row["turn"]) == {-1, 0, 1} for row in found)
    assert not held(folder)
