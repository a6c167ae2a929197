"""Laws of a conversation: what was sampled is kept as it is, what was said once is told again and not drawn twice."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.episodes.dialogue import Dialogue, SaidTurn, TurnRequest

PROMPT = np.array([7, 8])


def encode(text: str) -> AnyArray:
    return np.array([ord(letter) for letter in text], np.int32)


def given_as(prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str]) -> AnyArray:
    return encode("".join(heard))


def dialogue(key: str = "0/prompts/0/0", max_turns: int = 8, max_tokens: int = 1000) -> Dialogue:
    return Dialogue(key=key, prompt=PROMPT, max_turns=max_turns, max_tokens=max_tokens, given=given_as)


def drawn(ids: list[int], version: int = 0) -> RolloutTokens:
    return RolloutTokens.drawn(np.array(ids), -np.ones(len(ids)), np.full(len(ids), version))


def asked(talk: Dialogue, number: int, heard: tuple[str, ...] = (), most: int | None = None) -> TurnRequest:
    request = talk.ask(number, heard, most)
    assert isinstance(request, TurnRequest)
    return request


def told(talk: Dialogue, number: int, heard: tuple[str, ...] = ()) -> str:
    turn = talk.ask(number, heard, None)
    assert isinstance(turn, SaidTurn)
    return turn.text


def converse(talk: Dialogue, turns: list[tuple[str, list[int]]]) -> list[TurnRequest]:
    requests = []
    for number, (heard, ids) in enumerate(turns):
        requests.append(asked(talk, number, (heard,) if heard else ()))
        talk.answer(drawn(ids, number), f"<{number}>", "stop")
    return requests


TURNS = st.lists(
    st.tuples(st.text("ab", max_size=3), st.lists(st.integers(0, 99), min_size=1, max_size=4)), min_size=1, max_size=6
)


@examples(100)
@given(TURNS)
def test_tokens_are_those_that_were_drawn_with_what_was_heard_between_them(turns: list[tuple[str, list[int]]]) -> None:
    talk = dialogue()
    converse(talk, turns)
    talk.rewards = tuple(float(n) for n in range(1, len(turns) + 1))
    tokens, numbers, rewards = talk.tokens(), talk.turn_numbers(), talk.turn_rewards()
    expected: list[tuple[int, bool, int, int]] = [(token, False, -1, -1) for token in PROMPT]
    for number, (heard, ids) in enumerate(turns):
        expected += [(ord(letter), False, -1, -1) for letter in heard]
        expected += [(token, True, number, number) for token in ids]
    columns = tokens.ids, tokens.mask, tokens.versions, numbers
    assert [tuple(each) for each in zip(*(column.tolist() for column in columns), strict=True)] == expected
    last = [int(np.flatnonzero(numbers == number)[-1]) for number in range(len(turns))]
    assert {at: rewards[at] for at in np.flatnonzero(rewards)} == dict(zip(last, talk.rewards, strict=True))
    assert talk.text(("!",)) == "".join(f"{heard}<{n}>" for n, (heard, _) in enumerate(turns)) + "!"


@examples(100)
@given(TURNS, st.integers(0, 5))
def test_a_function_that_begins_anew_is_told_what_was_said_and_nothing_is_drawn_twice(
    turns: list[tuple[str, list[int]]], lives: int
) -> None:
    talk = dialogue()
    requests = converse(talk, turns)
    before = talk.tokens().ids.tolist()
    for _ in range(lives):
        for number, (heard, _) in enumerate(turns):
            assert told(talk, number, (heard,) if heard else ()) == f"<{number}>"
    assert talk.tokens().ids.tolist() == before
    assert len({request.number for request in requests}) == len(requests)


def test_from_the_first_thing_that_the_world_says_otherwise_turns_are_drawn_anew() -> None:
    talk = dialogue()
    converse(talk, [("", [1]), ("a", [2]), ("b", [3])])
    assert told(talk, 0) == "<0>"
    request = asked(talk, 1, ("other",))
    assert request.tokens.tolist() == [7, 8, 1, *encode("other")]
    talk.answer(drawn([4]), "<new>", "stop")
    assert talk.tokens().ids.tolist() == [7, 8, 1, *encode("other"), 4]


def test_an_answer_that_comes_while_the_function_begins_anew_is_kept() -> None:
    talk = dialogue()
    converse(talk, [("", [1])])
    asked(talk, 1, ("a",))
    assert told(talk, 0) == "<0>", "its process has died, and it begins anew"
    talk.answer(drawn([2]), "<1>", "stop")
    assert told(talk, 1, ("a",)) == "<1>"


def test_the_same_turn_of_the_same_conversation_is_one_request() -> None:
    one, other = dialogue(), dialogue()
    assert asked(one, 0, ("a",)).number == asked(other, 0, ("a",)).number
    assert asked(one, 0, ("b",)).number != asked(other, 0, ("a",)).number
    assert asked(dialogue("0/prompts/0/1"), 0).number != asked(dialogue("0/prompts/0/0"), 0).number
    assert asked(dialogue("0/prompts/0/1"), 0).seed != asked(dialogue("0/prompts/0/0"), 0).seed


@pytest.mark.parametrize(("limits", "left"), [({"max_turns": 2}, 998), ({"max_tokens": 4}, 2)])
def test_a_policy_has_no_turn_beyond_its_turns_and_its_tokens(limits: dict[str, int], left: int) -> None:
    talk = dialogue(**limits)
    converse(talk, [("", [1, 2])])
    assert asked(talk, 1, ("a",)).most == left
    talk.answer(drawn([3, 4]), "", "length")
    assert talk.ask(2, (), None) is None


def test_what_does_not_fit_the_context_is_no_part_of_the_rollout() -> None:
    talk = dialogue()
    converse(talk, [("", [1])])
    asked(talk, 1, ("too long",))
    assert talk.answer(drawn([]), "", "length") is None
    assert talk.tokens().ids.tolist() == [7, 8, 1]
    assert talk.ask(1, ("a",), None) is None
