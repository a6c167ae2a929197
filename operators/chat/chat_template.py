"""A tokenizer's chat template: messages laid out as text, each as this template takes it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from dataflow.errors import GraphError

Message: TypeAlias = Mapping[str, Any]
"""{"role", "content"}, with "tool_calls" (assistant), "tool_call_id" and "name" (tool) as OpenAI
has them."""

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
_TURN, _SYSTEMS = "xqs8", ("xqh9", "xqi0")
_TAG = re.compile(r"\s*(<[^<>/|]+>)")
_OPEN_TAG = re.compile(r"(<[^<>/|]+>)\s*$")
_MOST_OPTIONS = 64
_BEFORE = "\n"


class ChatError(GraphError):
    """A chat template, or messages given to it, that no conversation of token ids can be made
    with.
    """


class _Generation(Extension):
    """transformers' tag around what the assistant says, which says nothing of names."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _names_read(template: str | Mapping[str, str]) -> set[str]:
    """Names that a chat template, or one of several by name, reads; an option of another name would
    change nothing.
    """
    environment = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    texts = [template] if isinstance(template, str) else list(template.values())
    try:
        return {
            name.name
            for text in texts
            for name in environment.parse(text).find_all(nodes.Name)
            if name.ctx == "load"
        }
    except TemplateError as error:
        raise ChatError(
            f"the chat template cannot be read: {error}; found it in the tokenizer; mend it"
        ) from error


class ChatTemplate:
    """What a tokenizer's chat template makes of messages; raises ChatError for a tokenizer that has
    none.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """Take a tokenizer with a chat template, and the template's own options
        (`enable_thinking=False`).
        """
        self.tokenizer, self.options = tokenizer, options
        self.name = str(getattr(tokenizer, "name_or_path", "") or "this tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                f"'{self.name}' has no chat template; found none in its tokenizer; give it one"
            )
        if options and (unread := sorted(options.keys() - _names_read(tokenizer.chat_template))):
            raise ChatError(
                f"the chat template of '{self.name}' reads no option {unread[0]!r}; found"
                f" chat_template_kwargs {dict(options)}; leave it out, or give the model a chat"
                " template that reads it"
            )
        self.arguments_are_text = False
        self._given: Callable[[str], Any] = functools.lru_cache(_MOST_OPTIONS)(self._with_options)
        for self.arguments_are_text in (False, True):
            if self._writes_calls():
                return
        self.arguments_are_text = False

    def given(self, options: Mapping[str, Any]) -> Self:
        """The same template with more of its options, those here where a name stands in both."""
        if not options:
            return self
        extended: Self = self._given(json.dumps(dict(options), sort_keys=True))
        return extended

    def _with_options(self, options: str) -> Self:
        return type(self)(self.tokenizer, **{**self.options, **json.loads(options)})

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, opens: bool = True
    ) -> str:
        """The messages as the template lays them out. opens: up to where the assistant begins.
        Raises ChatError.
        """
        laid_out = self.as_template_takes(messages)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    laid_out,
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=opens,
                    **self.options,
                )
            )
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise ChatError(
                f"the chat template of '{self.name}' refuses the messages: {error}; found roles"
                f" {roles}; mend them"
            ) from error

    def begun(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[str, str]:
        """The rendered messages before the text of a last assistant message, and that text, which
        the policy continues; else all messages and "". Raises ChatError.
        """
        self.check_tools(tools)
        content = beginning_of(messages)
        if content is None:
            return self.render(messages, tools), ""
        return self.headed(self.render(messages[:-1], tools), content), content

    def check_tools(self, tools: Sequence[Message]) -> None:
        """Raises ChatError for tools that it would leave out."""
        if tools and not self.takes_tools:
            raise ChatError(
                f"the chat template of '{self.name}' has no place for tools; found {len(tools)}; "
                "tell of them in a message, or give it another template"
            )

    def headed(self, opened: str, content: str) -> str:
        """What stands before a turn that begins with this, from a text that opens a turn: a tag for
        thinking that the template opens is left to the turn, and is not there where the turn begins
        with something else.
        """
        opening, head = self._heads
        if not content or not opened.endswith(opening):
            return opened
        tag, unclosed = _TAG.match(content), _OPEN_TAG.search(opening)
        if head.startswith(opening) and not head[len(opening) :].strip():
            opening, prefix = opening, head
        elif unclosed is None:
            return opened
        elif tag is not None and tag[1] == unclosed[1]:
            prefix = opening[: unclosed.start()]
        else:
            prefix = head
        return opened[: len(opened) - len(opening)] + prefix

    def as_template_takes(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as this template wants them: arguments of calls as an object or its JSON, no
        content as an empty one, a developer's messages as the system's; of several of the system's
        those at the beginning as one, and later ones as a user's, where the template would refuse
        them or leave them out.
        """
        prepared = [self._taken(message) for message in messages]
        places = [at for at, message in enumerate(prepared) if message.get("role") == "system"]
        if not places or places == [0]:
            return prepared
        first = next(
            (at for at, message in enumerate(prepared) if message.get("role") != "system"),
            len(prepared),
        )
        if first > 1 and not self._takes_several:
            text = "\n\n".join(str(message["content"]) for message in prepared[:first])
            prepared[:first] = [{**prepared[0], "content": text}]
            first = 1
        late = [message for message in prepared[first:] if message.get("role") == "system"]
        if late and not self._takes_late:
            prepared[first:] = [
                {**m, "role": "user"} if m.get("role") == "system" else m for m in prepared[first:]
            ]
        return prepared

    def calling(self, name: str, arguments: Mapping[str, Any], number: str = PROBE_CALL_ID) -> str:
        """What the template lays out of a turn that calls a tool, from where the turn begins on,
        and behind it. Raises ChatError.
        """
        call = {
            "id": number,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": number, "name": name, "content": "xqr8"}
        text = self.render([USER, turn, result], [PROBE_TOOL])
        begin = self.render([USER], [PROBE_TOOL], opens=False)
        return text[self.whole(text, common(begin, text)) :]

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether definitions of tools stand in what it lays out."""
        try:
            return "xqf3" in self.render([USER], [PROBE_TOOL])
        except ChatError:
            return False

    def whole(self, text: str, cut: int) -> int:
        """Where to cut a text so that no added token is cut in two: there, or before it."""
        if not getattr(self.tokenizer, "is_fast", False):
            return cut
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(
            encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            if begin < cut < end and self.is_added(token):
                return int(begin)
        return cut

    def is_added(self, token: int) -> bool:
        """Whether it is one of the tokenizer's added tokens."""
        return token in self.tokenizer.added_tokens_decoder

    @functools.cached_property
    def _heads(self) -> tuple[str, str]:
        """What opens a turn, and what stands before the text of one that is there."""
        closed, opened = self.render([USER], opens=False), self.render([USER])
        whole = self.render([USER, {"role": "assistant", "content": _TURN}], opens=False)
        begin = min(common(closed, opened), common(closed, whole))
        return opened[begin:], whole[begin : max(begin, whole.find(_TURN))]

    @functools.cached_property
    def _knows_developers(self) -> bool:
        """Whether it speaks of a developer, and lays out such a message behind one of the
        system's.
        """
        messages = [_system(_SYSTEMS[0]), {"role": "developer", "content": _SYSTEMS[1]}]
        return "developer" in str(self.tokenizer.chat_template) and self._shows(messages, [USER])

    @functools.cached_property
    def _takes_several(self) -> bool:
        """Whether it lays out two of the system's messages one after the other."""
        return self._shows([_system(text) for text in _SYSTEMS], [USER])

    @functools.cached_property
    def _takes_late(self) -> bool:
        """Whether it lays out one of the system's between others."""
        turn = {"role": "assistant", "content": _TURN}
        return self._shows([_system(_SYSTEMS[0]), USER, turn, _system(_SYSTEMS[1])], [NEXT_USER])

    def _shows(self, systems: Sequence[Message], messages: Sequence[Message]) -> bool:
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in (*systems, *messages)],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.options,
                )
            )
        except Exception:  # a template may raise what it likes
            return False
        return all(text.count(word) == 1 for word in _SYSTEMS)

    def _taken(self, message: Message) -> dict[str, Any]:
        converted = {name: value for name, value in message.items() if name != "tool_calls"}
        if converted.get("role") == "developer" and not self._knows_developers:
            converted["role"] = "system"
        if message.get("tool_calls"):
            converted["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        converted["content"] = text_of(converted.get("content"))
        return converted

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

    def _writes_calls(self) -> bool:
        """Whether a call's arguments, given as they are now, stand in what it lays out."""
        try:
            text = self.calling("xqf3", {"xqp5": "xqg7"})
        except ChatError:
            return False
        at = text.rfind("xqg7")
        return at >= 0 and "xqf3" in text[:at] and not text[at:].startswith('xqg7\\"')


def beginning_of(messages: Sequence[Message]) -> str | None:
    """The text of a last assistant message, which the policy continues; None where the last message
    is another's. Raises ChatError where that message calls tools.
    """
    if not messages or messages[-1].get("role") != "assistant":
        return None
    if messages[-1].get("tool_calls"):
        raise ChatError(
            "a prompt cannot end with calls of tools that have no results; found a last message of"
            " the assistant's with tool_calls; add what the tools answered, or leave the"
            " message out"
        )
    return str(text_of(messages[-1].get("content")))


def text_of(content: Any) -> Any:
    """Content as templates of texts take it: nothing as an empty text, parts as theirs one behind
    the other. Raises ChatError for parts that are no text.
    """
    if not isinstance(content, list | tuple):
        return "" if content is None else content
    for part in content:
        if not isinstance(part, str) and not (
            isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ):
            raise ChatError(
                f"a message's content may be text alone; found a part {str(part)[:80]}; leave"
                " it out"
            )
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids by text of the tokens that a decoded text leaves out: the tokenizer's own special tokens,
    and added ones.
    """
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    added = (
        (str(token), number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    )
    return {**dict(added), **dict(named)}


def mixed_stop(text: str, special: Mapping[str, int]) -> str | None:
    """Why nothing can end at a text, in three parts: a special token is only a part of it, and none
    stands in the text that stops are looked for in; None where all is well. special: as
    `special_tokens` has them.
    """
    inside = (
        None if text in special else next((name for name in special if name and name in text), None)
    )
    return inside and (
        f"stop string {text!r} can never occur: a completion's text has no special tokens; found"
        f" {inside!r} in it; give {inside!r} alone, or the text around it"
    )


def text_ids(tokenizer: Any, texts: Sequence[str], *, begins: bool = False) -> list[list[int]]:
    """Tokens of texts, without what the tokenizer would put behind them. begins: with what it puts
    in front of a text, unless that begins so already, as one that a template has laid out does.
    """
    if not texts:
        return []
    front = _front(tokenizer) if begins else []
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [ids if ids[:1] == front[:1] else [*front, *ids] for ids in map(list, rows)]


def ids_behind(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that stands behind another: without the blank that some tokenizers put in
    front of a text.
    """
    ids, before, both = (
        text_ids(tokenizer, [text, _BEFORE, _BEFORE + text]) if text else ([], [], [])
    )
    spelled = tokenizer.decode(
        before + ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    is_alone = spelled == _BEFORE + text or both[: len(before)] != before
    return ids if is_alone else both[len(before) :]


def _front(tokenizer: Any) -> list[int]:
    """What a tokenizer puts in front of a text by itself."""
    for probe in "a0.":
        plain, whole = (
            list(tokenizer(probe, add_special_tokens=adds)["input_ids"]) for adds in (False, True)
        )
        places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        if plain and (at := next(places, None)) is not None:
            return whole[:at]
    return []


def common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _system(content: str) -> Message:
    return {"role": "system", "content": content}
