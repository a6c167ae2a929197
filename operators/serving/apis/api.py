"""The interface of an API to the routes, with OpenAI's chats and completions and the token
route: bodies become requests, calls become JSON, streams become events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from operators.serving.calls import Choice, ServedCall
from operators.serving.errors import ApiError, Bounds, bad
from operators.serving.requests import MOST_TOKENS, WISHES, Request, parse, set_aside
from operators.serving.text import Vocabulary

DONE = "data: [DONE]\n\n"


def event(body: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def whole(call: ServedCall, vocabulary: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    request = call.request
    body = _head(call, chunk=False)
    body["choices"] = [_whole_choice(call, choice, vocabulary) for choice in call.choices]
    body["usage"] = usage(call)
    if request.return_token_ids and request.kind == "chat":
        body["prompt_token_ids"] = list(call.parts[0].group.prompt_tokens)
    return body


def usage(call: ServedCall) -> dict[str, int]:
    """Tokens read and written; a prompt counts once, however many choices it has."""
    read = sum(len(part.group.prompt_tokens) for part in call.parts)
    wrote = sum(len(choice.tokens) for choice in call.choices)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


@dataclass
class _Sent:
    """How much of a choice has gone out."""

    characters: int = 0
    tokens: int = 0
    begun: bool = False
    ended: bool = False


class Chunks:
    """The chunks of a call's stream, cut as the news comes; together they are the whole answer."""

    def __init__(self, call: ServedCall, vocabulary: Vocabulary) -> None:
        """Nothing sent yet."""
        self._call, self._vocabulary = call, vocabulary
        self._sent = [_Sent() for _ in call.choices]

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come since the last call."""
        for choice, sent in zip(self._call.choices, self._sent, strict=True):
            if not sent.begun:
                sent.begun = True
                yield from self._opening(choice)
            yield from self._grown(choice, sent)
            if choice.finish_reason is not None and not sent.ended:
                sent.ended = True
                if calls := (choice.message or {}).get("tool_calls"):
                    indexed = [{"index": at, **call} for at, call in enumerate(calls)]
                    yield self._chunk({**self._delta(choice, ""), "delta": {"tool_calls": indexed}})
                yield self._chunk(
                    {**self._delta(choice, ""), "finish_reason": choice.finish_reason}
                )

    def last(self) -> Iterator[dict[str, Any]]:
        """What comes after all choices."""
        if self._call.request.include_usage:
            yield {**_head(self._call, chunk=True), "choices": [], "usage": usage(self._call)}

    def _opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        asks, chat = self._call.request.return_token_ids, self._call.request.kind == "chat"
        part = self._delta(choice, "")
        if chat:
            part["delta"] = {"role": "assistant", "content": ""}
        elif asks:
            part["prompt_token_ids"] = _prompt_of(self._call, choice)
        if chat or asks:
            chunk = self._chunk(part)
            if chat and asks:
                chunk["prompt_token_ids"] = _prompt_of(self._call, choice)
            yield chunk

    def _grown(self, choice: Choice, sent: _Sent) -> Iterator[dict[str, Any]]:
        request = self._call.request
        shown = choice.shown if request.kind == "chat" else choice.transcript.text
        text, drawn = shown[sent.characters :], len(choice.tokens)
        counts = request.logprobs or request.return_token_ids
        if not text and not (counts and drawn > sent.tokens):
            return
        part = self._delta(choice, text)
        if request.logprobs:
            part["logprobs"] = _logprobs(request.kind, choice, self._vocabulary, sent.tokens)
        if request.return_token_ids:
            part["token_ids"] = choice.tokens.ids[sent.tokens :].tolist()
        sent.characters, sent.tokens = sent.characters + len(text), drawn
        yield self._chunk(part)

    def _delta(self, choice: Choice, text: str) -> dict[str, Any]:
        grown = (
            {"delta": {"content": text} if text else {}}
            if self._call.request.kind == "chat"
            else {"text": text}
        )
        return {"index": choice.index, **grown, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = {**_head(self._call, chunk=True), "choices": [choice]}
        return {**body, "usage": None} if self._call.request.include_usage else body


def _head(call: ServedCall, *, chunk: bool) -> dict[str, Any]:
    chat = "chat.completion.chunk" if chunk else "chat.completion"
    kind = chat if call.request.kind == "chat" else "text_completion"
    return {
        "id": call.request_id,
        "object": kind,
        "created": call.created,
        "model": call.request.model,
    }


def _whole_choice(call: ServedCall, choice: Choice, vocabulary: Vocabulary) -> dict[str, Any]:
    request, text = call.request, choice.transcript.text
    body: dict[str, Any] = {"index": choice.index}
    if request.kind == "chat":
        message = choice.message or {"content": text}
        calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        content = None if calls and not message["content"] else message["content"]
        body["message"] = {"role": "assistant", "content": content, "refusal": None, **calls}
    else:
        body["text"] = text
    body["logprobs"] = _logprobs(request.kind, choice, vocabulary, 0) if request.logprobs else None
    body["finish_reason"] = choice.finish_reason
    if request.return_token_ids:
        body["token_ids"] = choice.tokens.ids.tolist()
        if request.kind == "completion":
            body["prompt_token_ids"] = _prompt_of(call, choice)
    return body


def _prompt_of(call: ServedCall, choice: Choice) -> list[int]:
    return list(call.parts[choice.index // call.request.n].group.prompt_tokens)


def _logprobs(kind: str, choice: Choice, vocabulary: Vocabulary, since: int) -> dict[str, Any]:
    """Of every sampled token from `since` on, end tokens and those of a stop string too."""
    sampled = choice.tokens[since:]
    ids, values = sampled.ids.tolist(), [float(value) for value in sampled.logprobs]
    pieces = [vocabulary.decode([token], special=True) for token in ids]
    likeliest = [
        [(token, vocabulary.decode([token], special=True), value) for token, value in alternatives]
        for alternatives in choice.alternatives[since:]
    ] or [[] for _ in ids]
    if kind == "chat":
        content = [
            {
                **_entry(text, value),
                "top_logprobs": [_entry(name, share) for _, name, share in alternatives],
            }
            for text, value, alternatives in zip(pieces, values, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}
    places = range(since, since + len(ids))
    offsets = [
        choice.transcript.offsets[at] if at < len(choice.transcript.offsets) else None
        for at in places
    ]
    last = len(choice.transcript.text)
    return {
        "tokens": pieces,
        "token_logprobs": values,
        "top_logprobs": [_by_text(alternatives) for alternatives in likeliest]
        if choice.alternatives
        else None,
        "text_offset": [last if offset is None else offset for offset in offsets],
    }


def _by_text(likeliest: Sequence[tuple[int, str, float]]) -> dict[str, float]:
    """By text; a token whose text is a part of a character, or that of a likelier one, by its
    id.
    """
    by_text: dict[str, float] = {}
    for token, text, value in likeliest:
        by_text[f"token_id:{token}" if text in by_text or "\ufffd" in text else text] = value
    return by_text


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": _bytes(text)}


def _bytes(text: str) -> list[int] | None:
    """UTF-8 of a token; None where it is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())


class Told(Protocol):
    """A call's stream of events, as its news come."""

    def new(self) -> Iterator[str]:
        """Events since the last call."""

    def last(self) -> Iterator[str]:
        """Events after all else, where the call ended well."""


@dataclass(frozen=True)
class Api:
    """One of them."""

    path: str
    parse: Callable[[Any, Bounds], Request]
    """Raises ApiError."""
    whole: Callable[[ServedCall, Vocabulary], Mapping[str, Any]]
    stream: Callable[[ServedCall, Vocabulary], Told]
    failed: Callable[[ApiError], Mapping[str, Any]] = lambda error: error.body
    """The JSON of an error."""
    event: Callable[[Mapping[str, Any]], str] = lambda body: (
        f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    )
    """An error within a stream."""
    done: str = ""
    """What every stream ends with."""


def named_event(body: Mapping[str, Any]) -> str:
    """A server-sent event that has the name of its type."""
    return f"event: {body['type']}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


def only_fields(body: Any, allowed: Mapping[str, Any]) -> dict[str, Any]:
    """What a body gives, nulls left out. Raises ApiError for no object, and for fields (or values)
    that are not allowed.

    allowed: by field None for any value, the values that may stand there, or what says whether one
    may.
    """
    if not isinstance(body, dict):
        raise ApiError(
            400,
            f"the body is no JSON object; found {type(body).__name__}; send {{...}}",
            code="invalid_json",
        )
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        fits = allowed.get(name, ())
        if fits is not None and not (fits(value) if callable(fits) else value in fits):
            raise bad(
                name[:80],
                f"'{name[:80]}' is not supported here with this value; found {str(value)[:80]!r};"
                " leave it out",
                "unsupported_parameter",
            )
    return fields


def is_search(tool: Any) -> bool:
    """Whether a tool is a web search that the API's own server would run: there is none here, and
    the policy does not see it.
    """
    return isinstance(tool, dict) and str(tool.get("type")).startswith("web_search")


def texts_of(where: str, content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """A text, or blocks of text, as one. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(
            where,
            f"'{where}' is no text and no list of blocks; found {str(content)[:80]!r}; mend it",
        )
    for block in content:
        if (
            not isinstance(block, dict)
            or block.get("type") not in kinds
            or not isinstance(block.get("text"), str)
        ):
            raise bad(
                where,
                f"'{where}' may have blocks of type {kinds[0]}; found {str(block)[:80]!r}; send"
                " text",
                "unsupported_content",
            )
    return "".join(block["text"] for block in content)


class ToldChunks:
    """Chunks as events."""

    def __init__(self, call: ServedCall, vocabulary: Vocabulary) -> None:
        """Nothing sent yet."""
        self._chunks = Chunks(call, vocabulary)

    def new(self) -> Iterator[str]:
        """Events since the last call."""
        yield from map(event, self._chunks.new())

    def last(self) -> Iterator[str]:
        """Events after all else."""
        yield from map(event, self._chunks.last())


CHAT_COMPLETIONS = Api("/v1/chat/completions", partial(parse, "chat"), whole, ToldChunks, done=DONE)
COMPLETIONS = Api("/v1/completions", partial(parse, "completion"), whole, ToldChunks, done=DONE)


FIELDS: dict[str, Any] = {
    "model": None,
    "token_ids": None,
    "sampling_params": None,
    "cache_salt": None,
    "priority": None,
    "request_id": None,
    "stream": None,
    "return_token_ids": None,
    "features": ([], {}),
    "content_parts": ([],),
}
"""What a body may give; salt and priority change nothing here."""
SAMPLING: dict[str, Any] = {
    "max_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "n": None,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "logprobs": (0, 1),
    "prompt_logprobs": (0,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": None,
    "detokenize": None,
    "include_stop_str_in_output": None,
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "output_kind": None,
    "routed_experts_prompt_start": None,
    **WISHES,
}
_OWN = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
)


def parse_tokens(body: Any, bounds: Bounds) -> Request:
    """The call that a body asks for. Raises ApiError."""
    fields = only_fields(body, FIELDS)
    sampling = only_fields(fields.get("sampling_params", {}), {**SAMPLING, **set_aside(bounds)})
    ids = fields.get("token_ids")
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(token) is int and token >= 0 for token in ids)
    ):
        raise bad(
            "token_ids",
            f"'token_ids' must be a list of ids; found {str(ids)[:80]!r}; give at least one",
        )
    knobs = {name: sampling[name] for name in _OWN if name in sampling}
    request = parse(
        "completion",
        {
            "max_tokens": MOST_TOKENS,
            **knobs,
            "model": fields.get("model"),
            "prompt": ids,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": fields.get("stream", False),
        },
        bounds,
    )
    return request.with_(max_tokens=None if "max_tokens" not in sampling else request.max_tokens)


def whole_tokens(call: ServedCall, _: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    choices = []
    for choice in call.choices:
        ids, values = choice.tokens.ids.tolist(), [float(value) for value in choice.tokens.logprobs]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(ids, values, strict=True)
        ]
        choices.append(
            {
                "index": choice.index,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": choice.finish_reason,
                "versions": choice.tokens.versions.tolist(),
            }
        )
    return {
        "request_id": call.request_id,
        "model": call.request.model,
        "choices": choices,
        "prompt_token_ids": list(call.parts[0].group.prompt_tokens),
        "usage": usage(call),
    }


class ToldTokens:
    """The whole answer as one event."""

    def __init__(self, call: ServedCall, vocabulary: Vocabulary) -> None:
        """Nothing sent yet."""
        self._call, self._vocabulary = call, vocabulary

    def new(self) -> Iterator[str]:
        """Nothing before the end."""
        yield from ()

    def last(self) -> Iterator[str]:
        """The answer."""
        yield event(whole_tokens(self._call, self._vocabulary))


TOKEN_ROUTE = Api("/inference/v1/generate", parse_tokens, whole_tokens, ToldTokens)
