"""OpenAI's responses API: bodies become chats, answers become output items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from operators.serving.apis import Api, Events, is_search, usage
from operators.serving.calls import Choice, ServedCall
from operators.serving.errors import Bounds, bad
from operators.serving.requests import Request, fields_of, list_of, parse, shown, texts_of
from operators.serving.text import Vocabulary

FIELDS: dict[str, Any] = {
    "model": None,
    "input": None,
    "instructions": None,
    "tools": None,
    "tool_choice": None,
    "temperature": None,
    "top_p": None,
    "max_output_tokens": None,
    "stream": None,
    "user": None,
    "metadata": None,
    "store": None,
    "parallel_tool_calls": None,
    "service_tier": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "include": None,
    "reasoning": None,
    "text": lambda text: isinstance(text, dict) and text.get("format") in (None, {"type": "text"}),
    "stream_options": None,
    "max_tool_calls": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "context_management": None,
    "client_metadata": None,
}
"""What a body may give; `include`, reasoning and what stands behind it change nothing here."""
OTHERS = ("reasoning", "web_search_call")
"""Items of other models' turns, which the policy is not told of."""
TEXTS = ("input_text", "output_text", "text")


def parse_response(body: Any, bounds: Bounds) -> Request:
    """The chat that a body asks for. Raises ApiError."""
    fields = fields_of(body, FIELDS, bounds)
    messages: list[Any] = []
    if "instructions" in fields:
        messages.append(
            {"role": "system", "content": texts_of("instructions", fields["instructions"])}
        )
    prompt = fields.get("input")
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for place, item in enumerate(list_of("input", items)):
        if isinstance(item, dict) and item.get("type") in OTHERS:
            continue
        _add(messages, f"input[{place}]", item)
    chat: dict[str, Any] = {
        name: fields[name]
        for name in ("model", "temperature", "top_p", "stream", "user")
        if name in fields
    }
    chat |= {"messages": messages, "max_tokens": fields.get("max_output_tokens")}
    chat["tools"] = [_tool(tool) for tool in fields.get("tools") or () if not is_search(tool)]
    chat["tool_choice"] = _tool_choice(fields.get("tool_choice"))
    return parse("chat", chat, bounds)


def _tool_choice(choice: Any) -> Any:
    """As a chat has it."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _tool(tool: Any) -> Any:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("name"), str)
    ):
        raise bad(
            "tools",
            f"'tools' may have functions; found {shown(tool)}; give type, name and parameters",
        )
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _add(messages: list[Any], where: str, item: Any) -> None:
    """An item of the input as a message; calls belong to the assistant's message before them."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
        messages.append(
            {"role": item["role"], "content": texts_of(where, item.get("content"), TEXTS)}
        )
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        content = texts_of(where, item.get("output"), TEXTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise bad(
            where,
            f"'{where}' is no message, call or result; found {shown(item)}; leave it out",
        )


def whole_response(call: ServedCall, _: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    (choice,) = call.choices
    short = choice.finish_reason == "length"
    return {
        **_head(call),
        "status": "incomplete" if short else "completed",
        "output": _items(call, choice),
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "usage": _usage(call),
    }


def _head(call: ServedCall) -> dict[str, Any]:
    request = call.request
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools]
    return {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": call.created_ms // 1000,
        "model": request.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": _chosen(request.must_call),
        "tools": tools,
        "max_output_tokens": request.max_tokens,
        "previous_response_id": None,
        "truncation": "disabled",
        "usage": None,
    }


def _chosen(must_call: Sequence[str]) -> Any:
    if len(must_call) == 1:
        return {"type": "function", "name": must_call[0]}
    return "required" if must_call else "auto"


def _usage(call: ServedCall) -> dict[str, Any]:
    counts = usage(call)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _message_item(call: ServedCall, text: str | None) -> dict[str, Any]:
    """The item of a text; None: as it begins."""
    part = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    return {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": part,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_items(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for call in (choice.message or {}).get("tool_calls", ())
    ]


def _items(call: ServedCall, choice: Choice) -> list[dict[str, Any]]:
    calls = _call_items(choice)
    return [*([_message_item(call, choice.shown)] if choice.shown or not calls else []), *calls]


def response_events(call: ServedCall, vocabulary: Vocabulary) -> Events:
    """The events of a response, item by item, numbered."""
    number = 0
    for body in _events(call, vocabulary):
        yield None if body is None else {**body, "sequence_number": number}
        number += body is not None


def _events(call: ServedCall, vocabulary: Vocabulary) -> Events:
    (choice,) = call.choices
    place = {"item_id": f"msg_{call.request_id}", "output_index": 0, "content_index": 0}
    opened = (
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": _message_item(call, None),
        },
        {"type": "response.content_part.added", **place, "part": _part("")},
    )
    yield {"type": "response.created", "response": _head(call)}
    yield {"type": "response.in_progress", "response": _head(call)}
    characters = 0
    while True:
        if text := choice.shown[characters:]:
            yield from () if characters else opened
            characters += len(text)
            kind = "response.output_text.delta"
            yield {"type": kind, **place, "delta": text, "logprobs": []}
        if call.is_over:
            break
        yield None
    for index, item in enumerate(_items(call, choice)):
        if item["type"] == "message":
            yield from () if characters else opened
            text = choice.shown
            kind = "response.output_text.done"
            yield {"type": kind, **place, "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": _part(text)}
        else:
            yield from _call_events(index, item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    answer = whole_response(call, vocabulary)
    yield {"type": f"response.{answer['status']}", "response": answer}


def _call_events(index: int, item: Mapping[str, Any]) -> Events:
    """Of a call of a function, before its item is done."""
    begun, spelled = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
    place, kind = {"item_id": item["id"], "output_index": index}, "response.function_call_arguments"
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": f"{kind}.delta", **place, "delta": spelled}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": spelled}


RESPONSES = Api("/v1/responses", parse_response, whole_response, response_events)
