"""The interface of an API to the routes, with OpenAI's chats and completions and the token
route: bodies become requests, calls become JSON, streams become events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from operators.serving.calls import Choice, ServedCall
from operators.serving.errors import ApiError, Bounds, bad
from operators.serving.requests import (
    MOST_TOKENS,
    WISHES,
    Request,
    fields_of,
    parse,
    shown,
)
from operators.serving.text import Vocabulary

Body: TypeAlias = Mapping[str, Any]
"""JSON of an answer, or of an event of its stream."""
Events: TypeAlias = Iterator[Body | None]
"""A stream as a call grows: None where there is no more for now; it ends once the call is over."""


def event(body: Body) -> str:
    """One server-sent event, which has the name of its type where it has one."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, ensure_ascii=False)}\n\n"


def news(events: Events) -> Iterator[Body]:
    """What has come of a stream since it was asked last."""
    return iter(partial(next, events, None), None)


@dataclass(frozen=True)
class Api:
    """How callers speak: their bodies become requests, and calls become answers; pure functions."""

    path: str
    parse: Callable[[Any, Bounds], Request]
    """Raises ApiError."""
    whole: Callable[[ServedCall, Vocabulary], Body]
    """The answer of a call that is over."""
    events: Callable[[ServedCall, Vocabulary], Events]
    """The stream of a call as it grows."""
    failed: Callable[[ApiError], Body] = lambda error: error.body
    """The JSON of an error, which may stand in a stream."""
    done: str = ""
    """What every stream ends with."""


def whole(call: ServedCall, vocabulary: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    request = call.request
    body = _head(call, chunk=False)
    body["choices"] = [_whole_choice(call, choice, vocabulary) for choice in call.choices]
    body["usage"] = usage(call)
    if request.return_token_ids and request.kind == "chat":
        body["prompt_token_ids"] = list(call.parts[0].prompt.tokens)
    return body


def usage(call: ServedCall) -> dict[str, int]:
    """Tokens read and written; a prompt counts once, however many choices it has."""
    read = sum(len(part.prompt.tokens) for part in call.parts)
    wrote = sum(len(choice.tokens) for choice in call.choices)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def chunks(call: ServedCall, vocabulary: Vocabulary) -> Events:
    """The chunks of a call's stream, cut as the news comes; together they are the whole answer."""
    choices = [_choice_chunks(call, choice, vocabulary) for choice in call.choices]
    while True:
        for choice in choices:
            yield from news(choice)
        if call.is_over:
            break
        yield None
    if call.request.include_usage:
        yield {**_head(call, chunk=True), "choices": [], "usage": usage(call)}


def _choice_chunks(call: ServedCall, choice: Choice, vocabulary: Vocabulary) -> Events:
    request, chat = call.request, call.request.kind == "chat"
    asks, counts = request.return_token_ids, request.logprobs or request.return_token_ids
    if chat:
        opening = _chunk(call, choice, "", delta={"role": "assistant", "content": ""})
        yield {**opening, "prompt_token_ids": _prompt_of(call, choice)} if asks else opening
    elif asks:
        yield _chunk(call, choice, "", prompt_token_ids=_prompt_of(call, choice))
    characters = tokens = 0
    while True:
        text = (choice.shown if chat else choice.transcript.text)[characters:]
        drawn = len(choice.tokens)
        if text or (counts and drawn > tokens):
            more: dict[str, Any] = {}
            if request.logprobs:
                more["logprobs"] = _logprobs(request.kind, choice, vocabulary, tokens)
            if asks:
                more["token_ids"] = choice.tokens.ids[tokens:].tolist()
            characters, tokens = characters + len(text), drawn
            yield _chunk(call, choice, text, **more)
        if choice.finish_reason is not None:
            break
        yield None
    if calls := (choice.message or {}).get("tool_calls"):
        indexed = [{"index": at, **tool_call} for at, tool_call in enumerate(calls)]
        yield _chunk(call, choice, "", delta={"tool_calls": indexed})
    yield _chunk(call, choice, "", finish_reason=choice.finish_reason)


def _chunk(call: ServedCall, choice: Choice, text: str, **fields: Any) -> dict[str, Any]:
    """A chunk of one choice."""
    grown = (
        {"delta": {"content": text} if text else {}}
        if call.request.kind == "chat"
        else {"text": text}
    )
    part = {"index": choice.index, **grown, "logprobs": None, "finish_reason": None, **fields}
    body = {**_head(call, chunk=True), "choices": [part]}
    return {**body, "usage": None} if call.request.include_usage else body


def _head(call: ServedCall, *, chunk: bool) -> dict[str, Any]:
    chat = "chat.completion.chunk" if chunk else "chat.completion"
    kind = chat if call.request.kind == "chat" else "text_completion"
    return {
        "id": call.request_id,
        "object": kind,
        "created": call.created_ms // 1000,
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
    return list(call.parts[choice.index // call.request.n].prompt.tokens)


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


def is_search(tool: Any) -> bool:
    """Whether a tool is a web search that the API's own server would run: there is none here, and
    the policy does not see it.
    """
    return isinstance(tool, dict) and str(tool.get("type")).startswith("web_search")


_DONE = "data: [DONE]\n\n"
CHAT_COMPLETIONS = Api("/v1/chat/completions", partial(parse, "chat"), whole, chunks, done=_DONE)
COMPLETIONS = Api("/v1/completions", partial(parse, "completion"), whole, chunks, done=_DONE)


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
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("n", "seed", "stop", "stop_token_ids"),
)


def parse_tokens(body: Any, bounds: Bounds) -> Request:
    """The call that a body asks for. Raises ApiError."""
    fields = fields_of(body, FIELDS)
    sampling = fields_of(fields.get("sampling_params", {}), SAMPLING, bounds)
    ids = fields.get("token_ids")
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(token) is int and token >= 0 for token in ids)
    ):
        raise bad(
            "token_ids",
            f"'token_ids' must be a list of ids; found {shown(ids)}; give at least one",
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
    return request if "max_tokens" in sampling else replace(request, max_tokens=None)


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
        "prompt_token_ids": list(call.parts[0].prompt.tokens),
        "usage": usage(call),
    }


def token_events(call: ServedCall, vocabulary: Vocabulary) -> Events:
    """The whole answer as one event."""
    while not call.is_over:
        yield None
    yield whole_tokens(call, vocabulary)


TOKEN_ROUTE = Api("/inference/v1/generate", parse_tokens, whole_tokens, token_events)
