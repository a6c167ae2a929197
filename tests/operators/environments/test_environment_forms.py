"""The adapters of packages, against modules of the same shape; the packages are in
test_real_environments.
"""

import asyncio
import importlib.machinery
import random
import sys
import types
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataflow.errors import WorldFailed
from operators.environments.declaration import environment
from operators.environments.session import InvalidAction, made


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> types.ModuleType:
    """A module of the test's own in a package's place."""
    found = types.ModuleType(name)
    found.__spec__ = importlib.machinery.ModuleSpec(name, None)
    found.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, found)
    return found


# Gymnasium


class Space:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def contains(self, action: Any) -> bool:
        return bool(self.fits(action))


class Discrete(Space):
    start, n = 0, 2

    def fits(self, action: Any) -> bool:
        return isinstance(action, int) and 0 <= action < self.n


class Box(Space):
    shape, dtype, most = (2,), np.dtype(np.float32), 1.0

    def fits(self, action: Any) -> bool:
        return action.shape == self.shape and bool((abs(action) <= self.most).all())


class Others(Space):
    fits = None


class Line:
    """Right is worth 1; three steps, or two where it is cut off."""

    def __init__(self, space: Space, limit: int) -> None:
        self.action_space, self.limit, self.at, self.closed = space, limit, 0, False

    def reset(self, *, seed: int, options: Any) -> tuple[Any, dict[str, Any]]:
        self.at, self.options = 0, options
        return np.array([seed, 0.123456]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return (
            np.array([self.at, 0.5]),
            float(np.asarray(action).sum()),
            self.at == 3,
            self.at == self.limit,
            {},
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gymnasium(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    lines: list[Line] = []
    kinds = {
        "Discrete": Discrete,
        "Box": Box,
        "Text": Others,
        "MultiDiscrete": Others,
        "MultiBinary": Others,
    }
    spaces = module(monkeypatch, "gymnasium.spaces", **kinds)

    def make(name: str, *, space: Space = Discrete(), limit: int = 9) -> Line:
        lines.append(Line(space, limit))
        return lines[-1]

    module(monkeypatch, "gymnasium", make=make, spaces=spaces)
    return lines


def test_gymnasium_tells_what_is_over_from_what_is_cut_off(gymnasium: list[Line]) -> None:
    for limit, ends in ((9, (True, False)), (2, (False, True))):
        session = made("gymnasium:Line-v0", {"limit": limit})
        first = run(session.reset({"options": {"low": 1}}, 7))
        assert first.text == "[7.0, 0.1235]" and gymnasium[-1].options == {"low": 1}
        while True:
            seen = run(session.step(session.read("so I go 1")))
            assert seen.reward == 1.0
            if seen.terminated or seen.truncated:
                break
        assert (seen.terminated, seen.truncated) == ends
        run(session.close())
        assert gymnasium[-1].closed


def test_gymnasium_actions_are_read_as_the_space_has_them(gymnasium: list[Line]) -> None:
    numbers = made("gymnasium:Line-v0", {})
    assert numbers.read("0 or 1? 1") == 1 and type(numbers.read("1")) is int
    words = made("gymnasium:Line-v0", {"actions": ("left", "right")})
    assert words.read("not left but right") == 1
    arrays = made("gymnasium:Line-v0", {"space": Box()})
    assert arrays.read("[1, 2] no, [0.5, -1]").tolist() == [0.5, -1.0]
    endless = made("gymnasium:Line-v0", {"space": Box(most=np.inf)})
    for session, said in (
        (numbers, "left"),
        (numbers, "7"),
        (words, "up"),
        (arrays, "[1, 2, 3]"),
        (arrays, "[9, 9]"),
        (endless, "[1e999, 0]"),
        (endless, "[NaN, 0]"),
    ):
        with pytest.raises(InvalidAction, match="That is no action; say "):
            session.read(said)
    with pytest.raises(TypeError, match="which no text is read as; give"):
        made("gymnasium:Line-v0", {"space": SimpleNamespace()}).read("1")


def test_gymnasium_is_looked_at_before_anybody_plays(gymnasium: list[Line]) -> None:
    for options, found in (
        ({}, None),
        ({"space": Box()}, None),
        (
            {"space": SimpleNamespace()},
            "which no text is read as; give environment(..., action=function)",
        ),
        ({"nothing": 1}, "'gymnasium:Line-v0' cannot be made; found TypeError: "),
    ):
        said = run(environment("gymnasium:Line-v0", options=options).look())
        assert said is None if found is None else found in said
    assert all(line.closed for line in gymnasium)
    assert not environment("gymnasium:Line-v0", action=int).can_look


# TextArena


class Duel:
    """Two players say a number below the one drawn; draws one in each step, from Python's own
    generator.
    """

    def __init__(self, **options: Any) -> None:
        self.state = SimpleNamespace(current_player_id=0)
        self.options = options

    def reset(self, *, num_players: int, seed: int) -> None:
        self.players, self.drawn = num_players, random.randint(0, 999)
        self.seen: dict[int, list[Any]] = {
            player: [(-1, f"rules for {player}", None)] for player in range(num_players)
        }

    def step(self, *, action: str) -> tuple[bool, dict[str, Any]]:
        player = self.state.current_player_id
        for seen in self.seen.values():
            seen.append((player, action, None))
        self.drawn = random.randint(0, 999)
        self.seen[player].append((-1, f"drawn {self.drawn}", None))
        self.state.current_player_id = (player + 1) % self.players
        return action == "end", {}

    def get_observation(self) -> tuple[int, list[Any]]:
        player = self.state.current_player_id
        seen, self.seen[player] = self.seen[player], []
        return player, seen

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: 1.0, 1: -1.0}, {0: {"reason": "well done"}, 1: {"reason": "a pity"}}


class Wrapper:
    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class LLMObservationWrapper(Wrapper):
    def get_observation(self) -> tuple[int, str]:
        raise AssertionError("it repeats all that was said before")


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "textarena.wrappers", LLMObservationWrapper=LLMObservationWrapper)

    def make(name: str, **options: Any) -> Any:
        return Wrapper(LLMObservationWrapper(Duel(**options)))

    module(monkeypatch, "textarena", make=make, Wrapper=Wrapper)


def test_textarena_games_say_what_is_new_and_what_they_were_worth(textarena: None) -> None:
    session = made("textarena:Duel-v0", {})
    assert run(session.reset({}, 7)).text == "rules for 0"
    seen = run(session.step(session.read("a")))
    assert seen.text.startswith("drawn ") and seen.reward is None and not seen.terminated
    seen = run(session.step("end"))
    assert (seen.reward, seen.terminated) == (1.0, True) and seen.text.endswith("\nwell done")


def test_a_game_with_a_seed_is_the_same_game_whatever_is_played_beside_it(textarena: None) -> None:
    def played(*sessions: Any) -> list[list[str]]:
        for session in sessions:
            run(session.reset({}, 7))
        return [[run(session.step("a")).text for session in sessions] for _ in range(3)]

    alone = played(made("textarena:Duel-v0", {}))
    beside = played(*(made("textarena:Duel-v0", {}) for _ in range(3)))
    assert beside == [row * 3 for row in alone]


def test_an_opponent_has_the_other_seats(textarena: None) -> None:
    heard: list[str] = []

    def opponent(text: str) -> str:
        heard.append(text)
        return "b"

    session = made("textarena:Duel-v0", {"players": 2, "seat": 1, "opponent": opponent})
    first = run(session.reset({}, 7))
    assert heard == ["rules for 0"] and first.text == "rules for 1\n[Player 0] b"
    seen = run(session.step("end"))
    assert (seen.reward, seen.terminated) == (-1.0, True)
    with pytest.raises(ValueError, match="has 2 players; give one"):
        made("textarena:Duel-v0", {"players": 2})


# reasoning-gym


class Sums:
    def __init__(self, name: str, *, seed: int, size: int, most: int = 9) -> None:
        self.seed, self.most, self.size = seed, most, size

    def __getitem__(self, at: int) -> dict[str, Any]:
        draw = random.Random(self.seed + at)
        one, other = draw.randint(0, self.most), draw.randint(0, self.most)
        return {"question": f"{one}+{other}=", "answer": str(one + other), "metadata": {}}

    def score_answer(self, *, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    from operators.environments import reasoning_gym_form

    reasoning_gym_form._items.cache_clear()

    def extract_answer(text: str) -> str | None:
        return text.partition("<answer>")[2].partition("</answer>")[0] or None

    module(monkeypatch, "reasoning_gym", create_dataset=Sums)
    module(monkeypatch, "reasoning_gym.utils", extract_answer=extract_answer)


def test_reasoning_gym_items_are_numbered_by_seeds_and_scored_by_their_data_set(
    reasoning_gym: None,
) -> None:
    session = made("reasoning-gym:sums", {"most": 5, "attempts": 2})
    first = run(session.reset({}, 4))
    assert first.text == Sums("sums", seed=0, size=1, most=5)[4]["question"]
    answer = str(sum(map(int, first.text.removesuffix("=").split("+"))))
    seen = run(session.step(session.read("<answer>none</answer>")))
    assert (
        not seen.terminated
        and seen.reward is None
        and seen.text == "That is not right (0.25 of 1). Try again."
    )
    seen = run(session.step(session.read(f"I think: <answer>{answer}</answer>")))
    assert (seen.reward, seen.terminated) == (1.0, True)
    run(session.reset({}, 4))
    run(session.step("none"))
    seen = run(session.step("none"))
    assert (seen.reward, seen.terminated) == (0.25, True)


# SkyRL-gym


class Countdown:
    """Asks until it hears what the row says."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.truth, self.extras, self.closed = extras["reward_spec"]["ground_truth"], extras, False

    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return [
            *prompt,
            *({"role": "user", "content": text} for text in self.extras.get("more", ())),
        ], {}

    def step(self, action: str) -> dict[str, Any]:
        done = action == self.truth
        again = [] if done else [{"role": "user", "content": "again"}]
        short = {"postprocessed_action": action.strip()}
        return {"observations": again, "reward": float(done), "done": done, "metadata": {}, **short}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def skyrl_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **knobs: Any) -> Countdown:
        return Countdown(**knobs)

    module(monkeypatch, "skyrl_gym", make=make)


ROW = {"prompt": [{"role": "user", "content": "count"}], "reward_spec": {"ground_truth": "0"}}


def test_skyrl_gym_environments_are_made_of_rows(skyrl_gym: None) -> None:
    async def work() -> None:
        session = made("skyrl-gym:countdown", {"more": ["from 1"]})
        assert (await session.reset(ROW, 0)).text == "from 1"
        seen = await session.step("1")
        assert (seen.text, seen.reward, seen.terminated) == ("again", 0.0, False)
        seen = await session.step("0")
        assert (seen.text, seen.reward, seen.terminated) == ("", 1.0, True)
        with pytest.raises(
            WorldFailed,
            match="rewrites what the policy said; found '0'; let the generator stop there",
        ):
            await session.step("0 ")
        await session.close()

    run(work())
