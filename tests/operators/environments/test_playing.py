"""An environment played as an episode: what the policy hears, what it is worth, and whose failure
is whose.
"""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rigs.worlds.counted import known, opened

from dataflow import Graph, GraphError, Model
from dataflow.errors import RecordError, WorldFailed
from operators import Generator
from operators.environments import environment
from operators.environments.session import SYSTEMS, System
from operators.episodes.chat import EpisodeOver


@dataclasses.dataclass
class Spoken:
    """A chat whose policy says what it is told to."""

    says: Sequence[str]
    heard: list[str] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    is_cut_off: bool = False
    invalids: list[str] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> int:
        return len(self.rewards)

    async def say(self, *, max_tokens: int | None = None) -> str:
        if self.turns == len(self.says):
            raise EpisodeOver
        self.rewards.append(0.0)
        return self.says[self.turns - 1]

    def hear(self, text: str) -> None:
        if text:
            self.heard.append(text)

    def reward(self, value: float) -> None:
        self.rewards[-1] += value

    def invalid(self, why: str) -> None:
        self.invalids.append(why)

    def cut_off(self) -> None:
        self.is_cut_off = True


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)


def played(
    chat: Spoken, folder: Path, task: dict[str, Any], *, prompt: str = "hello", **knobs: Any
) -> float:
    world = environment("counted:world", options={"folder": str(folder)}, **knobs)

    async def bounded() -> float:
        async with asyncio.timeout(20):
            value: float = await world(chat, prompt=prompt, task=json.dumps(task))
            return value

    value = asyncio.run(bounded())
    assert not opened(folder), "a session that nobody gave back"
    return value


def test_what_the_environment_says_is_heard_and_its_rewards_stand_at_their_turns(
    tmp_path: Path,
) -> None:
    chat = Spoken(["a", "z", "b"])
    assert played(chat, tmp_path, {"seed": 7, "turns": 3}) == 2.0
    assert (
        chat.heard == ["7=", "a=", "z=", "b="]
        and chat.rewards == [1.0, 0.0, 1.0]
        and not chat.is_cut_off
    )


def test_bytes_that_an_environment_could_not_decode_are_heard_and_stand_in_prompts(
    tmp_path: Path,
) -> None:
    half = b"caf\xe9".decode("utf-8", "surrogateescape")
    chat = Spoken(["a", "b"])
    played(chat, tmp_path, {"seed": 7}, wording=lambda raw: half)
    assert chat.heard == ["caf\N{REPLACEMENT CHARACTER}"] * 3
    world = environment(
        "counted:world", options={"folder": str(tmp_path)}, wording=lambda raw: half
    )
    assert world.tasks(range(1)).source[0]["prompt"] == "caf\N{REPLACEMENT CHARACTER}"


def test_what_the_prompt_says_already_is_not_heard_a_second_time(tmp_path: Path) -> None:
    for prompt in ("go: 7=", json.dumps([{"role": "user", "content": "go: 7="}])):
        chat = Spoken(["a", "b"])
        played(chat, tmp_path, {"seed": 7}, prompt=prompt)
        assert chat.heard == ["a=", "b="]


def test_an_environment_that_cuts_off_is_told_from_one_that_is_over(tmp_path: Path) -> None:
    chat = Spoken(["a", "b"])
    assert played(chat, tmp_path, {"seed": 7, "cut": True}) == 2.0
    assert chat.is_cut_off


def test_a_policy_whose_turns_are_used_up_keeps_what_it_had(tmp_path: Path) -> None:
    assert played(Spoken(["a", "b"]), tmp_path, {"seed": 7, "turns": 3}) == 2.0


def test_what_nobody_has_scored_has_no_value(tmp_path: Path) -> None:
    """Where all rewards are negative, 0 would be the best of them."""
    chat = Spoken(["7", "8"])
    for silent in (Spoken([]), chat):
        with pytest.raises(EpisodeOver):
            played(silent, tmp_path, {"seed": 7, "strict": True})
    assert chat.invalids == ["say a letter"] * 2


def test_wording_and_actions_are_the_users_to_choose(tmp_path: Path) -> None:
    chat = Spoken(["so: a", "so: z"])
    value = played(
        chat,
        tmp_path,
        {"seed": 7},
        wording=lambda raw: f"<{raw}>",
        action=lambda said: said[-1],
        total=max,
    )
    assert value == 1.0 and chat.heard == ["<7=>", "<a>", "<z>"]


@pytest.mark.parametrize(
    ("invalid", "value", "heard", "rewards"),
    [
        ("again", 0.5, ["7=", "say a letter", "a="], [-0.5, 1.0]),
        ("end", -0.5, ["7=", "say a letter"], [-0.5]),
        ("b", 2.0, ["7=", "b=", "a="], [1.0, 1.0]),
    ],
)
def test_what_an_invalid_action_leads_to_is_stated(
    invalid: Any, value: float, heard: list[str], rewards: list[float], tmp_path: Path
) -> None:
    chat = Spoken(["7", "a"])
    turns = 2 if invalid == "b" else 1
    task = {"seed": 7, "strict": True, "turns": turns}
    assert played(chat, tmp_path, task, invalid=invalid, invalid_reward=-0.5) == value
    assert chat.heard == heard and chat.rewards == rewards and chat.invalids == ["say a letter"]


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (
            {"does": "raise"},
            r"'counted:world' could not go on; found KeyError: 'the world is broken'",
        ),
        ({"does": "wait"}, r"'counted:world' could not go on; found no answer within 1 s"),
        ({"does": "lie"}, r"a reward that is no finite number; found nan"),
        ({"does": "mute"}, r"is over and has given no reward; found none in 1 turns"),
        ({"over": True}, r"is over before the policy has said anything"),
    ],
)
def test_what_fails_in_the_environment_is_the_worlds_failure_and_never_a_reward(
    task: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(WorldFailed, match=found):
        played(
            Spoken(["a"] * 9),
            tmp_path,
            {"seed": 7, **task},
            timeout_s=1.0 if task.get("does") == "wait" else 20.0,
        )
    assert not opened(tmp_path)


def test_a_session_is_used_for_one_episode_after_the_other_and_renewed_after_a_failure(
    tmp_path: Path,
) -> None:
    world = environment("counted:world", options={"folder": str(tmp_path)}, sessions=1, ahead=0)

    async def some() -> None:
        for does in (None, None, "raise", None):
            try:
                await world(
                    Spoken(["a", "b"]), prompt="", task=json.dumps({"seed": 7, "does": does})
                )
            except WorldFailed:
                assert does == "raise"

    asyncio.run(some())
    assert len(list(tmp_path.iterdir())) == 2 and not opened(tmp_path)


def test_a_range_of_seeds_makes_prompts_of_what_the_environment_says_first(tmp_path: Path) -> None:
    world = environment("counted:world", options={"folder": str(tmp_path)})
    train, held_out = world.tasks(range(3)), world.tasks(range(3, 5), intro="Go. ", name="held_out")
    assert list(train.source) == [
        {"prompt": f"{seed}=", "task": json.dumps({"seed": seed})} for seed in range(3)
    ]
    assert [row["prompt"] for row in held_out.source] == [
        "Go. 3=",
        "Go. 4=",
    ] and held_out.count() == 2


def test_of_an_environment_that_lacks_a_package_the_message_says_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_world.py").write_text("def make(name): import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = System(module="lacking_world", package="json", extra="none")
    monkeypatch.setitem(SYSTEMS, "lacking", lacking)
    with pytest.raises(RecordError, match="'no_such_package'; install what it imports"):
        next(iter(environment("lacking:world").tasks(range(1)).source))


def test_a_row_whole_is_a_task(tmp_path: Path) -> None:
    from dataflow import collect

    world = environment("counted:world", options={"folder": str(tmp_path)})
    rows = [{"prompt": "hi", "answer": "4", "seed": 3}]
    made = collect(
        Graph("g").source(world.tasks(rows, columns=("answer",), epochs=1)), rows=1
    ).to_pylist()[0]
    assert (made["prompt"], made["answer"], json.loads(made["task"])) == (
        "hi",
        "4",
        {"answer": "4", "seed": 3},
    )


def test_two_that_declare_the_same_environment_have_one_operator(tmp_path: Path) -> None:
    g = Graph("twice")
    generator = Generator(Model("policies/none"), group_size=2)
    for name in ("prompts", "held_out"):
        world = environment("counted:world", options={"folder": str(tmp_path)})
        rollouts = world(generator, g.source(world.tasks(range(4), name=name)))
    assert (
        set(g.operators) == {"prompts", "held_out", "generator", "reward"}
        and "reward" in rollouts.columns
    )


def test_what_cannot_be_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "openenv", dataclasses.replace(SYSTEMS["openenv"], package="json"))
    monkeypatch.setitem(
        SYSTEMS, "nemo-gym", dataclasses.replace(SYSTEMS["nemo-gym"], package="json")
    )
    for name in ("gymnasum:CartPole-v1", "CartPole-v1", "gymnasium:"):
        with pytest.raises(GraphError, match=r"named by its system and its name there, but got"):
            environment(name)
    with pytest.raises(
        GraphError, match=r"has 4 processes and sessions=2; give each a session at least"
    ):
        environment("counted:world", sessions=2, processes=4)
    with pytest.raises(GraphError, match=r"has uses=0, which is no number of sessions"):
        environment("counted:world", uses=0)
    with pytest.raises(GraphError, match=r"makes no tasks of seeds, but got range\(0, 3\)"):
        environment("nemo-gym:http://127.0.0.1:1").tasks(range(3))
    with pytest.raises(
        GraphError, match=r"is asked when an episode begins, and gives no prompt; give intro="
    ):
        environment("openenv:ws://127.0.0.1:1").tasks(range(3))


def test_an_environment_whose_package_is_missing_is_refused_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = dataclasses.replace(SYSTEMS["gymnasium"], package="no_such_package")
    monkeypatch.setitem(SYSTEMS, "gymnasium", gone)
    with pytest.raises(
        GraphError,
        match=r"imports 'no_such_package', which is not installed; pip install .*\[gymnasium\]",
    ):
        environment("gymnasium:CartPole-v1")
