"""Parses the JSON of a call into a `Request`, or refuses it; no field is dropped silently."""

from __future__ import annotations

import difflib
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from operators.serving.errors import ApiError, Bounds, bad, read_json

# Fields of a call's JSON, of the kind and in the range that they have to be; ApiError (400) for
# others.

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def object_of(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that holds an object, or an empty one. Raises ApiError."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise bad(name, f"'{name}' must be an object; found {shown(value)}; mend it")
    return value


def text_of(fields: Mapping[str, Any], name: str, most: int) -> str:
    """A field that holds a text of at most so many characters. Raises ApiError."""
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most:
        code = "missing_required_parameter" if value is None else "invalid_value"
        raise bad(
            name,
            f"'{name}' must be a text of at most {most} characters; found {shown(value)}; give one",
            code,
        )
    return value


def flag_of(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is not given. Raises ApiError."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise bad(name, f"'{name}' must be true or false; found {shown(value)}; mend it")
    return value


def list_of(where: str, value: Any) -> list[Any]:
    """A list. Raises ApiError."""
    if not isinstance(value, list):
        raise bad(where, f"'{where}' must be a list; found {shown(value)}; mend it")
    return value


def whole_of(
    fields: Mapping[str, Any],
    name: str,
    default: int | None,
    *,
    least: int,
    most: int | None = None,
) -> Any:
    """A field that holds a whole number. Raises ApiError."""
    value = fields.get(name, default)
    if type(value) is not int or value < least or (most is not None and value > most):
        upto = "" if most is None else f" and at most {most}"
        raise bad(
            name,
            f"'{name}' must be a whole number of at least {least}{upto}; found {shown(value)};"
            " mend it",
        )
    return value


def number_of(
    fields: Mapping[str, Any],
    name: str,
    default: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A field that holds a finite number. Raises ApiError."""
    value = fields.get(name, default)
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
    if not fits or value < least or value <= above or value > most:
        range_ = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
        upto = "" if most == math.inf else f" and at most {most:g}"
        raise bad(name, f"'{name}' must be a number {range_}{upto}; found {shown(value)}; mend it")
    return float(value)


def shown(value: Any) -> str:
    """A value of any size, shortened to fit into a sentence."""
    brief = _BRIEF.repr(value)
    return brief if len(brief) <= 80 else brief[:77] + "..."


Kind = Literal["completion", "chat"]

MOST_CHOICES = 128
"""Largest n."""
MOST_ALTERNATIVES = 20
"""Largest top_logprobs, and logprobs of a completion."""
MOST_TOKENS = 2**31 - 1
"""Of a completion, and of top_k: what the engine's numbers hold."""

WISHES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "length_penalty": (1,),
}
"""How tokens are to be drawn, beside the knobs of `Request`, with the values that ask for nothing:
no others can be granted, so that they are refused, but where no wish of a call's is
(`Bounds.samples`)."""

ONLY: dict[str, tuple[Any, ...]] = {
    **WISHES,
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are accepted with the values that ask for nothing."""


_EITHER = (
    *("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
    *("logprobs", "stream", "stream_options", "user", "top_k", "min_p", "repetition_penalty"),
    *("return_token_ids", "stop_token_ids"),
)
_WITHOUT_EFFECT = (
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority"),
    *("prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "reasoning_effort"),
    *("verbosity", "prediction", "cache_salt", "request_id"),
)
"""Accepted with any value, since no value changes what is generated here."""
_CHAT = (
    *("messages", "tools", "tool_choice", "top_logprobs", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
_ANY = dict.fromkeys((*_EITHER, *_WITHOUT_EFFECT))
FIELDS: dict[Kind, dict[str, Any]] = {
    "completion": {**ONLY, **_ANY, "prompt": None},
    "chat": {**ONLY, **_ANY, **dict.fromkeys(_CHAT)},
}
"""What each kind of call may have, as `fields_of` takes it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call, its fields checked, with their defaults."""

    kind: Kind
    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Of a completion: texts or token ids."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Of a chat."""
    begun: str = ""
    """What the assistant has begun to say in its turn, which the policy is to go on with."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template."""
    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: tuple[str, ...] = ()
    """Names of tools of which one has to be called; none: none has to."""
    max_tokens: int | None = None
    """Most tokens of a completion; None: what the context has room for."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a rollout, beside the model's own."""
    seed: int | None = None
    logprobs: bool = False
    alternatives: int = 0
    """Likeliest tokens that are asked for beside each sampled one."""
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    user: str | None = None

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs of `sampling_params.Sampling`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names}

    @property
    def parameters(self) -> dict[str, Any]:
        """What was asked for beside the prompt, as it is recorded."""
        names = ("max_tokens", "n", "stop", "stop_tokens", "seed")
        options = {
            "tools": list(self.tools),
            "must_call": list(self.must_call),
            "chat_template_kwargs": self.options,
        }
        used_options = {name: value for name, value in options.items() if value}
        return {**self.knobs, **{name: getattr(self, name) for name in names}, **used_options}


def parse(kind: Kind, body: Any, bounds: Bounds | None = None) -> Request:
    """The call that a JSON body asks for. Raises ApiError (400) for what is wrong, unknown or
    cannot be done.
    """
    bounds = bounds or Bounds()
    fields = fields_of(body, FIELDS[kind], bounds)
    chat = kind == "chat"
    messages, begun = _begun(fields, _messages(fields, bounds)) if chat else ((), "")
    n = whole_of(fields, "n", 1, least=1, most=MOST_CHOICES)
    return Request(
        kind=kind,
        model=text_of(fields, "model", bounds.name_characters),
        prompts=() if chat else _prompts(fields, bounds.rollouts // n),
        messages=messages,
        begun=begun,
        options=object_of(fields, "chat_template_kwargs"),
        tools=_tools(fields) if chat else (),
        must_call=_must_call(fields) if chat else (),
        max_tokens=_max_tokens(kind, fields),
        temperature=number_of(fields, "temperature", 1.0, least=0.0),
        top_p=number_of(fields, "top_p", 1.0, above=0.0, most=1.0),
        min_p=number_of(fields, "min_p", 0.0, least=0.0, most=1.0),
        repetition_penalty=number_of(fields, "repetition_penalty", 1.0, above=0.0),
        top_k=max(0, whole_of(fields, "top_k", 0, least=-1, most=MOST_TOKENS)),
        n=n,
        stop=_stop(fields, bounds),
        stop_tokens=_stop_tokens(fields, bounds),
        seed=(
            whole_of(fields, "seed", None, least=-(2**63), most=2**63 - 1)
            if "seed" in fields
            else None
        ),
        logprobs=_logprobs(kind, fields),
        alternatives=_alternatives(kind, fields),
        stream=flag_of(fields, "stream"),
        include_usage=_include_usage(fields),
        return_token_ids=flag_of(fields, "return_token_ids"),
        user=text_of(fields, "user", bounds.name_characters) if "user" in fields else None,
    )


def fields_of(
    body: Any, allowed: Mapping[str, Any], bounds: Bounds | None = None
) -> dict[str, Any]:
    """What a body gives, nulls left out. Raises ApiError for no object, and for fields (or values)
    that are not allowed.

    allowed: by field None for any value, the values that may stand there, or what says whether one
    may. bounds: whether wishes how to sample are set aside, whatever their value.
    """
    if not isinstance(body, dict):
        raise ApiError(
            400,
            f"the body is no JSON object; found {type(body).__name__}; send {{...}}",
            code="invalid_json",
        )
    if bounds is not None and not bounds.samples:
        names = (*WISHES, "seed", "top_k", "min_p", "repetition_penalty")
        allowed = {**allowed, **dict.fromkeys(names)}
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in allowed:
            close = difflib.get_close_matches(name[:80], allowed, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "leave it out"
            raise bad(
                name[:80],
                f"'{name[:80]}' is not a field that this server knows; found {shown(value)};"
                f" {hint}",
                "unknown_parameter",
            )
        fits = allowed[name]
        if fits is not None and not (fits(value) if callable(fits) else value in fits):
            instead = "" if callable(fits) else f", or send {fits[0]!r}"
            raise bad(
                name,
                f"'{name}' is not supported here; found {shown(value)}; leave it out{instead}",
                "unsupported_parameter",
            )
    return fields


def texts_of(where: str, content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """A text, or parts of text, as one. Raises ApiError."""
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else content
    texts = []
    for part in list_of(where, parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            raise bad(
                where,
                f"'{where}' may be a text or parts of type {kinds[0]}; found {shown(part)}; "
                f'send {{"type": "{kinds[0]}", "text": ...}}',
                "unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _prompts(fields: Mapping[str, Any], most: int) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, token ids, or lists of them: at most so many prompts."""
    value = fields.get("prompt")
    many: list[Any] = value if isinstance(value, list) and not _is_ids(value) else [value]
    if (
        value is None
        or not many
        or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in many)
    ):
        raise bad(
            "prompt",
            "'prompt' must be a text, a list of texts, token ids, or a list of token id lists;"
            f" found {shown(value)}; give at least one, none of them empty",
            "missing_required_parameter" if value is None else "invalid_value",
        )
    if len(many) > most:
        raise bad(
            "prompt",
            f"'prompt' has too many prompts for this n; found {len(many)} of at most {most}; send"
            " less",
        )
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in many)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token >= 0 for token in value)
    )


def _messages(fields: Mapping[str, Any], bounds: Bounds) -> tuple[Mapping[str, Any], ...]:
    messages = fields.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise bad(
            "messages",
            f'\'messages\' must be a list of {{"role", "content"}}; found {shown(messages)}; give'
            " at"
            " least one",
            "missing_required_parameter" if messages is None else "invalid_value",
        )
    if len(messages) > bounds.messages:
        raise bad(
            "messages",
            f"'messages' is too long; found {len(messages)} of at most {bounds.messages}; send"
            " fewer",
        )
    return tuple(_message(place, message, bounds.values) for place, message in enumerate(messages))


def _begun(
    fields: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...]
) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """The messages, and the text of a last assistant message that the policy is to continue."""
    goes_on, opens = (
        flag_of(fields, "continue_final_message"),
        fields.get("add_generation_prompt", True),
    )
    last = messages[-1]
    if not goes_on and opens is not True:
        raise bad(
            "add_generation_prompt",
            "a call is for a turn of the assistant's; found add_generation_prompt "
            f"{shown(opens)}; leave it out, or send continue_final_message=true",
            "unsupported_parameter",
        )
    if goes_on and (last["role"] != "assistant" or last.get("tool_calls") or len(messages) < 2):
        raise bad(
            "continue_final_message",
            "only a text of the assistant's behind other messages is gone on with; found a "
            f"last message {shown(last)}; send one, or leave continue_final_message out",
        )
    return (messages[:-1], last["content"]) if goes_on else (messages, "")


def _message(place: int, message: Mapping[str, Any], values: int) -> Mapping[str, Any]:
    """A message as chat templates take it: no nulls, text content in one piece, arguments of tool
    calls as objects.
    """
    where = f"messages[{place}]"
    cleaned = {name: value for name, value in message.items() if value is not None}
    if not isinstance(cleaned.get("role"), str):
        raise bad(
            f"{where}.role",
            f'\'{where}\' needs a role; found {shown(message)}; add "role": "user", say',
        )
    cleaned["content"] = texts_of(f"{where}.content", cleaned.get("content", ""))
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = [
            _tool_call(f"{where}.tool_calls", call, values)
            for call in list_of(where, cleaned["tool_calls"])
        ]
    return cleaned


def _tool_call(where: str, call: Any, values: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad(
            where,
            f"'{where}' holds something that is no call of a function: {shown(call)}; mend it",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}", values)
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = list_of("tools", fields.get("tools", []))
    if not all(isinstance(tool, dict) for tool in tools):
        raise bad("tools", f"'tools' must be a list of objects; found {shown(tools)}; mend it")
    return () if fields.get("tool_choice") == "none" else tuple(tools)


def _must_call(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of tools of which `tool_choice` demands a call."""
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return ()
    names = [name for name in map(_function_name, _tools(fields)) if name is not None]
    if names and choice == "required":
        return tuple(dict.fromkeys(names))
    if (
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and _function_name(choice) in names
    ):
        return (str(_function_name(choice)),)
    raise bad(
        "tool_choice",
        "'tool_choice' may be auto, none, required, or a function among the tools of the call;"
        f" found {shown(choice)} and tools {shown(names)}; send tools, and one of these",
    )


def _function_name(named: Mapping[str, Any]) -> str | None:
    function = named.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _max_tokens(kind: Kind, fields: Mapping[str, Any]) -> int | None:
    """The default is 16 for a completion, as in OpenAI's API; a chat may fill the context."""
    limits = {
        name: fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields
    }
    if len(set(map(str, limits.values()))) > 1:
        raise bad(
            "max_tokens",
            f"'max_tokens' and 'max_completion_tokens' differ; found {shown(limits)}; send one of"
            " them",
        )
    for name in limits:
        return int(whole_of(fields, name, 0, least=1, most=MOST_TOKENS))
    return 16 if kind == "completion" else None


def _logprobs(kind: Kind, fields: Mapping[str, Any]) -> bool:
    """Whether each sampled token's log-probability is asked for."""
    return "logprobs" in fields if kind == "completion" else flag_of(fields, "logprobs")


def _alternatives(kind: Kind, fields: Mapping[str, Any]) -> int:
    most = "top_logprobs" if kind == "chat" else "logprobs"
    count = int(whole_of(fields, most, 0, least=0, most=MOST_ALTERNATIVES))
    if count and kind == "chat" and not fields.get("logprobs"):
        raise bad(
            most,
            f"'{most}' needs log-probabilities; found {count} without them; send logprobs=true",
        )
    return count


def _stop(fields: Mapping[str, Any], bounds: Bounds) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise bad(
            "stop",
            f"'stop' must be a text or a list of texts, none empty; found {shown(stop)}; mend it",
        )
    longest = max(map(len, texts), default=0)
    if len(texts) > bounds.stops or longest > bounds.stop_characters:
        raise bad(
            "stop",
            f"'stop' may have {bounds.stops} texts of {bounds.stop_characters} characters; found"
            f" {len(texts)}, the longest of {longest}; send fewer or shorter ones",
        )
    return tuple(dict.fromkeys(texts))


def _stop_tokens(fields: Mapping[str, Any], bounds: Bounds) -> tuple[int, ...]:
    stops = fields.get("stop_token_ids", [])
    if (
        not isinstance(stops, list)
        or len(stops) > bounds.stops
        or not all(type(token) is int for token in stops)
    ):
        raise bad(
            "stop_token_ids",
            f"'stop_token_ids' must be a list of ids; found {shown(stops)}; mend it",
        )
    return tuple(stops)


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    names = {"include_usage", "include_obfuscation"}
    if not isinstance(options, dict) or not set(options) <= names:
        raise bad(
            "stream_options",
            f"'stream_options' knows {sorted(names)}; found {shown(options)}; mend it",
        )
    if options and not fields.get("stream"):
        raise bad(
            "stream_options",
            "'stream_options' needs a stream; found stream unset; send stream=true",
        )
    return flag_of(options, "include_usage")
