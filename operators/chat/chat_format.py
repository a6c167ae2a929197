"""A chat template's own delimiters, found by comparing what it makes of probe conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from dataflow.errors import GraphError

Message: TypeAlias = Mapping[str, Any]
"""{"role", "content"}, with "tool_calls" (assistant), "tool_call_id" and "name" (tool) as OpenAI has them."""

USER: Message = {"role": "user", "content": "xqa1"}
NEXT_USER: Message = {"role": "user", "content": "xqb2"}
PROBE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "xqf3",
        "description": "xqd4",
        "parameters": {
            "type": "object",
            "properties": {"xqp5": {"type": "string", "description": "xqe6"}},
            "required": ["xqp5"],
        },
    },
}
"""A tool for probes."""
PROBE_CALL_ID = "xqcall007"
"""Nine letters and digits, which the strictest template asks for."""


class ChatError(GraphError):
    """A chat template, or messages given to it, that no conversation of token ids can be made with."""


class ChatFormat:
    """What a tokenizer's chat template puts around the turns of a conversation.

    `closing` is what it puts behind a turn of the assistant's that something follows, `opening` what it ends a prompt
    with; `end` is the token that `closing` begins with, where that is one of the tokenizer's added tokens.

    Raises ChatError for a template with which that cannot be found.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """Take a tokenizer with a chat template, and the template's own options (`enable_thinking=False`)."""
        self.tokenizer, self.options = tokenizer, options
        self.name = str(getattr(tokenizer, "name_or_path", "") or "this tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(f"'{self.name}' has no chat template; found none in its tokenizer; give it one")
        self.opening = self._opening()
        self.closing = self._closing()
        self.end = self._end_token()
        self.ends = frozenset({self.end, tokenizer.eos_token_id} - {None})
        """Tokens that end a turn."""
        self.arguments_are_text = False
        self.calls: str | None = None
        """A turn that calls PROBE_TOOL, as the template writes it; None where it writes none."""
        self._find_calls()
        self.takes_tools = self.calls is not None or self._shows_tools()

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, opens: bool = True) -> str:
        """The messages as the template lays them out. opens: up to where the assistant begins. Raises ChatError."""
        laid_out = [self.as_template_takes(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    laid_out, tools=list(tools) or None, tokenize=False, add_generation_prompt=opens, **self.options
                )
            )
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise ChatError(
                f"the chat template of '{self.name}' refuses the messages: {error}; found roles {roles}; mend them"
            ) from error

    def as_template_takes(self, message: Message) -> dict[str, Any]:
        """A message with the arguments of its calls as this template wants them: an object, or its JSON."""
        if not message.get("tool_calls"):
            return {name: value for name, value in message.items() if name != "tool_calls"}
        calls = [self._call(call) for call in message["tool_calls"]]
        return {**message, "content": message.get("content") or "", "tool_calls": calls}

    def pieces(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[str]:
        """What the template puts before, between and behind the turns of the assistant, one piece more than turns.

        Each piece but the first begins with `closing`. The turns' own texts make no difference to them. Empty where the
        template leaves a turn out, or ends it otherwise: there is no way to go on from such a past but to begin anew.
        """
        marks = _marks(json.dumps([*messages, *tools], ensure_ascii=False, default=str))
        marked, used = [], []
        for message in messages:
            if message.get("role") == "assistant":
                used.append(next(marks))
                message = _marked(message, used[-1])
            marked.append(message)
        rest, found = self.render(marked, tools), []
        for mark in used:
            before, _, rest = rest.partition(mark)
            at = rest.find(self.closing)
            if at < 0 or mark in rest:
                return []
            found.append(before)
            rest = rest[at:]
        return [*found, rest]

    def calling(self, name: str, arguments: Mapping[str, Any], number: str = PROBE_CALL_ID) -> str:
        """What the template lays out of a turn that calls a tool, from where the turn begins on, and behind it. Raises
        ChatError."""
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": number, "name": name, "content": "xqr8"}
        text = self.render([USER, turn, result], [PROBE_TOOL])
        begin = self.render([USER], [PROBE_TOOL], opens=False)
        return text[self._whole(text, common(begin, text)) :]

    def encode(self, text: str, *, behind_end: bool = False) -> list[int]:
        """Tokens of a text alone, no special tokens added. behind_end: as it is encoded behind the end of a turn."""
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
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def spoken(self, ids: Sequence[int]) -> str:
        """Text of a turn without the token that ends it; other special tokens stand in it, as calls begin with some."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.ends else ids)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments", {})
        if self.arguments_are_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_are_text and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ChatError(
                    f"arguments of the call of '{function.get('name')}' are no JSON: {error}; "
                    f"found {arguments[:80]!r}; give an object, or its JSON"
                ) from error
        return {**call, "type": "function", "function": {**function, "arguments": arguments}}

    def _opening(self) -> str:
        closed, opened = self.render([USER], opens=False), self.render([USER])
        if USER["content"] not in opened:
            raise self._refused(f"a user's message does not stand in what it lays out, {opened[-80:]!r}")
        return opened[self._whole(opened, common(closed, opened)) :]

    def _closing(self) -> str:
        """What stands behind a turn both when it is the last and when more follows."""
        last = self.render([USER, _turn("xqs8")], opens=False)
        more = self.render([USER, _turn("xqs8"), NEXT_USER], opens=False)
        longer = self.render([USER, _turn("Another, 9 x longer."), NEXT_USER], opens=False)
        for text in (last, more):
            if text.count("xqs8") != 1:
                raise self._refused(f"a turn of the assistant's stands {text.count('xqs8')} times in {text[-80:]!r}")
        behind = more.partition("xqs8")[2]
        if behind != longer.partition("Another, 9 x longer.")[2] or NEXT_USER["content"] not in behind:
            raise self._refused(f"what follows a turn of the assistant's depends on the turn, as {behind[:80]!r} does")
        world = self.render([USER], opens=False)
        if not more.startswith(world[: common(world, self.render([USER]))]):
            raise self._refused(f"it changes {world[-80:]!r} when the conversation goes on")
        ending = last.partition("xqs8")[2]
        closing = behind[: self._whole(behind, common(ending, behind))]
        if not closing:
            raise self._refused(f"it ends a turn with {ending!r}, and with {behind[:40]!r} when more follows")
        return closing

    def _end_token(self) -> int | None:
        ids = self._ids(self.closing)
        if ids and self._is_added(ids[0]) and self.closing.startswith(self.decode(ids[:1])):
            return ids[0]
        return None

    def _whole(self, text: str, cut: int) -> int:
        """Where to cut a text so that no added token is cut in two: there, or before it."""
        if not getattr(self.tokenizer, "is_fast", False):
            return cut
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
            if begin < cut < end and self._is_added(token):
                return int(begin)
        return cut

    def _is_added(self, token: int) -> bool:
        return token in self.tokenizer.added_tokens_decoder

    def _find_calls(self) -> None:
        """How arguments are given to the template, and what it writes for a call."""
        for self.arguments_are_text in (False, True):
            try:
                text = self.calling("xqf3", {"xqp5": "xqg7"})
            except ChatError:
                continue
            at = text.rfind("xqg7")
            close = text.find(self.closing, at)
            if 0 <= at < close and "xqf3" in text[:at] and not text[at:].startswith('xqg7\\"'):
                self.calls = text[self._whole(text, common(self.opening, text)) : close]
                return
        self.arguments_are_text = False

    def _shows_tools(self) -> bool:
        try:
            return "xqf3" in self.render([USER], [PROBE_TOOL])
        except ChatError:
            return False

    def _refused(self, found: str) -> ChatError:
        return ChatError(
            f"the chat template of '{self.name}' has no delimiters that can be told from its turns; "
            f"found that {found}; give the tokenizer another template"
        )


def common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


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
