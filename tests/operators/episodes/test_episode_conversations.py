"""Laws of rollouts of several conversations: one budget, each sampled token once, told again as
they were.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from turns_rig import drawn, encode

from dataflow.records import AnyArray
from operators.episodes.conversations import (
    FIRST,
    ConversationOrigin,
    RecordedTurn,
    RolloutConversations,
)
from operators.episodes.dialogue import ContextOf, SaidTurn, TurnRequest, row_ids

BLACK = ConversationOrigin(role="black", history="b")


def begin(history: str | None) -> tuple[AnyArray, ContextOf]:
    def context(
        prompt: AnyArray,
        turns: Sequence[SaidTurn],
        heard: Sequence[str],
        rewritten: str | None = None,
    ) -> AnyArray:
        return np.concatenate([row_ids(prompt, turns), encode("".join(heard))])

    return encode(history or "p"), context


def talks(**limits: int) -> RolloutConversations:
    return RolloutConversations(
        key="0", begin=begin, **{"max_turns": 50, "max_tokens": 1000, **limits}
    )


class Played:
    """A function that speaks in several conversations."""

    def __init__(self, made: RolloutConversations) -> None:
        self.made, self.origins, self.rewards = made, [FIRST], [[]]  # type: ignore[var-annotated]
        self.kept: list[RecordedTurn] = []
        self.drawn = 0

    def begin(self, origin: ConversationOrigin) -> int:
        self.origins.append(origin)
        self.rewards.append([])
        return len(self.origins) - 1

    def branch(self, of: int) -> int:
        here = self.origins[of]
        if self.rewards[of] or here.branch_of < 0:
            here = ConversationOrigin(here.role, of, here.at + len(self.rewards[of]), here.history)
        return self.begin(here)

    def say(self, conversation: int, heard: str, *ids: int) -> Any:
        found = self.made.ask(
            (heard,),
            None,
            rewards=self.rewards,
            conversation=conversation,
            origin=self.origins[conversation],
        )
        if isinstance(found, TurnRequest):
            self.drawn += 1
            kept = self.made.answer(conversation, drawn(*ids), f"<{ids}>", "stop", 1.0)
            assert kept is not None
            self.kept.append(kept)
        if found is not None:
            self.rewards[conversation].append(float(len(self.kept)))
        return found


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "branch", "agent"]),
        st.integers(0, 9),
        st.text("xy", max_size=2),
    ),
    min_size=1,
    max_size=14,
)


def play(
    made: RolloutConversations, moves: Any
) -> tuple[Played, dict[tuple[int, int], tuple[list[int], list[int]]]]:
    """What was drawn, by conversation and place: what was seen, and the ids."""
    played, seen = Played(made), {}
    for at, (what, which, heard) in enumerate(moves):
        number = which % len(played.origins)
        if what == "branch":
            played.branch(number)
        elif what == "agent":
            played.begin(BLACK)
        else:
            place = number, len(played.rewards[number])
            found = played.say(number, heard, 200 + at, 300 + at)
            if isinstance(found, TurnRequest):
                seen[place] = found.tokens.tolist(), [200 + at, 300 + at]
    made.end(played.rewards)
    return played, seen


@examples(150)
@given(MOVES)
def test_each_sampled_token_of_several_conversations_is_chosen_once_behind_what_was_seen(
    moves: Any,
) -> None:
    made = talks()
    played, seen = play(made, moves)
    tokens, columns = made.columns()
    turns, rows = np.array(columns["turn"]), np.array(columns["training_row"])
    assert (tokens.mask == (turns >= 0)).all()
    found, number = {}, 0
    for conversation, rewards in enumerate(played.rewards):
        for place, reward in enumerate(rewards):
            at = np.flatnonzero(turns == number)
            row = np.flatnonzero(rows == rows[at[0]])
            assert columns["row_conversation"][rows[at[0]]] == conversation
            assert columns["turn_reward"][at[-1]] == reward
            found[conversation, place] = (
                tokens.ids[row[row < at[0]]].tolist(),
                tokens.ids[at].tolist(),
            )
            number += 1
    assert found == seen and number == turns.max(initial=-1) + 1
    for row, conversation in enumerate(columns["row_conversation"]):
        origin = made.origins[conversation]
        assert columns["row_role"][row] == origin.role
        behind = columns["row_branch_turn"][row]
        assert (behind >= 0) == (origin.at > 0)
        if origin.at:
            there = rows[np.flatnonzero(turns == behind)[0]]
            assert columns["row_conversation"][there] == origin.branch_of


@examples(100)
@given(MOVES)
def test_several_conversations_are_told_again_and_recalled_without_a_turn_drawn_twice(
    moves: Any,
) -> None:
    made = talks()
    played, _ = play(made, moves)
    before, columns = made.columns()
    anew = talks()
    anew.recall(played.kept)
    for again in (made, anew):
        repeated, _ = play(again, moves)
        assert repeated.drawn == 0
        tokens, found = again.columns()
        assert tokens.ids.tolist() == before.ids.tolist()
        assert all(
            np.array_equal(found[name], columns[name]) for name in columns if name != "turn_reward"
        )


def test_branches_of_what_was_drawn_anew_are_drawn_anew() -> None:
    def life(made: RolloutConversations, heard: str) -> Played:
        played = Played(made)
        played.say(0, heard, 1)
        played.say(played.branch(0), "x", 2)
        return played

    made = talks()
    first = life(made, "a")
    other = life(made, "b")
    assert first.drawn == other.drawn == 2
    made.end(other.rewards)
    assert made.columns()[0].ids.tolist() == [*encode("pb"), 1, *encode("pb"), 1, *encode("x"), 2]
    anew = talks()
    anew.recall([*first.kept, other.kept[0]])
    assert life(anew, "b").drawn == 1, "the branch, which was of the other past"


def test_all_conversations_have_one_budget_and_different_seeds() -> None:
    played = Played(talks(max_turns=3))
    played.say(0, "", 1)
    one, other = played.branch(0), played.branch(0)
    requests = [played.say(one, "", 2), played.say(other, "", 2)]
    assert requests[0].seed != requests[1].seed and requests[0].number != requests[1].number
    assert played.say(0, "", 3) is None
    played = Played(talks(max_tokens=4))
    played.say(0, "", 1, 2, 3)
    assert played.say(played.begin(BLACK), "", 4).most == 1
    assert played.say(0, "", 5) is None


def test_an_episode_in_which_nothing_was_said_is_its_prompt() -> None:
    made = talks()
    tokens, columns = made.columns()
    assert tokens.ids.tolist() == encode("p").tolist() and not tokens.mask.any()
    assert columns["row_conversation"] == [0] and made.text(((),)) == ""


def test_the_texts_of_several_conversations_stand_below_their_names() -> None:
    played = Played(talks())
    played.say(0, "a", 1)
    played.say(played.begin(BLACK), "b", 2)
    assert played.made.text((("!",), ())) == "[0]\na<(1,)>!\n[black]\nb<(2,)>"
