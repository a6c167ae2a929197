"""The dialogue of a rollout whose prompts come whole, as token ids: what a program sent with each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dataflow.records import AnyArray
from operators.chat.chat_format import ChatError
from operators.episodes.dialogue import Dialogue, SaidTurn, TurnRequest


@dataclass(kw_only=True)
class PromptedDialogue(Dialogue):
    """What the policy and a program said in one rollout: each prompt begins with all that was said before."""

    decode: Callable[[AnyArray], str]
    """The text of what the program put behind a turn."""

    def ask_behind(self, number: int, prompt: AnyArray, most: int | None) -> TurnRequest | SaidTurn | None:
        """The program calls with this prompt, int: as `ask` answers. Raises ChatError where it is no continuation."""
        known = self.known(number)
        given = prompt[len(known) :]
        goes_on = len(given) > 0 and np.array_equal(prompt[: len(known)], known)
        if number < len(self.turns):
            turn = self.turns[number]
            if goes_on and turn.most == most and np.array_equal(turn.given, given):
                return turn
            del self.turns[number:]
        self.waiting = None
        if not self.has_room:
            return None
        if not goes_on:
            raise ChatError(
                f"its conversation was rewritten: call {number + 1} does not begin with what was said before; found "
                f"{len(prompt)} tokens behind {len(known)} that were said; send the messages as they were, and more"
            )
        return self.request((self.decode(given),) if number else (), most, given)

    def known(self, number: int) -> AnyArray:
        """All that was said before a turn, int32."""
        parts = (part for turn in self.turns[:number] for part in (turn.given, turn.tokens.ids))
        return np.concatenate([self.prompt, *parts]).astype(np.int32)


def nothing_given(prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str]) -> AnyArray:
    """`Dialogue.given` of one whose prompts come whole."""
    raise AssertionError("it is asked by ask_behind")
