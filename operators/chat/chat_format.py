"""A chat template's own delimiters, found by comparing what it makes of probe conversations.

Reading a tokenizer imports torch, which whoever starts a run does without: a process of its own
does it.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dataflow.model import Model
from dataflow.model_files import folder_here, template_fault
from dataflow.system import child
from operators.chat.chat_template import (
    NEXT_USER,
    PROBE_TOOL,
    USER,
    ChatError,
    ChatTemplate,
    Message,
    common,
)

__all__ = ["PROBE_TOOL", "USER", "ChatError", "ChatFormat", "Message", "common"]


_MARK = re.compile(r"\s*(<+[^<>]+>+|\[+[^\[\]]+\]+|\{+[^{}]+\}+|\|[^|]+\|)")
_WORD = re.compile(r"\w{2}")


class ChatFormat(ChatTemplate):
    """What a tokenizer's chat template puts around the turns of a conversation.

    `closing` is what it puts behind a turn of the assistant's that something follows, `opening`
    what it ends a prompt with; `ending` is the part of `closing` that ends the turn: up to the
    first of the tokenizer's added tokens in it that is more than blanks, `end`; or where none
    stands in it its first text in brackets (`</s>`), or all of it where that has a word (`###
    End`); else nothing.

    Raises ChatError for a template with which that cannot be found.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """Take a tokenizer with a chat template, and the template's own options
        (`enable_thinking=False`).
        """
        super().__init__(tokenizer, **options)
        self.opening = self._opening()
        self.closing = self._closing()
        self.end, self.ending = self._end_of_turn()
        self.ends = frozenset({self.end, tokenizer.eos_token_id} - {None})
        """Tokens that end a turn."""
        self.stops = (self.ending.strip(),) if self.end is None and self.ending else ()
        """Texts that end a turn, where no token does."""
        self.calls = self._written_calls()
        """A turn that calls PROBE_TOOL, as the template writes it; None where it writes none."""
        if self.calls is not None:
            self.takes_tools = True

    def pieces(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[str]:
        """What the template puts before, between and behind the turns of the assistant, one piece
        more than turns.

        Each piece but the first begins with `closing`. The turns' own texts make no difference to
        them. Empty where the template leaves a turn out, or ends it otherwise: there is no way to
        go on from such a past but to begin anew.
        """
        marks = _marks(json.dumps([*messages, *tools], ensure_ascii=False, default=str))
        marked, used = [], []
        for message in messages:
            if message.get("role") == "assistant":
                used.append(next(marks))
                message = _marked(message, used[-1])
            marked.append(message)
        remaining, pieces = self.render(marked, tools), []
        for mark in used:
            before, _, remaining = remaining.partition(mark)
            at = remaining.find(self.closing)
            if at < 0 or mark in remaining:
                return []
            pieces.append(before)
            remaining = remaining[at:]
        return [*pieces, remaining]

    def encode(self, text: str, *, behind_end: bool = False) -> list[int]:
        """Tokens of a text alone, no special tokens added. behind_end: as it is encoded behind the
        end of a turn.
        """
        if not text:
            return []
        if behind_end and self.end is not None:
            end = self.decode([self.end])
            ids = self._ids(end + text)
            if ids[0] == self.end:
                return ids[1:]
        return self._ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special tokens too."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def spoken(self, ids: Sequence[int]) -> str:
        """Text of a turn without the token that ends it; other special tokens stand in it, as calls
        begin with some.
        """
        return self.decode(ids[:-1] if ids and ids[-1] in self.ends else ids)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _opening(self) -> str:
        closed, opened = self.render([USER], opens=False), self.render([USER])
        if USER["content"] not in opened:
            raise self._refused(
                f"a user's message does not stand in what it lays out, {opened[-80:]!r}"
            )
        return opened[self.whole(opened, common(closed, opened)) :]

    def _closing(self) -> str:
        """What stands behind a turn both when it is the last and when more follows."""
        last = self.render([USER, _turn("xqs8")], opens=False)
        more = self.render([USER, _turn("xqs8"), NEXT_USER], opens=False)
        longer = self.render([USER, _turn("Another, 9 x longer."), NEXT_USER], opens=False)
        for text in (last, more):
            if text.count("xqs8") != 1:
                raise self._refused(
                    f"a turn of the assistant's stands {text.count('xqs8')} times in {text[-80:]!r}"
                )
        behind = more.partition("xqs8")[2]
        if (
            behind != longer.partition("Another, 9 x longer.")[2]
            or NEXT_USER["content"] not in behind
        ):
            raise self._refused(
                f"what follows a turn of the assistant's depends on the turn, as {behind[:80]!r}"
                " does"
            )
        world = self.render([USER], opens=False)
        if not more.startswith(world[: common(world, self.render([USER]))]):
            raise self._refused(f"it changes {world[-80:]!r} when the conversation goes on")
        ending = last.partition("xqs8")[2]
        closing = behind[: self.whole(behind, common(ending, behind))]
        if not closing:
            raise self._refused(
                f"it ends a turn with {ending!r}, and with {behind[:40]!r} when more follows"
            )
        return closing

    def _end_of_turn(self) -> tuple[int | None, str]:
        """The token that ends a turn, and the beginning of `closing` up to it."""
        for token in self._ids(self.closing):
            name = self.decode([token])
            if self.is_added(token) and name.strip() and name in self.closing:
                return token, self.closing[: self.closing.index(name) + len(name)]
        if (mark := _MARK.match(self.closing)) is not None:
            return None, mark[0]
        return None, self.closing.rstrip() if _WORD.search(self.closing) else ""

    def _written_calls(self) -> str | None:
        try:
            text = self.calling("xqf3", {"xqp5": "xqg7"})
        except ChatError:
            return None
        at = text.rfind("xqg7")
        close = text.find(self.closing, at)
        if not 0 <= at < close or "xqf3" not in text[:at]:
            return None
        return text[self.whole(text, common(self.opening, text)) : close]

    def _refused(self, reason: str) -> ChatError:
        return ChatError(
            f"the chat template of '{self.name}' has no delimiters that can be told from its turns;"
            f" found that {reason}; give the tokenizer another template"
        )


def _turn(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _marks(text: str) -> Iterator[str]:
    """Words that stand nowhere in the text."""
    return (mark for mark in (f"xqm{number}z" for number in itertools.count()) if mark not in text)


def _marked(message: Message, mark: str) -> Message:
    """A turn with a mark in place of its text, or as the last call's argument."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": mark}
    *calls, last = message["tool_calls"]
    function = {**(last.get("function") or last), "arguments": {"xqp5": mark}}
    return {**message, "tool_calls": [*calls, {**last, "function": function}]}


TRIAL_S = 50.0
"""For the tokenizer to be read and its template to be tried; then the worker finds out."""


def delimiter_fault(model: Model) -> str | None:
    """Why a model's chat template gives no conversations of token ids, in three parts; None where
    it does, or where this machine's files do not tell.
    """
    if folder_here(model.source) is None:
        return None
    if (fault := template_fault(model)) is not None:
        return fault
    model_json = json.dumps({"source": model.source, "trust_remote_code": model.trust_remote_code})
    trial = child.program(__name__, model_json, words=True, stdin=subprocess.DEVNULL)
    trial.end(TRIAL_S)
    try:
        fault = json.loads(trial.last_words.rpartition("\n")[2])
    except ValueError:
        return None
    return None if fault is None else str(fault)


def main(model_json: str) -> None:
    """Print the fault as JSON, null for none: the last line, as libraries may print others."""
    from operators.models.loading import load_tokenizer

    child.die_with_parent()
    fault = None
    try:
        ChatFormat(load_tokenizer(Model(**json.loads(model_json))))
    except ChatError as error:
        fault = str(error)
    print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
