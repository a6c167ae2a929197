"""Laws of what the world says in a chat: the same tokens whether a conversation goes on or is made
anew.
"""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.policy import ALPHABET, CHAT_TEMPLATE

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import ChatFormat
from operators.episodes.chat import rewriting
from operators.episodes.dialogue import SaidTurn, row_ids
from operators.episodes.turn_context import ChatContext, PlainContext
from operators.warm_start.train import character_tokenizer

PROMPT = [{"role": "user", "content": "hi"}]


STRIPPING = CHAT_TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content.split('y')[-1] if m.role == 'assistant' else m.content }}"
)


"""Leaves out what stands before a "y" in turns of the assistant's that are past."""


@cache
def tokenizer() -> Any:
    made = character_tokenizer(ALPHABET, 512)
    made.chat_template = CHAT_TEMPLATE
    return made


def ids(text: str) -> AnyArray:
    return np.asarray(tokenizer()(text, add_special_tokens=False)["input_ids"], np.int32)


def made(template: str = CHAT_TEMPLATE, **knobs: Any) -> ChatContext:
    one = tokenizer()
    one.chat_template = template
    return ChatContext(ChatFormat(one), PROMPT, **knobs)


class Talk:
    """What was said so far, and the words for it."""

    def __init__(self, words: Any, prompt: AnyArray) -> None:
        self.words, self.prompt, self.turns = words, prompt, list[SaidTurn]()

    def say(
        self, text: str, *heard: str, rewritten: str | None = None, is_ended: bool = True
    ) -> AnyArray:
        """What the policy sees before it says this."""
        seen = self.words.context(self.prompt, self.turns, heard, rewritten)
        before = row_ids(self.prompt, self.turns)
        goes_on = seen[: len(before)].tolist() == before.tolist()
        drawn = ids(text + "<eos>" * is_ended)
        tokens = RolloutTokens.drawn(drawn, -np.ones(len(drawn)), np.zeros(len(drawn)))
        self.turns.append(
            SaidTurn(
                heard=heard,
                most=None,
                rewritten=rewritten,
                begins=not goes_on,
                given=seen[len(before) :] if goes_on else seen,
                tokens=tokens,
                text=text,
                finish_reason="stop",
            )
        )
        return seen  # type: ignore[no-any-return]


REWRITINGS = st.none() | st.one_of(
    st.builds(rewriting, st.just("keep"), st.integers(0, 4)),
    st.builds(rewriting, st.just("text"), st.text("abc", min_size=1, max_size=3)),
    st.just(
        rewriting(
            "messages", [{"role": "user", "content": "c"}, {"role": "assistant", "content": "x"}]
        )
    ),
)


TALKS = st.lists(
    st.tuples(
        REWRITINGS, st.text("abc", max_size=3), st.text("xz", min_size=1, max_size=3), st.booleans()
    ),
    min_size=1,
    max_size=5,
)


def possible(rewritten: str | None, standing: int) -> str | None:
    """What a chat asks for where so many turns stand."""
    how = json.loads(rewritten) if rewritten else {}
    return None if how.get("keep", -1) >= standing else rewritten


@examples(60)
@given(TALKS, st.data())
def test_a_chat_that_goes_on_and_one_that_is_made_anew_have_the_same_tokens(
    talk: Any, data: st.DataObject
) -> None:
    words, prompt, standing = made(), ids("u=hi-a="), 0
    going_on = Talk(words, prompt)
    for rewritten, heard, said, is_ended in talk:
        rewritten, spoken = possible(rewritten, standing), (heard,) if heard else ()
        for _ in range(data.draw(st.integers(1, 2))):  # a function that begins anew asks again
            seen = words.context(prompt, going_on.turns, spoken, rewritten)
            assert (
                seen.tolist() == made().context(prompt, going_on.turns, spoken, rewritten).tolist()
            )
        assert (
            going_on.say(said, *spoken, rewritten=rewritten, is_ended=is_ended).tolist()
            == seen.tolist()
        )
        if rewritten is not None:
            standing = json.loads(rewritten).get("keep", 0)
        standing += 1
    kept = data.draw(st.integers(0, len(going_on.turns) - 1))
    assert words.context(prompt, going_on.turns[:kept], ("z",)).tolist() == (
        made().context(prompt, going_on.turns[:kept], ("z",)).tolist()
    )


@pytest.mark.parametrize(("is_ended", "between"), [(True, "-u=ab-a="), (False, "<eos>-u=ab-a=")])
def test_the_delimiter_that_the_policy_wrote_is_not_written_again(
    is_ended: bool, between: str
) -> None:
    talk = Talk(made(), ids("u=hi-a="))
    talk.say("xy", is_ended=is_ended)
    known = row_ids(talk.prompt, talk.turns)
    talk.say("x", "a", "b")
    assert (
        talk.turns[-1].given.tolist() == ids(between).tolist()
        and len(known) == len(ids("u=hi-a=")) + 2 + is_ended
    )


def test_a_world_that_speaks_before_the_policy_stands_before_its_turn() -> None:
    talk = Talk(made(), ids("u=hi-a="))
    assert talk.say("x", "a").tolist() == ids("u=hi-u=a-a=").tolist()
    assert talk.turns[0].begins


def test_the_last_turns_keep_their_ids_behind_what_the_conversation_began_with() -> None:
    talk = Talk(made(), ids("u=hi-a="))
    for number, heard in enumerate(([], ["a"], ["b"])):
        talk.say("xyz"[number], *heard)
    assert (
        talk.say("x", "c", rewritten=rewriting("keep", 1)).tolist()
        == ids("u=hi-a=z<eos>-u=c-a=").tolist()
    )
    assert [turn.begins for turn in talk.turns] == [False, False, False, True]
    assert talk.say("y", "d").tolist() == ids("u=hi-a=z<eos>-u=c-a=x<eos>-u=d-a=").tolist()
    assert (
        talk.say("y", rewritten=rewriting("text", "short")).tolist() == ids("u=short-a=").tolist()
    )


def test_turns_that_stand_in_a_rewritten_conversation_keep_their_ids() -> None:
    talk = Talk(made(), ids("u=hi-a="))
    talk.say("xyz")
    left = [
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "xyz"},
        {"role": "user", "content": "c"},
    ]
    seen = talk.say("x", rewritten=rewriting("messages", left))
    assert seen.tolist() == ids("u=so-a=xyz<eos>-u=c-a=").tolist()


@pytest.mark.parametrize(("past", "begins"), [("sampled", False), ("rendered", True)])
def test_thinking_that_a_template_strips_is_kept_or_begins_a_row(past: str, begins: bool) -> None:
    talk = Talk(made(STRIPPING, past=past), ids("u=hi-a="))
    talk.say("xyz")
    seen = talk.say("x", "a")
    assert seen.tolist() == ids(f"u=hi-a={'z' if begins else 'xyz'}<eos>-u=a-a=").tolist()
    assert talk.turns[-1].begins == begins


def test_plain_words_are_encoded_each_alone() -> None:
    words = PlainContext(tokenizer())
    assert words.context(ids("u"), [], ("ab", "c")).tolist() == [*ids("u"), *ids("ab"), *ids("c")]


def test_a_plain_past_is_cut_to_its_last_turns_or_is_another_text() -> None:
    talk = Talk(PlainContext(tokenizer()), ids("u="))
    talk.say("x")
    talk.say("y", "a")
    assert talk.say("z", "b", rewritten=rewriting("keep", 1)).tolist() == ids("u=y<eos>b").tolist()
    assert talk.say("x", "c").tolist() == ids("u=y<eos>bz<eos>c").tolist()
    assert (
        talk.say("y", "d", rewritten=rewriting("keep", 2)).tolist()
        == ids("u=z<eos>cx<eos>d").tolist()
    )
    assert talk.say("z", "e", rewritten=rewriting("text", "so")).tolist() == ids("soe").tolist()
    assert [turn.begins for turn in talk.turns] == [False, False, True, False, True, True]
