"""A conversation as the token ids that the policy sees: its own as they were sampled, the world's
put behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import NO_TURN, RolloutTokens, TrainingRow
from operators.chat.chat_format import ChatError, ChatFormat, Message
from operators.chat.chat_template import beginning_of, ids_behind
from operators.chat.tool_calls import ReadTurn, format_of

# Ids of a text that holds earlier turns: theirs as they were sampled, the rest encoded.


@dataclass(frozen=True)
class Said:
    """A turn of the policy's."""

    message: Message
    ids: tuple[int, ...]
    text: str
    """Of the ids, special tokens too."""
    tail: str
    """What of it ended the turn: an end token, a stop string, or nothing."""


def stitched(form: ChatFormat, text: str, turns: Sequence[Said]) -> list[int]:
    """Ids that spell the text; turns that stand in it, in their order, keep theirs."""
    ids: list[int] = []
    at = 0
    for turn in turns:
        laid_out, ended = turn.text, turn.tail != "" and form.closing.startswith(turn.tail)
        if _ends(form, turn.ids):
            laid_out, ended = turn.text.removesuffix(turn.tail) + form.ending, True
        begin = text.find(laid_out if ended else laid_out + form.closing, at)
        if begin < 0 or not turn.text:
            continue
        ids += form.encode(text[at:begin], behind_end=_ends(form, ids))
        ids += turn.ids
        at = begin + len(laid_out)
    return ids + form.encode(text[at:], behind_end=_ends(form, ids))


def _ends(form: ChatFormat, ids: Sequence[int]) -> bool:
    return bool(ids) and ids[-1] == form.end


Past: TypeAlias = Literal["sampled", "rendered", "refused"]
"""What becomes of turns that the template writes otherwise once they are past (without their
thinking, trimmed): they stay as they were sampled; a new row begins with what the template makes of
them; or ChatError is raised."""


class Conversation:
    """Messages in, ids of the next prompt out, sampled ids in; one row, or several where the past
    was rewritten.

    `hear` what the world says, ask for the `prompt`, `say` what was sampled behind it, and so on;
    `rows` has it all. A sampled token is in the mask of one row only.
    """

    def __init__(
        self,
        form: ChatFormat,
        messages: Iterable[Message] = (),
        *,
        tools: Sequence[Message] = (),
        past: Past = "sampled",
        continues: bool = True,
    ) -> None:
        """Begin with messages, if any.

        Args:
            tools: definitions, as OpenAI has them; the template puts them where it does.
            past: what becomes of turns that the template writes otherwise later.
            continues: a last message of the assistant's that the policy has not said is what its
                next turn begins with, and no turn of its own.
        """
        form.check_tools(tools)
        self.form, self.tools, self.past, self._continues = form, tuple(tools), past, continues
        self.messages: list[Message] = list(messages)
        self.begins = ""
        """The text that the policy's next turn is made to begin with, which it sees and did not
        sample."""
        self.calls = format_of(form) if tools else None
        """How calls of tools are read in what the policy wrote."""
        self._called = 0
        """Calls that were read so far."""
        self._done: list[TrainingRow] = []
        self._parts: list[RolloutTokens] = []
        self._part_turns: list[int] = []
        self._text = ""
        self._pieces: list[str] = []
        """What the world had said before each turn of this row and after the last, without the
        opening of a turn."""
        self._said: list[Said] = []
        """Turns of this row or earlier ones whose messages still stand."""
        self._turn = 0
        self._unanswered: Callable[[], None] | None = None
        """Takes the prompt back, where nothing was sampled behind it."""
        self._take_beginning()

    @property
    def rows(self) -> list[TrainingRow]:
        """The rows in which the policy said something, in order."""
        return [*self._done, *self._row()]

    @property
    def turns(self) -> int:
        """How often the policy has spoken."""
        return self._turn

    def hear(self, *messages: Message) -> None:
        """The world speaks: users, tools, system."""
        for message in messages:
            if message.get("role") == "assistant":
                raise ChatError(
                    "the world cannot speak for the policy; found a message of the assistant's; "
                    "give it to say(), or to rewrite() as a part of the past"
                )
        if messages:
            self._take_back()
            if self.begins:
                self.messages.append({"role": "assistant", "content": self.begins})
                self.begins = ""
            self.messages.extend(messages)

    def rewrite(self, messages: Iterable[Message], tools: Sequence[Message] | None = None) -> None:
        """Replace the past: cut, summarised, edited. Turns that remain in it keep their ids, as
        context. Where the new past only extends the old one, this is `hear`, and no row begins.
        """
        messages = list(messages)
        begin = self.messages
        if tools is not None and tuple(tools) != self.tools:
            self.tools = tuple(tools)
        elif messages[: len(begin)] == begin and all(
            m.get("role") != "assistant" for m in messages[len(begin) :]
        ):
            return self.hear(*messages[len(begin) :])
        self._take_back()
        self.messages = messages
        remaining = [message for message in messages if message.get("role") == "assistant"]
        standing = []
        for turn in self._said:
            if turn.message in remaining:
                remaining = remaining[remaining.index(turn.message) + 1 :]
                standing.append(turn)
        self._said = standing
        self._pieces = []
        self._take_beginning()
        return None

    def begin(self, text: str) -> None:
        """Let the policy's next turn begin with this text."""
        self._take_back()
        self.begins = text

    def prompt(self) -> AnyArray:
        """Ids of all that the policy sees before its next turn, int32 [tokens]. Raises
        ChatError.
        """
        if self._unanswered is None:
            if not self.messages:
                raise ChatError(
                    "an empty conversation has no prompt; found no message; hear() one first"
                )
            before = (
                list(self._done),
                list(self._parts),
                list(self._part_turns),
                self._text,
                self._pieces,
            )
            self._open()

            def take_back() -> None:
                self._done, self._parts, self._part_turns, self._text, self._pieces = before

            self._unanswered = take_back
        begun = np.asarray(self._begun, np.int32)
        return np.concatenate([np.zeros(0, np.int32), *(part.ids for part in self._parts), begun])

    @property
    def _begun(self) -> list[int]:
        """Ids that the next turn is made to begin with."""
        return ids_behind(self.form.tokenizer, self.begins)

    def say(
        self,
        drawn: RolloutTokens,
        *,
        begun: Sequence[int] = (),
        text: str | None = None,
        message: Message | None = None,
    ) -> ReadTurn:
        """What the policy sampled behind the last prompt; gives it as a message, calls of tools
        read.

        Args:
            begun: ids behind `begins` that the turn was made to begin with, which the policy saw
                and did not sample.
            text: of the whole turn, `begins` and all, without what ended it (end token, stop
                string); None: without an end token.
            message: the turn as a message; None: as it is read in the text.
        """
        self.prompt()
        begun = [*self._begun, *begun]
        ids = [*begun, *drawn.ids.tolist()]
        whole = self.form.decode(ids)
        tail = self.form.decode(ids[-1:]) if ids and ids[-1] in self.form.ends else ""
        if text is None:
            text = whole.removesuffix(tail)
        elif whole.startswith(text):
            tail = whole[len(text) :]
        turn = self._read(text) if message is None else ReadTurn(message)
        self._called += len(turn.message.get("tool_calls") or ())
        self._put(RolloutTokens.given(np.asarray(begun, np.int32)), NO_TURN)
        self._put(drawn, self._turn)
        self._said.append(Said(turn.message, tuple(ids), whole, tail))
        self.messages.append(turn.message)
        self._text += whole
        self._turn += 1
        self._unanswered, self.begins = None, ""
        return turn

    def _read(self, text: str) -> ReadTurn:
        if self.calls is None:
            return ReadTurn({"role": "assistant", "content": text})
        return self.calls.read(text, self.tools, first=self._called)

    def fork(self) -> Conversation:
        """A copy of the conversation that continues on its own; the turns so far are trained in the
        original alone.
        """
        self._take_back()
        fork = copy.copy(self)
        fork.messages, fork._said, fork._pieces = (
            list(self.messages),
            list(self._said),
            list(self._pieces),
        )
        fork._done = []
        fork._parts = [RolloutTokens.given(part.ids) for part in self._parts]
        fork._part_turns = [NO_TURN] * len(self._parts)
        return fork

    def _take_beginning(self) -> None:
        """Take a last assistant message that the policy did not sample as the beginning of its next
        turn.
        """
        self.begins = ""
        if self._continues and all(turn.message != self.messages[-1] for turn in self._said):
            content = beginning_of(self.messages)
            if content is not None:
                self.begins = content
                self.messages.pop()

    def _take_back(self) -> None:
        if self._unanswered is not None:
            self._unanswered()
            self._unanswered = None

    def _open(self) -> None:
        """Lay out the messages since the last turn, or begin a new row."""
        pieces = self.form.pieces(self.messages, self.tools)
        if not self._parts or not self._stands(pieces):
            self._begin(self.form.render(self.messages, self.tools), pieces)
        else:
            behind = self._behind(pieces[-1])
            if self.past != "sampled":
                rendered = self.form.render(self.messages, self.tools)
                if rendered != self._text + behind:
                    if self.past == "refused":
                        raise self._changed(rendered, self._text + behind)
                    return self._begin(rendered, pieces)
            self._add(self.form.headed(behind, self.begins))
            self._pieces = self._closed(self._pieces, pieces)
        return None

    def _stands(self, pieces: Sequence[str]) -> bool:
        """Whether the world's part of this row is still laid out as it was."""
        laid_out = self._pieces
        return 0 < len(laid_out) <= len(pieces) and all(map(str.startswith, pieces, laid_out))

    def _behind(self, piece: str) -> str:
        """What is still to come behind the last turn: `piece` without what the policy itself wrote
        of it.
        """
        last_turn = self._said[-1] if self._said else None
        if last_turn is not None and last_turn.ids[-1:] == (self.form.end,):
            return piece.removeprefix(self.form.ending)
        return piece.removeprefix("" if last_turn is None else last_turn.tail)

    def _add(self, text: str) -> None:
        last = self._said[-1].ids[-1:] if self._said else ()
        ids = self.form.encode(text, behind_end=last == (self.form.end,))
        self._put(RolloutTokens.given(np.asarray(ids)), NO_TURN)
        self._text += text

    def _begin(self, text: str, pieces: Sequence[str]) -> None:
        """A new row, unless its ids go on from those of the last."""
        text = self.form.headed(text, self.begins)
        ids = stitched(self.form, text, self._said)
        before = [int(token) for part in self._parts for token in part.ids]
        if before and ids[: len(before)] == before:
            self._put(RolloutTokens.given(np.asarray(ids[len(before) :])), NO_TURN)
        else:
            self._done += self._row()
            self._parts, self._part_turns = [RolloutTokens.given(np.asarray(ids))], [NO_TURN]
        self._text = text
        self._pieces = self._closed((), pieces)

    def _closed(self, previous: Sequence[str], pieces: Sequence[str]) -> list[str]:
        """Pieces without what opens the next turn, which may be another one when that turn is
        past.
        """
        return [
            *previous,
            *(piece.removesuffix(self.form.opening) for piece in pieces[len(previous) :]),
        ]

    def _put(self, tokens: RolloutTokens, turn: int) -> None:
        if len(tokens):
            self._parts.append(tokens)
            self._part_turns.append(turn)

    def _row(self) -> list[TrainingRow]:
        """The current row, if the policy said something in it."""
        if all(turn == NO_TURN for turn in self._part_turns):
            return []
        last = max(at for at, turn in enumerate(self._part_turns) if turn != NO_TURN)
        return [TrainingRow.of(list(zip(self._parts, self._part_turns, strict=True))[: last + 1])]

    def _changed(self, rendered: str, previous: str) -> ChatError:
        at = next(
            (i for i, (a, b) in enumerate(zip(rendered, previous, strict=False)) if a != b), 0
        )
        begin = max(0, at - 20)
        return ChatError(
            f"the chat template of '{self.form.name}' changes what was sampled once it is past;"
            f" found {rendered[begin : at + 40]!r} where {previous[begin : at + 40]!r} was; give"
            " past='sampled' or past='rendered'"
        )
