"""Episodes of several replicas: prompts are shared out, turns come back to who asked, whoever
dies.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_rig import (
    LIMITS,
    STEPS,
    TURNS,
    episode_graph,
    goes_on_after_a_kill,
    nothing_is_left,
    rollouts,
)

from dataflow import Graph, run, scorer
from dataflow.errors import GraphError
from operators import episode

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]


@episode(max_turns=TURNS)
async def talk(chat: Any, answer: str) -> float:
    """As many turns as the prompt says; the number of the process that ran it."""
    for _ in range(int(answer)):
        said = await chat.say(max_tokens=4)
        chat.hear(f"{answer}{said[:1]}=")
    return float(os.getpid())


@scorer(isolate=False)
def reward(talk: float, completion: str) -> float:
    return (
        sum(letter in "abcdefghijklm" for letter in completion) / (1 + len(completion)) + 0.0 * talk
    )


def graph(policy: Path, **knobs: Any) -> Graph:
    return episode_graph(policy, talk, reward, **knobs)


@pytest.mark.parametrize("generators", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_of_an_episode_share_its_prompts_and_each_hears_its_own_turns(
    generators: int, policy: Path, tmp_path: Path
) -> None:
    replicas = {"talk": 2, "generator": generators}
    result = run(
        graph(policy), steps=STEPS, runs=tmp_path, quiet=True, replicas=replicas, limits=LIMITS
    )
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
    found = rollouts(result).to_pylist()
    assert len({row["talk"] for row in found}) == 2, "one pool of each replica's"
    for row in found:
        turns, mask = np.array(row["turn"]), np.array(row["mask"])
        assert row["error"] is None and set(turns[mask]) == set(range(int(row["answer"])))
        assert (mask == (turns >= 0)).all()
    nothing_is_left(result)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["talk", pytest.param("generator", marks=pytest.mark.slow)])
def test_a_run_whose_replica_of_an_episode_or_whose_generator_is_killed_goes_on_and_is_clean(
    victim: str, policy: Path, tmp_path: Path
) -> None:
    goes_on_after_a_kill(graph(policy), victim, tmp_path, replicas={"talk": 2})


def test_replicas_of_an_episode_neither_join_nor_leave_while_a_run_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    why = (
        "'talk' is an episode of 1 replicas, and cannot have 2 from some step on.*or more in its"
        " pool"
    )
    with pytest.raises(GraphError, match=why):
        run(graph(policy), steps=STEPS, runs=tmp_path, quiet=True, scale={2: {"talk": 2}})
