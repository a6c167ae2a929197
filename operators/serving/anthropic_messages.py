"""Anthropic's messages API: bodies become chats, answers become content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from operators.serving.apis import Api, Body, Events, is_search
from operators.serving.calls import Choice, ServedCall
from operators.serving.errors import ApiError, Bounds, bad
from operators.serving.requests import Request, fields_of, list_of, parse, shown, texts_of
from operators.serving.text import Vocabulary

FIELDS: dict[str, Any] = {
    "model": None,
    "max_tokens": None,
    "messages": None,
    "system": None,
    "tools": None,
    "tool_choice": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "stop_sequences": None,
    "stream": None,
    "metadata": None,
    "service_tier": None,
    "thinking": None,
    "context_management": None,
    "compaction": None,
    "cache_control": None,
    "output_config": lambda config: isinstance(config, dict) and config.get("format") is None,
    "mcp_servers": ([],),
    "inference_geo": None,
    "speed": None,
    "diagnostics": None,
    "fallbacks": None,
    "betas": None,
    "user_profile_id": None,
    "workspace_id": None,
    "billing_policy": None,
}
"""What a body may give; thinking, the management of contexts and what stands behind it change
nothing here."""
THOUGHTS = ("thinking", "redacted_thinking")
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")


def parse_messages(body: Any, bounds: Bounds) -> Request:
    """The chat that a body asks for. Raises ApiError."""
    fields = fields_of(body, FIELDS, bounds)
    if "max_tokens" not in fields:
        raise bad(
            "max_tokens", "'max_tokens' is missing; found none; give how many tokens may be written"
        )
    system = texts_of("system", fields["system"]) if "system" in fields else ""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(list_of("messages", fields.get("messages"))):
        messages += _messages(f"messages[{place}]", message)
    chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
    chat |= {"messages": messages, "stop": fields.get("stop_sequences"), "user": _user(fields)}
    tools = [_tool(tool) for tool in fields.get("tools") or () if not is_search(tool)]
    chat |= {"tools": tools, "tool_choice": _tool_choice(fields)}
    goes_on = (
        bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    )
    return parse("chat", {**chat, "continue_final_message": goes_on}, bounds)


def parse_count(body: Any, bounds: Bounds) -> Request:
    """The chat whose tokens are to be counted. Raises ApiError."""
    return parse_messages({"max_tokens": 1, **body} if isinstance(body, dict) else body, bounds)


def _user(fields: Mapping[str, Any]) -> Any:
    metadata = fields.get("metadata", {})
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def _tool_choice(fields: Mapping[str, Any]) -> Any:
    choice = fields.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "none": "none", "any": "required"}.get(str(kind), choice)


def _tool(tool: Any) -> Any:
    if (
        not isinstance(tool, dict)
        or not isinstance(tool.get("name"), str)
        or tool.get("type", "custom") != "custom"
    ):
        raise bad(
            "tools",
            f"'tools' may have tools of the caller's own; found {shown(tool)}; give name and"
            " schema",
        )
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.get("input_schema", {})},
    }


def _messages(where: str, message: Any) -> Iterator[Any]:
    """Messages of a chat: results of tools each have their own."""
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if role not in ("user", "assistant", "system"):
        raise bad(
            where,
            f"'{where}' has no role that is known; found {shown(message)}; send user or assistant",
        )
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise bad(
            where, f"'{where}' has no content; found {shown(content)}; give a text, or blocks"
        )
    apart = "tool_result" if role == "user" else "tool_use"
    tools = [block for block in blocks if block.get("type") == apart]
    plain_blocks = [
        block
        for block in blocks
        if block.get("type") not in (apart, *(THOUGHTS if role == "assistant" else ()))
    ]
    text = texts_of(where, plain_blocks)
    if role == "assistant":
        calls = [
            {
                "id": block.get("id"),
                "type": "function",
                "function": {
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input", {})),
                },
            }
            for block in tools
        ]
        yield {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return
    for block in tools:
        result_text = texts_of(where, block.get("content", ""))
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result_text}
    if plain_blocks or not tools:
        yield {"role": role, "content": text}


def whole_message(call: ServedCall, _: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    (choice,) = call.choices
    return {**_head(call), "content": _blocks(choice), **_stop(choice), "usage": _usage(call)}


def _head(call: ServedCall) -> dict[str, Any]:
    return {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "model": call.request.model,
    }


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": choice.shown}] if choice.shown else []
    return [*text, *_uses(choice)]


def _uses(choice: Choice) -> list[dict[str, Any]]:
    calls: Sequence[Any] = (choice.message or {}).get("tool_calls", ())
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in calls
    ]


def _stop(choice: Choice) -> dict[str, Any]:
    by = choice.transcript.stopped_by
    reasons = {
        "stop": "end_turn" if by is None else "stop_sequence",
        "length": "max_tokens",
        "tool_calls": "tool_use",
    }
    return {"stop_reason": reasons.get(str(choice.finish_reason)), "stop_sequence": by}


def _usage(call: ServedCall) -> dict[str, int]:
    wrote = sum(len(choice.tokens) for choice in call.choices)
    return {"input_tokens": len(call.parts[0].prompt.tokens), "output_tokens": wrote}


def message_events(call: ServedCall, _: Vocabulary) -> Events:
    """The events of a message, block by block."""
    (choice,) = call.choices
    head = {**_head(call), "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**head, "usage": _usage(call)}}
    characters = index = 0
    while True:
        if text := choice.shown[characters:]:
            if not characters:
                yield _begins(0, {"type": "text", "text": ""})
            characters += len(text)
            yield _grows(0, {"type": "text_delta", "text": text})
        if call.is_over:
            break
        yield None
    if characters:
        yield {"type": "content_block_stop", "index": 0}
        index = 1
    for at, use in enumerate(_uses(choice), index):
        yield _begins(at, {**use, "input": {}})
        spelled = json.dumps(use["input"], ensure_ascii=False)
        yield _grows(at, {"type": "input_json_delta", "partial_json": spelled})
        yield {"type": "content_block_stop", "index": at}
    yield {"type": "message_delta", "delta": _stop(choice), "usage": _usage(call)}
    yield {"type": "message_stop"}


def _begins(index: int, block: Body) -> Body:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _grows(index: int, delta: Body) -> Body:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _failed(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else error.body["error"]["type"]
    return {"type": "error", "error": {"type": kind, "message": error.message}}


MESSAGES = Api("/v1/messages", parse_messages, whole_message, message_events, _failed)
