"""Laws of what the world says in a chat: the same tokens whether a conversation goes on or is made anew."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.policy import ALPHABET

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import ChatError, ChatFormat
from operators.episodes.dialogue import SaidTurn
from operators.episodes.words import ChatWords, PlainWords
from operators.warm_start.policy import character_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}-"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
PROMPT = json.dumps([{"role": "user", "content": "hi"}])


@cache
def tokenizer() -> Any:
    made = character_tokenizer(ALPHABET, 512)
    made.chat_template = TEMPLATE
    return made


def ids(text: str) -> AnyArray:
    return np.asarray(tokenizer()(text, add_special_tokens=False)["input_ids"], np.int32)


def turn(heard: tuple[str, ...], between: AnyArray, text: str, is_ended: bool) -> SaidTurn:
    drawn = ids(text + "<eos>" * is_ended)
    tokens = RolloutTokens.drawn(drawn, -np.ones(len(drawn)), np.zeros(len(drawn)))
    return SaidTurn(heard=heard, most=None, given=between, tokens=tokens, text=text, finish_reason="stop")


TALKS = st.lists(
    st.tuples(st.text("abc", max_size=3), st.text("xyz", min_size=1, max_size=3), st.booleans()), min_size=1, max_size=5
)


@examples(60)
@given(TALKS, st.data())
def test_a_chat_that_goes_on_and_one_that_is_made_anew_have_the_same_tokens(talk: Any, data: st.DataObject) -> None:
    words, prompt = ChatWords(ChatFormat(tokenizer()), PROMPT), ids("u=hi-a=")
    turns: list[SaidTurn] = []
    for number, (heard, said, is_ended) in enumerate(talk):
        spoken = (heard,) if heard and number else ()
        for _ in range(data.draw(st.integers(1, 2))):  # a function that begins anew asks again
            between = words.given(prompt, turns, spoken)
            anew = ChatWords(ChatFormat(tokenizer()), PROMPT).given(prompt, turns, spoken)
            assert between.tolist() == anew.tolist()
        turns.append(turn(spoken, between, said, is_ended))
    kept = data.draw(st.integers(0, len(turns) - 1))
    assert words.given(prompt, turns[:kept], ("z",) if kept else ()).tolist() == (
        ChatWords(ChatFormat(tokenizer()), PROMPT).given(prompt, turns[:kept], ("z",) if kept else ()).tolist()
    )


@pytest.mark.parametrize(("is_ended", "between"), [(True, "-u=ab-a="), (False, "<eos>-u=ab-a=")])
def test_the_delimiter_that_the_policy_wrote_is_not_written_again(is_ended: bool, between: str) -> None:
    words, prompt = ChatWords(ChatFormat(tokenizer()), PROMPT), ids("u=hi-a=")
    first = turn((), words.given(prompt, [], ()), "xy", is_ended)
    assert words.given(prompt, [first], ("a", "b")).tolist() == ids(between).tolist()


def test_a_world_that_speaks_before_the_policy_changes_the_past_and_is_refused() -> None:
    words = ChatWords(ChatFormat(tokenizer()), PROMPT)
    with pytest.raises(ChatError, match="otherwise once the world has spoken.*let the policy speak first"):
        words.given(ids("u=hi-a="), [], ("a",))


def test_plain_words_are_encoded_each_alone() -> None:
    assert PlainWords(tokenizer()).given(ids(""), [], ("ab", "c")).tolist() == [*ids("ab"), *ids("c")]
