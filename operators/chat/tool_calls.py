"""Calls of tools: read in what a policy wrote, in the model's own format or as plain text;
functions as tools, and what a turn begins with that has to call one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.system.text import strict_json
from operators.chat.chat_format import ChatError, ChatFormat, Message, common


class BrokenCall(ValueError):
    """What looks like a call and is none."""


@dataclass(frozen=True)
class WrittenCall:
    """A call as it stands in a text."""

    begin: int
    end: int
    name: str
    arguments: str
    """JSON of an object."""
    id: str | None = None


@dataclass(frozen=True)
class ReadTurn:
    """What a policy wrote, read."""

    message: Message
    """{"role": "assistant", "content"}, with "tool_calls" where there are any; `content` is all
    that is no call."""
    broken: tuple[str, ...] = ()
    """Why what looks like a call is none; it stands in `content` as it was written."""


@dataclass(frozen=True)
class CallFormat:
    """A way in which models write calls of tools."""

    name: str
    marks: tuple[str, ...]
    """A call begins with one of these."""
    written: Callable[[str, Mapping[str, Any]], Iterator[WrittenCall | BrokenCall]] = field(
        repr=False
    )
    """Finds calls in a text; parameters by tool, for formats that do not write types."""
    is_whole: bool = False
    """Whether a turn is either one call or none, and only its very beginning is a mark."""

    def read(self, text: str, tools: Sequence[Message] = (), *, first: int = 0) -> ReadTurn:
        """A turn of a policy's as a message; calls without an id are numbered from `first`."""
        parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") or {}
            for tool in tools
            if "function" in tool
        }
        calls: list[dict[str, Any]] = []
        broken, texts, at = [], [], 0
        for call in self.written(text, parameters):
            if isinstance(call, BrokenCall):
                broken.append(str(call))
                continue
            texts.append(text[at : call.begin])
            at = call.end
            calls.append(
                {
                    "id": call.id or f"call{first + len(calls):05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            )
        content = "".join([*texts, text[at:]])
        if not calls:
            return ReadTurn({"role": "assistant", "content": text}, tuple(broken))
        return ReadTurn(
            {"role": "assistant", "content": content.rstrip(), "tool_calls": calls}, tuple(broken)
        )

    def certain(self, text: str) -> int:
        """How many characters at the beginning of a growing text are certainly no part of a
        call.
        """
        if self.is_whole:
            start = text.lstrip()
            return (
                0
                if any(start.startswith(mark) or mark.startswith(start) for mark in self.marks)
                else len(text)
            )
        places = [at for at in (text.find(mark) for mark in self.marks) if at >= 0]
        if places:
            return min(places)
        longest = max(len(mark) for mark in self.marks) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self.marks):
                return len(text) - size
        return len(text)


def format_of(form: ChatFormat) -> CallFormat | None:
    """The format in which this template writes calls, seen by letting it write one; None: none of
    FORMATS.
    """
    text = form.calls or ""
    if "<function=xqf3>" in text:
        return FORMATS["xml"]
    if "[TOOL_CALLS]" in text:
        return FORMATS["mistral-named" if "[ARGS]" in text else "mistral"]
    if "<｜tool▁call▁begin｜>" in text:
        return FORMATS["deepseek"]
    if "<tool_call>" in text and '"xqf3"' in text:
        return FORMATS["hermes"]
    return FORMATS["llama"] if text.startswith("{") and '"xqf3"' in text else None


_DECODER = json.JSONDecoder()


def _value(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that stands at a place, and where it ends. Raises BrokenCall, as for NaN and
    half of a character, which no answer can hold.
    """
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, at)
        strict_json(value)
        return value, end
    except (ValueError, RecursionError) as error:
        raise BrokenCall(
            f"a call is no JSON: {error}; found {text[at : at + 80]!r}; write it as JSON"
        ) from error


def _function(
    value: Any, keys: Sequence[str] = ("arguments", "parameters")
) -> tuple[str, str, str | None]:
    """Name, arguments and id of a call that is an object. Raises BrokenCall."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BrokenCall(
            f"a call has no name; found {str(value)[:80]!r}; write an object with name and"
            f" {keys[0]}"
        )
    arguments: Any = next((value[key] for key in keys if key in value), {})
    number = value.get("id")
    return value["name"], _object(arguments), number if isinstance(number, str) else None


def _object(arguments: Any) -> str:
    """JSON of the arguments of a call. Raises BrokenCall where they are no object, nor the JSON of
    one.
    """
    if isinstance(arguments, str):
        arguments, _ = _value(arguments)
    if not isinstance(arguments, dict):
        raise BrokenCall(
            f"arguments are no object; found {str(arguments)[:80]!r}; name each argument"
        )
    return json.dumps(arguments, ensure_ascii=False)


def between(
    begin: str, end: str, read: Callable[[str, Mapping[str, Any]], tuple[str, str, str | None]]
) -> Callable[[str, Mapping[str, Any]], Iterator[WrittenCall | BrokenCall]]:
    """Calls that each stand between two marks; the last one's end may be missing where it is
    whole.
    """

    def written(text: str, parameters: Mapping[str, Any]) -> Iterator[WrittenCall | BrokenCall]:
        at = text.find(begin)
        while at >= 0:
            inside = at + len(begin)
            close = text.find(end, inside)
            stop = len(text) if close < 0 else close
            try:
                yield WrittenCall(
                    at, min(len(text), stop + len(end)), *read(text[inside:stop], parameters)
                )
            except BrokenCall as error:
                yield error
            at = text.find(begin, stop)

    return written


def _hermes(inside: str, _: Mapping[str, Any]) -> tuple[str, str, str | None]:
    value, end = _value(inside)
    if inside[end:].strip():
        raise BrokenCall(
            f"a call has more than one value; found {inside[end : end + 80]!r} behind it; write one"
        )
    return _function(value)


def _xml(inside: str, parameters: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """<function=NAME> <parameter=KEY> value ... ; values are text, or JSON where the tool says
    another type.
    """
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", inside, re.DOTALL)
    if match is None:
        raise BrokenCall(f"a call has no <function=NAME>; found {inside[:80]!r}; write one")
    name, body = match[1].strip(), match[2]
    properties = (parameters.get(name) or {}).get("properties") or {}
    arguments, at = {}, 0
    for part in re.finditer(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", body, re.DOTALL):
        if part.start() != at:
            break
        arguments[part[1].strip()] = _typed(part[2], properties.get(part[1].strip()))
        at = part.end()
    if body[at:].strip():
        raise BrokenCall(
            f"a call has more than parameters; found {body[at : at + 80]!r}; close every"
            " <parameter=NAME>"
        )
    return name, json.dumps(arguments, ensure_ascii=False), None


def _typed(text: str, schema: Any) -> Any:
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        value, end = _value(text)
    except BrokenCall:
        return text
    return text if text[end:].strip() else value


def _deepseek(inside: str, _: Mapping[str, Any]) -> tuple[str, str, str | None]:
    _head, mark, body = inside.partition("<｜tool▁sep｜>")
    match = re.fullmatch(r"([^\n]+)\n```json\n(.*?)\n```\s*|([^\n{]+?)(\{.*)", body, re.DOTALL)
    if not mark or match is None:
        raise BrokenCall(f"a call has no name and arguments; found {inside[:80]!r}; write both")
    name, arguments = (match[1], match[2]) if match[1] else (match[3], match[4])
    return name.strip(), _object(arguments), None


def _deepseek_calls(text: str, parameters: Mapping[str, Any]) -> Iterator[WrittenCall | BrokenCall]:
    """Calls, the marks around all of them taken with the first and the last."""
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    for call in between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek)(
        text, parameters
    ):
        if isinstance(call, WrittenCall):
            before, behind = text[: call.begin], text[call.end :]
            begin = call.begin - (len(all_begin) if before.endswith(all_begin) else 0)
            end = call.end + (len(all_end) if behind.startswith(all_end) else 0)
            call = WrittenCall(begin, end, call.name, call.arguments)
        yield call


def _mistral(text: str, _: Mapping[str, Any]) -> Iterator[WrittenCall | BrokenCall]:
    """[TOOL_CALLS] and a list of calls."""
    begin = text.find("[TOOL_CALLS]")
    if begin < 0:
        return
    try:
        values, end = _value(text, begin + len("[TOOL_CALLS]"))
        functions = [
            _function(value) for value in (values if isinstance(values, list) else [values])
        ]
    except BrokenCall as error:
        yield error
        return
    for function in functions:
        yield WrittenCall(begin, end, *function)
        begin = end


def _mistral_named(text: str, _: Mapping[str, Any]) -> Iterator[WrittenCall | BrokenCall]:
    """[TOOL_CALLS]name[ARGS]{...}, maybe with [CALL_ID] between; one after the other."""
    at = text.find("[TOOL_CALLS]")
    while at >= 0:
        stop = at + len("[TOOL_CALLS]")
        head, mark, tail = text[stop:].partition("[ARGS]")
        name, _mark, number = head.partition("[CALL_ID]")
        try:
            if not mark or not name.strip():
                raise BrokenCall(
                    f"a call has no name or no [ARGS]; found {text[at : at + 80]!r}; write both"
                )
            value, end = _value(tail)
            stop = len(text) - len(tail) + end
            yield WrittenCall(at, stop, name.strip(), _object(value), number.strip() or None)
        except BrokenCall as error:
            yield error
        at = text.find("[TOOL_CALLS]", stop)


def _llama(text: str, _: Mapping[str, Any]) -> Iterator[WrittenCall | BrokenCall]:
    """One object with name and parameters, and nothing else."""
    inside = text.strip().removeprefix("<|python_tag|>").lstrip()
    if not inside.startswith("{") or '"name"' not in inside:
        return
    try:
        value, end = _value(inside)
        if inside[end:].strip():
            raise BrokenCall(
                f"a call has text behind it; found {inside[end : end + 80]!r}; write the call alone"
            )
        yield WrittenCall(0, len(text), *_function(value, ("parameters", "arguments")))
    except BrokenCall as error:
        yield error


FORMATS = {
    form.name: form
    for form in (
        CallFormat("hermes", ("<tool_call>",), between("<tool_call>", "</tool_call>", _hermes)),
        CallFormat("xml", ("<tool_call>",), between("<tool_call>", "</tool_call>", _xml)),
        CallFormat("llama", ("{", "<|python_tag|>"), _llama, is_whole=True),
        CallFormat("mistral", ("[TOOL_CALLS]",), _mistral),
        CallFormat("mistral-named", ("[TOOL_CALLS]",), _mistral_named),
        CallFormat(
            "deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), _deepseek_calls
        ),
    )
}
"""By name: of Qwen 2.5 and 3, Hermes; Qwen 3 Coder, Qwen 3.5; Llama 3; Mistral until v7; Mistral
from v11; DeepSeek."""


@dataclass(frozen=True, kw_only=True)
class TextCalls:
    """A call as Python writes it, between two marks: `<call>add(2, b=3)</call>`; what it came to,
    laid out.

    >>> calls = TextCalls(begin="[", end="]", result="{}#")
    >>> calls.format().read("so [add(2, 3)]").message["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"0": 2, "1": 3}'}
    >>> calls.laid_out("5")
    '5#'
    """

    begin: str = "<call>"
    end: str = "</call>"
    result: str = "<result>{}</result>"
    """What the policy hears; {} stands for what the tool gave."""

    def format(self) -> CallFormat:
        """How such calls are read. Arguments without a name get that of the parameter at their
        place.
        """
        return CallFormat("text", (self.begin,), between(self.begin, self.end, _python))

    def laid_out(self, content: str) -> str:
        """A result as the policy reads it."""
        return self.result.replace("{}", content)

    def faults(self) -> list[str]:
        """What cannot be right."""
        faults = []
        if not self.begin or not self.end:
            faults.append(
                f"TextCalls(begin={self.begin!r}, end={self.end!r}) marks no call; give both a text"
            )
        if "{}" not in self.result:
            faults.append(
                f"TextCalls(result={self.result!r}) leaves the result out; put {{}} where it is to"
                " stand"
            )
        return faults


def _python(inside: str, parameters: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """name(value, key=value): plain values alone."""
    try:
        call = ast.parse(inside.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise BrokenCall(
                f"a call is no name(...); found {inside[:80]!r}; write the tool's name and its"
                " arguments"
            )
        names = list((parameters.get(call.func.id) or {}).get("properties") or ())
        arguments = {
            names[at] if at < len(names) else str(at): ast.literal_eval(value)
            for at, value in enumerate(call.args)
        }
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise BrokenCall(
                    f"a call names no argument, or one twice; found {inside[:80]!r}; name each once"
                )
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        return call.func.id, strict_json(arguments), None
    except BrokenCall:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenCall(
            f"a call cannot be read: {error}; found {inside[:80]!r}; write name(value, key=value)"
        ) from error


def definition_of(function: Callable[..., Any]) -> Message:
    """A tool's definition: name, description and the JSON schema of its parameters, read by
    transformers.

    Raises ChatError for parameters without a type hint or a line in a docstring of Google's form.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", str(function))
    try:
        return dict(get_json_schema(function))
    except Exception as error:
        raise ChatError(
            f"'{name}' cannot be a tool: {error}; found it in"
            f" {getattr(function, '__module__', '?')}; "
            f'give every parameter a type hint and a line under "Args:" in its docstring'
        ) from error


def definitions_of(functions: Sequence[Callable[..., Any]]) -> list[Message]:
    """Definitions of several, whose names differ. Raises ChatError."""
    return distinct([definition_of(function) for function in functions])


def distinct(definitions: list[Message]) -> list[Message]:
    """These definitions; raises ChatError where two have one name."""
    names = [definition["function"]["name"] for definition in definitions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ChatError(
            f"two tools have one name; found {twice} twice; leave one of them out, or rename it"
        )
    return definitions


def arguments_of(call: Message, tools: Sequence[Message]) -> dict[str, Any]:
    """The arguments of a call by name. Raises ValueError, whose text the model reads, for a call
    that does not fit.
    """
    function = call["function"]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if function["name"] not in schemas:
        raise ValueError(
            f"there is no tool '{function['name']}'; there are {sorted(schemas)}; call one of these"
        )
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    schema = schemas[function["name"]]
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ValueError(
            f"'{function['name']}' needs {missing}; found {sorted(arguments)}; give each of them"
        )
    unknown = [name for name in arguments if properties and name not in properties]
    if unknown:
        raise ValueError(
            f"'{function['name']}' has no {unknown}; it has {sorted(properties)}; leave them out"
        )
    return dict(arguments)


def result_of(call: Message, content: str) -> Message:
    """What the world answers to a call."""
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": content,
    }


_ARGUMENTS = re.compile(r'[ {<"]*$')
"""With which arguments may begin: the policy writes it, so that it is cut into tokens as it
likes."""
_NAME, _OTHER_ID = "xqf3", "zqcall008"


def call_opening(form: ChatFormat, names: Sequence[str]) -> str:
    """What stands between the generation prompt and the first thing that differs between calls of
    these tools: the name of one of several, the arguments of a single one.

    Raises ChatError for a template whose calls are not read here, or have no such beginning.
    """
    if format_of(form) is None:
        raise _refused(form, "it writes calls in no form that is known here")
    name = names[0] if len(names) == 1 else _NAME
    laid_out = [form.calling(name, {"xqp5": "xqg7"}), form.calling(name, {}, _OTHER_ID)]
    if not all(text.startswith(form.opening) for text in laid_out):
        raise _refused(
            form, f"a generation prompt ends with {form.opening!r}, which stands before no call"
        )
    full, bare = (text.removeprefix(form.opening) for text in laid_out)
    shared = full[: common(full, bare)]
    before, hit, behind = shared.partition(name)
    if not before or not hit:
        raise _refused(
            form,
            f"calls of '{name}' begin alike with {shared[:40]!r} alone, which does not name it",
        )
    return before if len(names) > 1 else before + hit + _ARGUMENTS.sub("", behind)


def _refused(form: ChatFormat, reason: str) -> ChatError:
    return ChatError(
        f"no call can be forced with the chat template of '{form.name}'; found that {reason}; "
        f'send tool_choice="auto", and ask for the call in a message'
    )
