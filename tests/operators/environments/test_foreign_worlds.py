"""Environments and rollout functions of TRL, tasksets of verifiers: what the adapters make of them,
no processes.
"""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import GraphError, WorldFailed
from operators.environments import trl_environment, trl_environments, verifiers_environment
from operators.environments.beside import trl_rollout as beside_trl
from operators.environments.beside import verifiers_rollout as beside_verifiers
from operators.environments.trl_form import TrlSession, TrlTools
from operators.episodes.chat import EpisodeOver
from operators.tools.toolbox import ToolThreads


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
            self.heard.append(
                await self.worlds.call(name, arguments, timeout_s=5.0, characters=100)
            )


def test_an_instance_in_which_a_call_is_still_at_work_is_reset_no_more() -> None:
    release = threading.Event()

    class Slow(Counter):
        def wait(self) -> str:
            """Waits."""
            release.wait(60.0)
            return "done"

    async def work() -> None:
        session = await TrlTools(Slow, 4).open()
        first = session.world
        assert "took more than 0.05 s" in await session.call(
            "wait", {}, timeout_s=0.05, characters=100
        )
        await session.reset({"target": 1}, 20.0)
        assert session.world is not first and session.world.target == 1
        second = session.world
        await session.reset({"target": 2}, 20.0)
        assert session.world is second
        release.set()

    asyncio.run(work())


def test_calls_that_never_came_back_are_the_worlds_failure_and_no_result() -> None:
    class Lost(ToolThreads):
        async def call(self, *arguments: Any) -> Any:
            raise WorldFailed("calls of tools never came back")

    session = TrlSession(Counter(), Counter, Lost())
    with pytest.raises(WorldFailed, match="never came back"):
        asyncio.run(session.call("look", {}, timeout_s=1.0, characters=100))


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


def test_an_environment_ends_after_its_rounds_of_calls_and_where_the_policy_has_no_turn_left() -> (
    None
):
    chat = FakeChat(*[[("add", {"step": 1})]] * 5)
    assert play(chat, rounds=3) == 1.0 and len(chat.left) == 1
    chat = FakeChat(*[[("add", {"step": 1})]] * 3)
    assert play(chat) == 1.0


def test_a_trl_environment_reads_what_reset_names_and_writes_a_column_if_it_has_a_reward() -> None:
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
    with pytest.raises(GraphError, match="names nothing that is there"):
        trl_environments("nowhere.py:WORLDS")


def answered(place: str, body: dict[str, Any]) -> Any:
    """A policy that says how long its prompt is."""
    ids = [len(body["token_ids"])]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": [{"logprob": -0.5}]}}]}


SETTINGS = {"tokenizer": "nowhere", "max_tokens": 4, "gives": "env_reward"}


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    ids, drawn, logprobs, _ = trainer.vllm_generation.generate(
        prompts=[[1, 2]], images=None, num_generations=1
    )
    assert (ids, drawn, logprobs) == ([[1, 2]], [[2]], [[[-0.5]]])
    return {
        "prompt_ids": ids,
        "completion_ids": [[2, 9]],
        "logprobs": [[-0.5, 0.0]],
        "env_mask": [[1, 0]],
        "env_reward": [len(prompts)],
    }


def test_a_rollout_func_is_told_what_it_cannot_have_and_held_to_what_was_drawn(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(beside_trl, "ask", answered)
    assert beside_trl.rolled_out(rollout, {"prompt": "a"}, SETTINGS) == 1

    def lying(prompts: Any, trainer: Any) -> dict[str, Any]:
        return {**rollout(prompts, trainer), "env_mask": [[1, 1]]}

    with pytest.raises(ValueError, match="other tokens than the policy has said"):
        beside_trl.rolled_out(lying, {"prompt": "a"}, SETTINGS)
    with pytest.raises(ValueError, match="returned no .*logprobs"):
        beside_trl.rolled_out(
            lambda prompts, trainer: {"prompt_ids": [[]]}, {"prompt": "a"}, SETTINGS
        )
    with pytest.raises(AttributeError, match=r"trainer\.model cannot be had"):
        beside_trl.rolled_out(lambda prompts, trainer: trainer.model, {"prompt": "a"}, SETTINGS)


def called(*turns: list[str]) -> Any:
    """A policy that calls tools in each turn, without arguments, until it has no turn left."""
    left = list(turns)

    def ask(place: str, body: dict[str, Any]) -> Any:
        ask.heard = [each["content"] for each in body["messages"]]  # type: ignore[attr-defined]
        if not left:
            raise beside_trl.NoTurnLeft
        calls = [
            {"id": name, "function": {"name": name, "arguments": "{}"}} for name in left.pop(0)
        ]
        return {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": calls}}]}

    return ask


@pytest.mark.parametrize(
    ("turns", "rounds"),
    [([["look", "nothing"], []], 8), ([["look"], ["look"]], 8), ([["look"], ["look"]], 1)],
    ids=["it calls no more", "it has no turn left", "it has no round left"],
)
def test_an_environment_in_a_program_is_called_until_an_end_and_then_asked_for_its_reward(
    turns: list[list[str]], rounds: int, monkeypatch: Any
) -> None:
    ask = called(*turns)
    monkeypatch.setattr(beside_trl, "ask", ask)
    row = {"prompt": json.loads(CHAT), "target": 0}
    assert beside_trl.played(Counter(), row, rounds) == 1.0
    results = {
        8: ["0", "{'error': 'Tool nothing not found.'}"] if len(turns[0]) > 1 else ["0", "0"],
        1: ["0"],
    }[rounds]
    assert [each for each in ask.heard[1:] if each] == results and ask.heard[0] == "Go. Count to 0."


def episode(*rewards: float | None, ok: bool = True, errors: Any = ()) -> Any:
    values = {
        str(at): None if each is None else SimpleNamespace(value=each)
        for at, each in enumerate(rewards)
    }
    trace = SimpleNamespace(rewards=values, errors=[], agent=SimpleNamespace(trainable=True))
    return SimpleNamespace(ok=ok, errors=list(errors), traces=[trace])


def test_a_trace_of_verifiers_is_worth_the_sum_of_its_rewards_or_nothing_or_has_failed() -> None:
    assert beside_verifiers.reward_of(episode(1.0, None, 0.5)) == 1.5
    assert beside_verifiers.reward_of(episode(None)) is None
    error = SimpleNamespace(type="SandboxError", message="no\nbox")
    with pytest.raises(beside_verifiers.RolloutFailed, match="SandboxError: no box"):
        beside_verifiers.reward_of(episode(1.0, ok=False, errors=[error]))


def test_a_taskset_of_verifiers_runs_in_the_interpreter_that_was_named(tmp_path: Path) -> None:
    world = verifiers_environment("addition-v1", python="/usr/bin/env", path=[str(tmp_path)])
    assert world.python == "/usr/bin/env" and json.loads(world.what)["path"] == [str(tmp_path)]
    assert world.env["PATH"].startswith("/usr/bin")
    with pytest.raises(GraphError, match="could not list the tasks of 'reward'"):
        world.tasks(1)
    with pytest.raises(GraphError, match="has no tokenizer"):
        verifiers_environment("addition-v1", python="python", client="train")
