"""Rewritten and branched chats with templates and tokenizers that merge: trained to the id, as they were seen."""

import json
import random
from typing import Any

import numpy as np
import pytest
from template_rig import CHATML, STRIPPING, mistral_template, rng_of, sampled, tokenizer_for, trl_template, words

from operators.chat.chat_format import ChatFormat, Message
from operators.episodes.chat import rewriting
from operators.episodes.conversations import FIRST, ConversationOrigin, RolloutConversations
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

    def __init__(self, origin: ConversationOrigin, begin: list[Message], rest: list[Message]) -> None:
        self.origin, self.begin, self.rest = origin, begin, rest
        self.rewards: list[float] = []

    def standing(self) -> list[int]:
        """Where in `rest` the policy's turns are."""
        return [at for at, message in enumerate(self.rest) if message["role"] == "assistant"]


def play(form: ChatFormat, rng: random.Random, past: Any, moves: int) -> tuple[RolloutConversations, list[Any]]:
    """Speak at random; of each turn that was drawn its conversation, the ids that were asked with, what was drawn, and
    the messages that were to be seen."""
    first: list[Message] = [{"role": "user", "content": words(rng)}]
    prompt = np.array(form.encode(form.render(first)))
    begin = ConversationStarts(PlainContext(form.tokenizer), form, past, prompt, json.dumps(first))
    talks, told, seen = (
        RolloutConversations(key="0", max_turns=99, max_tokens=9999, begin=begin),
        [Told(FIRST, first, [])],
        [],
    )
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
            told.append(Told(ConversationOrigin("other", history=rewriting("messages", begun)), begun, []))
            continue
        if what == "keep" and len(each.standing()) > 1:
            keep = rng.randrange(1, len(each.standing()))
            each.rest = each.rest[each.standing()[-keep] :]
            rewritten = rewriting("keep", keep)
        elif what == "rewrite":
            text = words(rng)
            each.begin, each.rest, rewritten = [{"role": "user", "content": text}], [], rewriting("text", text)
        heard = (words(rng),) if each.rest else ()
        each.rest += [{"role": "user", "content": heard[0]}] if heard else []
        request = talks.ask(
            heard, None, rewards=[one.rewards for one in told], rewritten=rewritten, conversation=number,
            origin=each.origin,
        )  # fmt: skip
        assert isinstance(request, TurnRequest)
        seen.append([number, request.tokens.tolist(), None, [*each.begin, *each.rest]])
        text = words(rng)
        drawn = sampled(form, text, rng, ends=rng.random() > 0.2, version=len(seen))
        seen[-1][2] = drawn
        talks.answer(number, drawn, text, "stop")
        each.rest.append({"role": "assistant", "content": text})
        each.rewards.append(0.0)
    talks.end([one.rewards for one in told])
    return talks, seen


@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("past", ["sampled", "rendered"])
@pytest.mark.parametrize("name", ["chatml", "stripping", "mistral", *TRL])
def test_rewritten_and_branched_chats_are_trained_to_the_id_behind_what_the_policy_saw(
    name: str, past: Any, count: int
) -> None:
    form = form_of(name)
    for seed in range(count):
        talks, seen = play(form, rng_of(name, past, seed), past, moves=14)
        tokens, columns = talks.columns()
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
