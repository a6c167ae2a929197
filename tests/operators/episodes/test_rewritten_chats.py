"""Rewritten and branched chats with templates and tokenizers that merge: trained to the id, as they
were seen.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from template_rig import (
    CHATML,
    STRIPPING,
    mistral_template,
    rng_of,
    sampled,
    tokenizer_for,
    trl_template,
    words,
)

from operators.chat.chat_format import ChatFormat, Message
from operators.episodes.chat import rewriting
from operators.episodes.conversations import (
    FIRST,
    ConversationOrigin,
    KeptTurn,
    RecordedTurn,
    RolloutConversations,
    TurnFiles,
)
from operators.episodes.dialogue import TurnRequest
from operators.episodes.turn_context import ConversationStarts, PlainContext

TRL = ["llama3", "qwen2_5", "qwen3", "gemma", "deepseekv3"]


def form_of(name: str) -> ChatFormat:
    if name == "mistral":
        return ChatFormat(tokenizer_for(mistral_template("v3"), name, begins="<s>", ends="</s>"))
    given = {"chatml": CHATML, "stripping": STRIPPING}
    return ChatFormat(tokenizer_for(given.get(name) or trl_template(name), name))


class Told:
    """What one conversation of the test's is to look like as messages."""

    def __init__(
        self, origin: ConversationOrigin, begin: list[Message], rest: list[Message]
    ) -> None:
        self.origin, self.begin, self.rest = origin, begin, rest
        self.rewards: list[float] = []

    def standing(self) -> list[int]:
        """Where in `rest` the policy's turns are."""
        return [at for at, message in enumerate(self.rest) if message["role"] == "assistant"]


@dataclass
class Played:
    """Conversations that were spoken at random."""

    talks: RolloutConversations
    anew: Callable[[], RolloutConversations]
    """The same before anything was said."""
    seen: list[Any] = field(default_factory=list)
    """Of each turn that was drawn its conversation, the ids that were asked with, what was drawn,
    and the messages that were to be seen."""
    asked: list[tuple[dict[str, Any], TurnRequest, RecordedTurn]] = field(default_factory=list)
    """The questions, what they led to, and what is written down."""


def play(form: ChatFormat, rng: random.Random, past: Any, moves: int) -> Played:
    """Speak at random."""
    first: list[Message] = [{"role": "user", "content": words(rng)}]
    prompt = np.array(form.encode(form.render(first)))

    def anew() -> RolloutConversations:
        begin = ConversationStarts(
            PlainContext(form.tokenizer), form, past, prompt, json.dumps(first)
        )
        return RolloutConversations(key="0", max_turns=99, max_tokens=9999, begin=begin)

    played, told = Played(anew(), anew), [Told(FIRST, first, [])]
    talks, seen = played.talks, played.seen
    for _ in range(moves):
        number = rng.randrange(len(told))
        each, rewritten = told[number], None
        what = rng.choice(["say", "say", "say", "keep", "rewrite", "branch", "agent"])
        if what == "branch" and each.rewards:
            origin = ConversationOrigin(
                each.origin.role, number, each.origin.at + len(each.rewards), each.origin.history
            )
            told.append(Told(origin, each.begin, list(each.rest)))
            continue
        if what == "agent":
            begun: list[Message] = [{"role": "user", "content": words(rng)}]
            told.append(
                Told(ConversationOrigin("other", history=rewriting("messages", begun)), begun, [])
            )
            continue
        if what == "keep" and len(each.standing()) > 1:
            keep = rng.randrange(1, len(each.standing()))
            each.rest = each.rest[each.standing()[-keep] :]
            rewritten = rewriting("keep", keep)
        elif what == "rewrite":
            text = words(rng)
            each.begin, each.rest, rewritten = (
                [{"role": "user", "content": text}],
                [],
                rewriting("text", text),
            )
        heard = (words(rng),) if each.rest else ()
        each.rest += [{"role": "user", "content": heard[0]}] if heard else []
        question = {
            "heard": heard,
            "most": None,
            "rewards": [list(one.rewards) for one in told],
            "rewritten": rewritten,
            "conversation": number,
            "origin": each.origin,
        }
        request = talks.ask(**question)
        assert isinstance(request, TurnRequest)
        seen.append([number, request.tokens.tolist(), None, [*each.begin, *each.rest]])
        text = words(rng)
        drawn = sampled(form, text, rng, ends=rng.random() > 0.2, version=len(seen))
        seen[-1][2] = drawn
        kept = talks.answer(number, drawn, text, "stop")
        assert kept is not None
        played.asked.append((question, request, kept))
        each.rest.append({"role": "assistant", "content": text})
        each.rewards.append(0.0)
    talks.end([one.rewards for one in told])
    return played


@pytest.mark.parametrize(
    "count", [6, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("past", ["sampled", "rendered"])
@pytest.mark.parametrize("name", ["chatml", "stripping", "mistral", *TRL])
def test_rewritten_and_branched_chats_are_trained_to_the_id_behind_what_the_policy_saw(
    name: str, past: Any, count: int
) -> None:
    form = form_of(name)
    for seed in range(count):
        played = play(form, rng_of(name, past, seed), past, moves=14)
        seen, (tokens, columns) = played.seen, played.talks.columns()
        turns, rows = np.array(columns["turn"]), np.array(columns["training_row"])
        assert np.array_equal(tokens.mask, turns >= 0) and turns.max(initial=-1) + 1 == len(seen)
        in_order = sorted(range(len(seen)), key=lambda at: seen[at][0])
        for turn, at in enumerate(in_order):
            number, asked, drawn, messages = seen[at]
            where = np.flatnonzero(turns == turn)
            row = np.flatnonzero(rows == rows[where[0]])
            assert tokens.ids[row[row < where[0]]].tolist() == asked
            for array in ("ids", "logprobs", "versions"):
                assert np.array_equal(getattr(tokens, array)[where], getattr(drawn, array))
            assert columns["row_conversation"][rows[where[0]]] == number
            if name != "deepseekv3" and (past == "rendered" or name == "chatml"):
                assert form.decode(asked) == form.render(messages)


@pytest.mark.parametrize(
    "count", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("past", ["sampled", "rendered"])
@pytest.mark.parametrize("name", ["chatml", "stripping", "mistral", *TRL])
def test_a_rollout_that_goes_on_from_the_disk_keeps_the_ids_of_turns_that_stand_in_a_rewritten_past(
    name: str, past: Any, count: int, tmp_path: Path
) -> None:
    """Each tokenizer here would encode the text of a turn otherwise than it was sampled."""
    form = form_of(name)
    for seed in range(count):
        rng = rng_of(name, past, seed, "resumed")
        played = play(form, rng, past, moves=14)
        folder = tmp_path / str(seed)
        folder.mkdir()
        files = TurnFiles(folder, "prompts")
        for _, _, kept in played.asked:
            files.append([KeptTurn(0, 0, 7, kept)])
        files.close()
        found = TurnFiles(folder, "prompts", attempt=1, waited_for=lambda: {0}).find(0, 7)[0]
        cut, again = rng.randint(1, len(found)), played.anew()
        again.recall(found[:cut])
        for at, (question, request, kept) in enumerate(played.asked):
            told = again.ask(**question)
            if at < cut:
                assert told == kept.turn.text
                continue
            assert isinstance(told, TurnRequest) and told.number == request.number
            assert told.tokens.tolist() == request.tokens.tolist()
            again.answer(question["conversation"], kept.turn.tokens, kept.turn.text, "stop")
        again.end(played.talks.rewards)
        (tokens, columns), (wanted, others) = again.columns(), played.talks.columns()
        assert columns.keys() == others.keys()
        assert all(np.array_equal(columns[each], others[each]) for each in columns)
        for array in ("ids", "logprobs", "versions", "mask"):
            assert np.array_equal(getattr(tokens, array), getattr(wanted, array))
