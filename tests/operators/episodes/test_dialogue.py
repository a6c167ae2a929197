"""Laws of a conversation: what was sampled is kept as it is, what was said once is told again and
not drawn twice.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from turns_rig import drawn, encode

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import end_to_end
from operators.episodes.dialogue import Dialogue, SaidTurn, TurnRequest, row_ids, turn_rewards

PROMPT = np.array([7, 8])


def context_as(
    prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str], rewritten: str | None = None
) -> AnyArray:
    """A past that was rewritten is the text that it was rewritten to."""
    before = row_ids(prompt, turns) if rewritten is None else encode(rewritten)
    return np.concatenate([before, encode("".join(heard))])


def dialogue(key: str = "0/prompts/0/0", max_turns: int = 8, max_tokens: int = 1000) -> Dialogue:
    return Dialogue(
        key=key, prompt=PROMPT, max_turns=max_turns, max_tokens=max_tokens, context=context_as
    )


def asked(
    talk: Dialogue,
    number: int,
    heard: tuple[str, ...] = (),
    most: int | None = None,
    rewritten: str | None = None,
) -> TurnRequest:
    request = talk.ask(number, heard, most, rewritten)
    assert isinstance(request, TurnRequest)
    return request


def ids_of(talk: Dialogue) -> list[int]:
    return end_to_end(talk.rows())[0].ids.tolist()


def converse(talk: Dialogue, turns: list[tuple[str, list[int]]]) -> list[TurnRequest]:
    requests = []
    for number, (heard, ids) in enumerate(turns):
        requests.append(asked(talk, number, (heard,) if heard else ()))
        talk.answer(drawn(*ids, version=number), f"<{number}>", "stop")
    return requests


TURNS = st.lists(
    st.tuples(st.text("ab", max_size=3), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@examples(100)
@given(TURNS)
def test_tokens_are_those_that_were_drawn_with_what_was_heard_between_them(
    turns: list[tuple[str, list[int]]],
) -> None:
    talk = dialogue()
    converse(talk, turns)
    talk.end(len(turns))
    given_for = tuple(float(n) for n in range(1, len(turns) + 1))
    tokens, numbers, rows = end_to_end(talk.rows())
    rewards = turn_rewards(numbers, given_for)
    assert not rows.any()
    expected: list[tuple[int, bool, int, int]] = [(token, False, -1, -1) for token in PROMPT]
    for number, (heard, ids) in enumerate(turns):
        expected += [(ord(letter), False, -1, -1) for letter in heard]
        expected += [(token, True, number, number) for token in ids]
    columns = tokens.ids, tokens.mask, tokens.versions, numbers
    assert [
        tuple(each) for each in zip(*(column.tolist() for column in columns), strict=True)
    ] == expected
    last = [int(np.flatnonzero(numbers == number)[-1]) for number in range(len(turns))]
    assert {at: rewards[at] for at in np.flatnonzero(rewards)} == dict(
        zip(last, given_for, strict=True)
    )
    assert talk.text(("!",)) == "".join(f"{heard}<{n}>" for n, (heard, _) in enumerate(turns)) + "!"


@examples(100)
@given(TURNS, st.integers(0, 5))
def test_a_function_that_begins_anew_is_told_what_was_said_and_nothing_is_drawn_twice(
    turns: list[tuple[str, list[int]]], lives: int
) -> None:
    talk = dialogue()
    requests = converse(talk, turns)
    before = ids_of(talk)
    for _ in range(lives):
        for number, (heard, _) in enumerate(turns):
            assert talk.ask(number, (heard,) if heard else (), None) == f"<{number}>"
    assert ids_of(talk) == before
    assert len({request.number for request in requests}) == len(requests)


def test_from_the_first_thing_that_the_world_says_otherwise_turns_are_drawn_anew() -> None:
    talk = dialogue()
    converse(talk, [("", [1]), ("a", [2]), ("b", [3])])
    assert talk.ask(0, (), None) == "<0>"
    request = asked(talk, 1, ("other",))
    assert request.tokens.tolist() == [7, 8, 1, *encode("other")]
    talk.answer(drawn(4), "<new>", "stop")
    assert ids_of(talk) == [7, 8, 1, *encode("other"), 4]


def test_an_answer_that_comes_while_the_function_begins_anew_is_kept() -> None:
    talk = dialogue()
    converse(talk, [("", [1])])
    asked(talk, 1, ("a",))
    assert talk.ask(0, (), None) == "<0>", "its process has died, and it begins anew"
    talk.answer(drawn(2), "<1>", "stop")
    assert talk.ask(1, ("a",), None) == "<1>"


def test_the_same_turn_of_the_same_conversation_is_one_request() -> None:
    one, other = dialogue(), dialogue()
    assert asked(one, 0, ("a",)).number == asked(other, 0, ("a",)).number
    assert asked(one, 0, ("b",)).number != asked(other, 0, ("a",)).number
    assert asked(dialogue("0/prompts/0/1"), 0).number != asked(dialogue("0/prompts/0/0"), 0).number
    assert asked(dialogue("0/prompts/0/1"), 0).seed != asked(dialogue("0/prompts/0/0"), 0).seed


@pytest.mark.parametrize(("limits", "left"), [({"max_turns": 2}, 998), ({"max_tokens": 4}, 2)])
def test_a_policy_has_no_turn_beyond_its_turns_and_its_tokens(
    limits: dict[str, int], left: int
) -> None:
    talk = dialogue(**limits)
    converse(talk, [("", [1, 2])])
    assert asked(talk, 1, ("a",)).most == left
    talk.answer(drawn(3, 4), "", "length")
    assert talk.ask(2, (), None) is None


def test_what_does_not_fit_the_context_is_no_part_of_the_rollout() -> None:
    talk = dialogue()
    converse(talk, [("", [1])])
    asked(talk, 1, ("too long",))
    assert talk.answer(drawn(), "", "length") is None
    assert ids_of(talk) == [7, 8, 1]
    assert talk.ask(1, ("too long",), None) is None, "it has no more room than before"
    assert asked(talk, 1, ("a",)).tokens.tolist() == [7, 8, 1, ord("a")]


# A past that was rewritten

REWRITTEN = st.lists(
    st.tuples(
        st.none() | st.text("xyz", max_size=4),
        st.text("ab", max_size=3),
        st.lists(st.integers(0, 99), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@examples(100)
@given(REWRITTEN)
def test_each_sampled_token_of_a_rewritten_conversation_is_chosen_once_after_all_the_policy_saw(
    turns: list[tuple[str | None, str, list[int]]],
) -> None:
    talk, seen = dialogue(), []
    for number, (rewritten, heard, ids) in enumerate(turns):
        request = asked(talk, number, (heard,) if heard else (), rewritten=rewritten)
        seen.append((request.tokens.tolist(), ids))
        talk.answer(drawn(*ids, version=number), f"<{number}>", "stop")
    rows = talk.rows()
    found = {}
    for row in rows:
        assert (row.tokens.mask == (row.turns >= 0)).all() and (
            row.tokens.versions == row.turns
        ).all()
        for turn in sorted(set(row.turns[row.turns >= 0].tolist())):
            at = np.flatnonzero(row.turns == turn)
            assert turn not in found and (np.diff(at) == 1).all()
            found[turn] = row.tokens.ids[: at[0]].tolist(), row.tokens.ids[at].tolist()
    assert [found[turn] for turn in range(len(turns))] == seen
    assert len(rows) <= 1 + sum(rewritten is not None for rewritten, *_ in turns)


def test_a_function_that_begins_anew_is_told_a_rewritten_conversation_again() -> None:
    talk = dialogue(max_turns=3)
    converse(talk, [("", [1])])
    asked(talk, 1, ("long",))
    assert talk.answer(drawn(), "", "length") is None, "it finds no room"
    asked(talk, 1, rewritten="y")
    talk.answer(drawn(2), "<1>", "stop")
    before = ids_of(talk)
    assert talk.ask(0, (), None) == "<0>"
    assert talk.ask(1, ("long",), None) is None and talk.ask(1, (), None, "y") == "<1>"
    assert ids_of(talk) == before == [7, 8, 1, ord("y"), 2]


def test_turns_that_a_function_did_not_come_to_this_time_are_no_part_of_the_rollout() -> None:
    talk = dialogue()
    converse(talk, [("", [1]), ("a", [2]), ("b", [3])])
    assert talk.ask(0, (), None) == "<0>"
    talk.end(1)
    assert ids_of(talk) == [7, 8, 1]
