"""Environments of TRL: what the adapter makes of a class, without processes."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import GraphError
from operators.environments import trl_environment
from operators.episodes.chat import EpisodeOver


class Counter:
    """As a user of TRL writes one."""

    def reset(self, target: int, **row: Any) -> str | None:
        self.counter, self.target, self.row = 0, target, row
        return f"Count to {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def add(self, step: int) -> int:
        """Adds.

        Args:
            step: How much.
        """
        if step < 0:
            raise ValueError("no way back")
        self.counter += step
        return self.counter

    async def look(self) -> str:
        """Tells the counter."""
        return str(self.counter)

    def _hidden(self) -> None: ...


class FakeChat:
    """Says calls as they were given, and hears their results."""

    def __init__(self, *turns: list[tuple[str, dict[str, Any]]]) -> None:
        self.left, self.heard, self.rewritten = list(turns), list[str](), None

    async def session(self, toolset: Any) -> Any:
        self.worlds = await toolset.open()
        return self.worlds

    def rewrite(self, history: Any) -> None:
        self.rewritten = history

    async def say(self) -> Any:
        if not self.left:
            raise EpisodeOver("the policy has no turn left")
        return SimpleNamespace(tool_calls=self.left.pop(0))

    async def call(self, reply: Any) -> None:
        for name, arguments in reply.tool_calls:
            self.heard.append(await self.worlds.call(name, arguments, timeout_s=5.0, characters=100))


CHAT = json.dumps([{"role": "user", "content": "Go. "}])


def play(chat: FakeChat, **knobs: Any) -> Any:
    world = trl_environment(Counter, **knobs)
    return asyncio.run(world.function(chat, prompt=CHAT, target=3))


def test_a_class_of_trls_is_reset_with_its_row_and_judges_what_its_tools_were_called_with() -> None:
    chat = FakeChat([("add", {"step": 1}), ("add", {"step": 2})], [("look", {})], [])
    assert play(chat) == 1.0
    assert chat.heard == ["1", "3", "3"]
    assert chat.rewritten == [{"role": "user", "content": "Go. Count to 3."}]
    assert chat.worlds.world.row == {"prompt": json.loads(CHAT)}


def test_what_a_method_raises_is_its_result_and_no_failure() -> None:
    chat = FakeChat([("add", {"step": -1})], [])
    assert play(chat) == 0.0 and chat.heard == ["{'error': 'no way back'}"]


def test_an_environment_ends_after_its_rounds_of_calls_and_where_the_policy_has_no_turn_left() -> None:
    chat = FakeChat(*[[("add", {"step": 1})]] * 5)
    assert play(chat, rounds=3) == 1.0 and len(chat.left) == 1
    chat = FakeChat(*[[("add", {"step": 1})]] * 3)
    assert play(chat) == 1.0


def test_an_environment_of_trls_reads_what_reset_names_and_writes_a_column_where_it_has_a_reward() -> None:
    world = trl_environment(Counter, columns=("level",), name="count")
    assert list(world.signature.annotations) == ["prompt", "target", "level"]
    assert world.name == "count" and str(world.signature.output) == "double"
    names = [each["function"]["name"] for each in world.tools[0].definitions()]
    assert names == ["add", "look"]

    class Bare:
        def reset(self) -> None: ...

    assert trl_environment(Bare).signature.output is None
    with pytest.raises(GraphError, match="has a method reset"):
        trl_environment(object)
