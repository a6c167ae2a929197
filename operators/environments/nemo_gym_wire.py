"""Resources servers of NeMo-Gym over HTTP, in both of their protocols; a session is a cookie."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from dataflow.errors import GraphError, WorldFailed
from operators.chat.tool_calls import FORMATS
from operators.environments.session import ANSWER_BYTES, Seen
from operators.session_pool import Away, NoRoom

PROTOCOLS = ("verify", "step")
_ROUTES = {"seed_session", "verify", "reset", "step", "close"}
"""Of the server, that are no tools: what the policy is worth is not the policy's to ask for."""
_TOOL = re.compile(r"[\w-]+")


async def connect(
    url: str, *, protocol: str = "verify", calls: str = "hermes", **options: Any
) -> NemoGymSession:
    """Nothing is asked before the first reset.

    Args:
        protocol: "verify": /seed_session, a route for each tool, /verify at the end; "step": /reset
            and /step.
        calls: the format in which the policy calls tools (`operators.chat.tool_calls.FORMATS`).
        options: headers of each request.
    """
    import httpx

    if protocol not in PROTOCOLS or calls not in FORMATS:
        raise GraphError(
            f"a resources server of NeMo-Gym is asked in one of {list(PROTOCOLS)}, with calls as in"
            f" {list(FORMATS)}; found protocol={protocol!r}, calls={calls!r}; give one of these"
        )
    client = httpx.AsyncClient(
        base_url=url.rstrip("/"), headers=options.get("headers"), timeout=None
    )
    return NemoGymSession(client, protocol, calls)


class NemoGymSession:
    """One session at a time on the server, and the trajectory that is told it."""

    def __init__(self, client: Any, protocol: str, calls: str) -> None:
        self._client, self._steps, self._calls = client, protocol == "step", FORMATS[calls]
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._closes = False
        self._numbers = itertools.count()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        """As `Session.reset`; the task is a row of NeMo-Gym's, which says what it needs of seeds
        itself.
        """
        import httpx

        await self._leave()
        self._row = {"responses_create_params": {"input": []}, **task}
        self._output = []
        try:
            answer = await self._ask("/reset" if self._steps else "/seed_session", self._row)
        except httpx.ConnectError as error:
            raise Away(str(self._client.base_url)) from error
        self._closes = bool((answer.get("info") or {}).get("supports_explicit_close"))
        text = (answer.get("observation") or "") if self._steps else ""
        return Seen(raw=answer, text=text)

    def read(self, text: str) -> str:
        """The turn unchanged."""
        return text

    async def step(self, action: str) -> Seen:
        """As `Session.step`: tools that are called are run, and what is no call is the answer."""
        turn = self._items(action)
        if self._steps:
            answer = await self._ask("/step", {**self._row, "response": self._response(turn)})
            outputs = (answer.get("info") or {}).get("tool_outputs") or ()
            texts = [str(output.get("output")) for output in outputs] + [
                answer.get("observation") or ""
            ]
            if answer.get("terminated") or answer.get("truncated"):
                await self._leave()
            text = "\n".join(filter(None, texts))
            return Seen(
                raw=answer,
                text=text,
                reward=answer.get("reward"),
                terminated=bool(answer.get("terminated")),
                truncated=bool(answer.get("truncated")),
            )
        calls = [item for item in turn if item["type"] == "function_call"]
        if not calls:
            answer = await self._ask(
                "/verify", {**self._row, "response": self._response([*self._output, *turn])}
            )
            return Seen(raw=answer, reward=answer.get("reward"), terminated=True)
        self._output += turn  # a turn that a busy server did not take comes again
        results = []
        for call in calls:  # what a tool refuses is the policy's to read
            body = f"error: there is no tool {call['name']!r:.60}"
            if self._has(call["name"]):
                status, body = await self._post(f"/{call['name']}", json.loads(call["arguments"]))
                if status >= 500:
                    raise WorldFailed(
                        f"tool {call['name']} failed; found status {status}: {body[:200]!r}"
                    )
            results.append(body)
            self._output.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": body}
            )
        return Seen(raw=results, text="\n".join(results))

    async def close(self) -> None:
        try:
            await self._leave()
        finally:
            await self._client.aclose()

    async def _leave(self) -> None:
        """Give the session back, where the server takes it."""
        closes, self._closes = self._closes, False
        if closes:
            with contextlib.suppress(Exception):
                await self._post("/close", {})
        self._client.cookies.clear()

    async def _ask(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        status, text = await self._post(route, body)
        if status in (429, 503):
            raise NoRoom(text[:200])
        if status >= 400:
            raise WorldFailed(
                f"{route} was refused; found status {status}: {text[:200]!r}; look at the row"
            )
        parsed = json.loads(text or "{}")
        return parsed if isinstance(parsed, dict) else {}

    async def _post(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of an answer that is not too long."""
        async with self._client.stream("POST", route, json=dict(body)) as answer:
            content = b""
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > ANSWER_BYTES:
                    raise WorldFailed(
                        f"{route} answers more than {ANSWER_BYTES} bytes; found {len(content)};"
                        " cut it"
                    )
            return answer.status_code, content.decode("utf-8", "replace")

    def _items(self, text: str) -> list[dict[str, Any]]:
        """A turn as items of a Responses output: the text, then calls."""
        message = self._calls.read(text).message
        items = []
        if message["content"] or "tool_calls" not in message:
            content = [{"type": "output_text", "text": message["content"], "annotations": []}]
            items.append(
                {
                    "type": "message",
                    "id": self._id("msg"),
                    "role": "assistant",
                    "status": "completed",
                    "content": content,
                }
            )
        for call in message.get("tool_calls", ()):
            items.append(
                {
                    "type": "function_call",
                    "id": self._id("fc"),
                    "call_id": self._id("call"),
                    "status": "completed",
                    **call["function"],
                }
            )
        return items

    def _has(self, name: str) -> bool:
        """Whether a name is that of a tool, of the row's where it names some, and no other route of
        the server.
        """
        tools = self._row["responses_create_params"].get("tools") or []
        names = {tool.get("name") or (tool.get("function") or {}).get("name") for tool in tools}
        return name not in _ROUTES and (
            name in names if names else _TOOL.fullmatch(name) is not None
        )

    def _id(self, kind: str) -> str:
        return f"{kind}_{next(self._numbers)}"

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        params = self._row["responses_create_params"]
        return {
            "id": self._id("resp"),
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": params.get("tools") or [],
        }
