"""Runs whose processes are killed and stopped at random moments, by seeds: environments, tools,
agents. The ledger is clean, every turn is charged once, all sessions and sandboxes are given back,
and nothing is left on the machine.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from episode_rig import LIMITS, episode_graph, nothing_is_left, rollouts
from random_strikes import Place, RandomStriking, Strike, schedule
from rigs.machine import wait_until
from rigs.policy import CHAT_TEMPLATE
from rigs.worlds import gym_shaped
from rigs.worlds.served_alone import ServedAlone
from test_agent_runs import reward, talker
from test_environment_runs import graph as world_graph
from test_tool_runs import boxed, needs_sandbox
from test_tool_runs import graph as tool_graph
from turn_book import TurnBook

from dataflow import Graph, Result, run
from dataflow.history.verify.verdict import verify
from operators.environments import environment

pytestmark = [pytest.mark.usefixtures("forked", "one_core", "machine"), pytest.mark.timeout(400)]


SLOW = pytest.mark.slow


SEED, AT_ONCE, BLOWS = 0, 16, 7


"""Of the runs; rollouts under way beside evaluations: 4 prompts of a step of 2 rollouts, and as
many ahead."""


WORKERS = (Place("generator"), Place("trainer"))


def places(episode: str, deepest: int) -> list[Place]:
    """The workers of a run, and what the episode's has started."""
    return [*WORKERS, *(Place(episode, below) for below in range(deepest + 1))]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all temporary files go, which must be gone in the end."""
    short = Path(tempfile.mkdtemp(prefix="kills-", dir="/tmp"))  # sockets have short names
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield short
    left = sorted(path.name for path in short.iterdir())
    shutil.rmtree(short)
    assert left == [], "temporary files are left"


def struck(
    g: Graph,
    episode: str,
    blows: Sequence[Strike],
    tmp_path: Path,
    *,
    server: Callable[[], int] | None = None,
) -> tuple[Result, RandomStriking]:
    """The run, under these blows; what holds of all such runs is asserted."""
    striking = RandomStriking(tmp_path / "runs", blows, server=server)
    book = TurnBook(tmp_path / "turns.jsonl", episode)
    for name, kept in (("generator", book.kept_by), ("trainer", striking.held)):
        operator = g.operators[name]
        object.__setattr__(operator, "build", kept(operator).build)
    striking.start()
    try:
        result = run(
            g, steps=striking.steps, runs=tmp_path / "runs", quiet=True, limits=LIMITS, seed=SEED
        )
    finally:
        striking.finish()
    assert result.verdict.clean, result.verdict.line
    assert f"{striking.steps * 4} trained + 0 dropped" in result.verdict.line, result.verdict.line
    assert verify(result.folder).clean
    rows = rollouts(result)
    assert rows.num_rows == striking.steps * 8
    assert len(
        {*zip(*(rows.column(name).to_pylist() for name in ("group_id", "position")), strict=True)}
    ) == len(rows)
    assert not pc.any(pc.is_valid(rows.column("error"))).as_py(), set(
        rows.column("error").to_pylist()
    )
    again = book.drawn_again(rows, seed=SEED, source="prompts")
    most = AT_ONCE * striking.kills("generator", episode)
    assert again <= most, f"{again} turns were drawn again, of {most} that may have been under way"
    nothing_is_left(result)
    return result, striking


# Environments in the run's processes


def in_process(policy: Path, folder: Path, **knobs: Any) -> Graph:
    folder.mkdir()
    world = environment(
        "gym-shaped:world",
        options={"folder": str(folder), **knobs},
        action=gym_shaped.as_said,
        sessions=8,
        processes=2,
        tries=6,
        timeout_s=4.0,
    )
    return world_graph(policy, world)


def all_are_closed(folder: Path, striking: RandomStriking) -> None:
    """But those whose processes had to end with them: blows, and worlds that hang or end theirs."""
    ended = {pid for wrong, pid in gym_shaped.gone_wrong(folder) if wrong in ("hang", "die")}
    left = {*gym_shaped.left_open(folder)} - striking.hit - ended
    assert not left, f"environments of {left} were not closed"
    assert gym_shaped.instances(folder) >= 8


@pytest.mark.usefixtures("temporary")
def test_a_run_whose_environment_is_killed_and_stopped_at_random_is_whole(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where functions run, what forks these, and a stopped generator: no turn is drawn twice."""
    gym_shaped.known(monkeypatch)
    worlds = [Place("reward", 2), Place("reward", 1)]
    blows = schedule(7, worlds, 2, kills=1.0) + schedule(8, [Place("generator")], 1, kills=0.0)
    _, striking = struck(in_process(policy, tmp_path / "worlds"), "reward", blows, tmp_path)
    assert striking.kills("generator", "reward") == 0
    all_are_closed(tmp_path / "worlds", striking)


@SLOW
@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("seed", range(4))
def test_a_run_of_worlds_that_go_wrong_whose_processes_are_killed_at_random_is_whole(
    seed: int, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worlds that raise, hang, die, answer 10 MB, are over without a reward: once for each task, so
    that another try makes up for it.
    """
    gym_shaped.known(monkeypatch)
    g = in_process(policy, tmp_path / "worlds", goes_wrong=True)
    _, striking = struck(g, "reward", schedule(seed, places("reward", 2), BLOWS), tmp_path)
    assert len(gym_shaped.gone_wrong(tmp_path / "worlds")) > 3
    all_are_closed(tmp_path / "worlds", striking)


# Environments of a server


@SLOW
@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("seed", range(4))
def test_a_run_whose_server_of_environments_is_killed_too_is_whole(
    seed: int, policy: Path, tmp_path: Path
) -> None:
    pytest.importorskip(
        "websockets", reason="websockets is not installed; pip install dataflow-rl[openenv]"
    )
    with ServedAlone(tmp_path, capacity=4) as served:
        options = {"field": "message"}
        world = environment(
            f"openenv:{served.url}", options=options, sessions=4, tries=6, timeout_s=20.0
        )
        blows = schedule(seed, [*places("reward", 2), Place("server")], BLOWS + 1)
        struck(
            world_graph(policy, world, intro="go "),
            "reward",
            blows,
            tmp_path,
            server=lambda: served.pid,
        )
        wait_until(lambda: len({*served.sessions()}) == 1, 30, "the end of all sessions")
        assert served.most() <= 4 <= served.begun()
        assert served.lives == 1 + sum(
            blow.place.worker == "server" and blow.stopped_s is None for blow in blows
        )


# Tools, a sandbox for each rollout


@SLOW
@needs_sandbox
@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_sandboxes_whose_processes_are_killed_at_random_gives_all_back(
    seed: int, policy: Path, tmp_path: Path
) -> None:
    g = tool_graph(policy, dataclasses.replace(boxed, tries=6))
    struck(g, "boxed", schedule(seed, places("boxed", 3), BLOWS), tmp_path)


# Agents


@SLOW
@pytest.mark.usefixtures("fresh", "temporary")
@pytest.mark.parametrize("seed", range(4))
def test_a_run_of_agents_whose_processes_are_killed_at_random_is_whole_and_ends_its_programs(
    seed: int, policy: Path, tmp_path: Path
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(policy, chatty)
    (chatty / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    g = episode_graph(chatty, dataclasses.replace(talker, tries=6), reward, name="agents")
    result, _ = struck(g, "talker", schedule(seed, places("talker", 2), BLOWS), tmp_path)
    for row in rollouts(result).to_pylist():
        seen, tokens, turns = (
            json.loads(row["talker"]),
            np.array(row["tokens"]),
            np.array(row["turn"]),
        )
        assert len(seen) == int(row["answer"]) == max(turns) + 1
        for turn, (_, ids, _) in enumerate(seen):
            assert tokens[turns == turn].tolist() == ids, (
                "the program that ended well was told each of its turns"
            )
