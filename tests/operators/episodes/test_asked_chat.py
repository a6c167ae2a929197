"""What a chat says to its owner: what was heard, and how the past was rewritten."""

import asyncio
import json
from typing import Any

import pytest

from dataflow.errors import OperatorError
from operators.episodes.chat import Chat, Chats, EpisodeOver, TurnQuestion, told
from operators.episodes.conversations import ConversationOrigin


def chat_of(*answers: str | None, **knobs: Any) -> tuple[Chat, list[TurnQuestion]]:
    left, asked = list(answers), list[TurnQuestion]()

    async def ask(body: bytes) -> bytes:
        asked.append(TurnQuestion.of(body))
        return told(left.pop(0))

    return Chats(ask, **knobs).begin(), asked


def test_the_past_is_cut_to_turns_that_still_stand() -> None:
    chat, asked = chat_of(*"abcde")

    async def play() -> None:
        chat.keep_last(0)
        for heard in "1234":
            await chat.say()
            chat.hear(heard)
            chat.keep_last(2)
        chat.keep_last(1)
        await chat.say()

    asyncio.run(play())
    assert [question.rewritten for question in asked] == [
        None,
        None,
        None,
        '{"keep": 2}',
        '{"keep": 1}',
    ]
    assert [question.heard for question in asked] == [(), ("1",), ("2",), ("3",), ("4",)]


def test_what_was_heard_before_the_past_was_rewritten_is_not_heard_again() -> None:
    chat, asked = chat_of(*"abc", has_messages=True)
    messages = [{"role": "user", "content": "so"}]

    async def play() -> None:
        await chat.say()
        chat.hear("gone")
        chat.rewrite("short")
        chat.keep_last(0)
        chat.hear("kept")
        await chat.say()
        chat.rewrite(messages)
        await chat.say()

    asyncio.run(play())
    assert [json.loads(question.rewritten or "null") for question in asked] == [
        None,
        {"text": "short"},
        {"messages": messages},
    ]
    assert [question.heard for question in asked] == [(), ("kept",), ()]


def test_who_has_no_turn_left_may_cut_the_past_and_ask_again() -> None:
    chat, asked = chat_of("a", None, "b")

    async def play() -> str:
        await chat.say()
        chat.hear("long")
        try:
            return await chat.say()
        except EpisodeOver:
            assert chat.among.is_over and chat.turns == 1
            chat.keep_last(0)
            return await chat.say()

    assert asyncio.run(play()) == "b" and not chat.among.is_over
    assert [(question.heard, question.rewritten) for question in asked] == [
        ((), None),
        (("long",), None),
        (("long",), '{"keep": 0}'),
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda chat: chat.keep_last(-1), "takes a number of turns, but got -1; give 0 or more"),
        (
            lambda chat: chat.rewrite([{"role": "user", "content": "a"}]),
            r"or messages where Generator\(chat=True\), each with a role and a text; found",
        ),
        (lambda chat: chat.rewrite("a" * (1 << 20)), "says too much between two turns"),
    ],
)
def test_a_past_that_cannot_be_is_refused_where_it_is_written(wrong: Any, text: str) -> None:
    chat, _ = chat_of()
    with pytest.raises(OperatorError, match=text):
        wrong(chat)


def test_branches_and_agents_are_conversations_of_their_own() -> None:
    chat, asked = chat_of(*"abcdefg")

    async def play() -> None:
        await chat.say()
        chat.reward(1.0)
        chat.hear("1")
        for branch in chat.branch(2):
            branch.hear("2")
            await branch.say()
            assert branch.turns == 2
            (deeper,) = branch.branch(1)
            (same,) = deeper.branch(1)
            await same.say()
        other = chat.agent("black", "rules")
        await other.say()
        other.reward(-1.0)
        await chat.say()

    asyncio.run(play())
    black = ConversationOrigin(role="black", history='{"text": "rules"}')
    origin = ConversationOrigin
    assert [(question.conversation, question.origin, question.heard) for question in asked] == [
        (0, origin(), ()),
        (1, origin(branch_of=0, at=1), ("1", "2")),
        (4, origin(branch_of=1, at=2), ()),
        (2, origin(branch_of=0, at=1), ("1", "2")),
        (6, origin(branch_of=2, at=2), ()),
        (7, black, ()),
        (0, origin(), ("1",)),
    ]
    assert asked[-1].rewards == ((1.0,), (0.0,), (0.0,), (), (0.0,), (), (0.0,), (-1.0,))


def test_conversations_that_ask_at_once_ask_one_after_the_other() -> None:
    open_asks = []

    async def ask(body: bytes) -> bytes:
        open_asks.append(1)
        await asyncio.sleep(0)
        assert len(open_asks) == 1
        open_asks.pop()
        return told("a")

    async def play() -> list[str]:
        chat = Chats(ask).begin()
        return await asyncio.gather(*(branch.say() for branch in chat.branch(5)))

    assert asyncio.run(play()) == ["a"] * 5
