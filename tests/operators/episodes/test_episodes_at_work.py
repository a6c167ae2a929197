"""What counts as work of an episode's processes, and what is told of those that fail."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.policy import CHAT_TEMPLATE, tiny_policy
from structlog.testing import capture_logs

from dataflow import Graph, Model, WorldFailed, collect
from dataflow.errors import Unusable
from operators import Generator, Prompts, episode
from operators.episodes.chat import Chat
from operators.episodes.declaration import Episode
from operators.episodes.runtime import EpisodesRuntime
from operators.models.loading import load_tokenizer


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a chat template."""
    folder = tiny_policy(tmp_path_factory.mktemp("chatting"))
    tokenizer = load_tokenizer(Model(str(folder)))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("isolate", "share"), [(True, 0.5), (False, 0.0)])
def test_functions_that_wait_for_the_policy_are_not_at_work(isolate: bool, share: float) -> None:
    runtime = object.__new__(EpisodesRuntime)
    runtime.__dict__ |= {
        "_worlds": SimpleNamespace(open_calls=6),
        "_asked": dict.fromkeys("ab"),
        "_at_once": 8,
        "_episode": SimpleNamespace(works_beside=isolate),
    }
    assert runtime.beside() == share


def test_the_first_failure_of_each_cause_is_told_in_the_log(policy: Path) -> None:
    """Before as many groups were dropped as end a run; and once, however many fail."""

    @episode(isolate=False)
    async def falls(chat: Chat, answer: str) -> float:
        if answer == "world":
            raise WorldFailed("nobody is there")
        raise KeyError(answer)

    rows = [{"prompt": f"{n}=", "answer": "world" if n % 2 else "other"} for n in range(6)]
    g, generator = (
        Graph("falls"),
        Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=2, slots=4),
    )
    with capture_logs() as logs:
        found = collect(
            falls(generator, g.source(Prompts(rows, columns=("answer",), epochs=1))), rows=12
        )
    assert found.column("error").null_count == 0
    told = {line["cause"]: line["first"] for line in logs if line["event"] == "rollouts fail"}
    assert len([line for line in logs if line["event"] == "rollouts fail"]) == 2
    assert (
        "KeyError" in told["raised"]
        and "nobody is there" in told["world"]
        and told["world"].startswith("falls: ")
    )


HALF = b"caf\xe9".decode("utf-8", "surrogateescape")


"""What a program's output is read as that is no UTF-8."""


async def hears(chat: Chat) -> None:
    chat.hear(HALF)


async def rewrites(chat: Chat) -> None:
    chat.rewrite(HALF)


async def rewrites_messages(chat: Chat) -> None:
    chat.rewrite([{"role": "user", "content": HALF}])


async def begins(chat: Chat) -> None:
    other = chat.agent(HALF, HALF)
    other.hear(HALF)
    await other.say()


async def ends(chat: Chat) -> None:
    await chat.say(max_tokens=1)
    chat.hear(HALF)


async def asks_for_much(chat: Chat) -> None:
    await chat.say(max_tokens=1 << 40)


async def asks_for_a_part(chat: Chat) -> None:
    await chat.say(max_tokens=1.5)  # type: ignore[arg-type]


async def rewards(chat: Chat) -> None:
    await chat.say()
    chat.reward(float("inf"))


async def is_cancelled(chat: Chat) -> None:
    raise asyncio.CancelledError  # as a client library does whose own task was


async def says_nothing(chat: Chat) -> None:
    chat.rewrite([{"role": "user", "content": None}])


async def says_no_json(chat: Chat) -> None:
    chat.rewrite([{"role": "user", "content": "so", "temperature": float("nan")}])


async def calls_nothing(chat: Chat) -> None:
    chat.rewrite([{"role": "user", "content": "so"}, {"role": "assistant", "tool_calls": [5]}])


HARMS = {
    each.__name__: each
    for each in (hears, rewrites, rewrites_messages, begins, ends, asks_for_much)
}


FAILS = {
    "asks_for_a_part": (asks_for_a_part, "whole number"),
    "rewards": (rewards, "finite"),
    "is_cancelled": (is_cancelled, "raised: CancelledError"),
    "says_nothing": (says_nothing, "a role and a text"),
    "says_no_json": (says_no_json, "JSON"),
    "calls_nothing": (calls_nothing, "unusable"),
}


WITH_MESSAGES = ("rewrites_messages", "says_nothing", "says_no_json", "calls_nothing")


@pytest.mark.parametrize("chat", [False, True])
def test_what_a_world_says_is_made_sound_or_fails_its_own_rollout(
    chat: bool, chatting: Path
) -> None:
    """Whatever its bytes: the worker lives, and all others are trained."""
    names = [name for name in [*HARMS, *FAILS] if chat or name not in WITH_MESSAGES]

    @episode(isolate=False)
    async def harmed(chat: Chat, answer: str) -> str:
        await (HARMS.get(answer) or FAILS[answer][0])(chat)
        await chat.say(max_tokens=1)
        return HALF

    rows = [{"prompt": f"{n}=", "answer": name} for n, name in enumerate(names)]
    g, generator = (
        Graph("harms"),
        Generator(Model(str(chatting)).frozen(), group_size=2, max_tokens=2, chat=chat),
    )
    prompts = g.source(Prompts(rows, columns=("answer",), epochs=1, chat=chat))
    found = collect(harmed(generator, prompts), rows=2 * len(rows))
    for row in found.to_pylist():
        failure = FAILS.get(row["answer"])
        assert (row["error"] is None) == (failure is None) and (
            failure is None or failure[1] in row["error"]
        ), row
        assert failure or row["harmed"] == "caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("does", "said"), [("invalid", "such as: 'say a letter'"), ("over", "have no value"), ("", "")]
)
def test_the_run_is_told_where_most_turns_are_invalid_or_most_episodes_have_no_value(
    does: str, said: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @episode(isolate=False, max_turns=2)
    async def plays(chat: Chat) -> float:
        for _ in range(3 if does == "over" else 2):
            await chat.say()
            if does == "invalid":
                chat.invalid("say a letter")
        return 1.0

    told, close = [], EpisodesRuntime.close
    monkeypatch.setattr(
        EpisodesRuntime, "close", lambda self: (told.append(self.status()), close(self))
    )
    rows = [{"prompt": f"{n}="} for n in range(16)]
    g, generator = (
        Graph("plays"),
        Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=1),
    )
    found = collect(plays(generator, g.source(Prompts(rows, epochs=1))), rows=32)
    assert found.column("plays").null_count == (32 if does == "over" else 0)
    (status,) = told
    assert said in str(status.get("notice", "")) and bool(said) == ("notice" in status)


def test_a_world_that_was_looked_at_and_cannot_be_ends_the_run(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @episode
    async def plays(chat: Chat) -> None:
        await chat.say()

    async def look(self: Any) -> str:
        return "environment 'line' has actions that no text is read as"

    monkeypatch.setattr(Episode, "can_look", True)
    monkeypatch.setattr(Episode, "look", look)
    g, generator = (
        Graph("plays"),
        Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=1),
    )
    with pytest.raises(Unusable, match="'plays': environment 'line' has actions"):
        collect(plays(generator, g.source(Prompts([{"prompt": "a="}], epochs=None))), rows=1000)
