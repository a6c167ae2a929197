"""Servers of OpenEnv over their WebSocket: one connection is one environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from dataflow.errors import WorldFailed
from dataflow.system.text import strict_json
from operators.environments.session import ANSWER_BYTES, InvalidAction, Seen, worded
from operators.session_pool import Away, NoRoom

_BUSY_STATUS, _NO_ANSWER = (429, 503), (401, 403, 408, 429)


async def connect(url: str, *, field: str | None = None, **options: Any) -> OpenEnvSession:
    """A connection to ws://HOST or http://HOST. Raises NoRoom where the server has no session to
    spare, Away where none answers.

    Args:
        field: of the action, that holds what the policy says; None: the one text that the server's
            schema asks for.
        options: of each reset, beside the seed.
    """
    from websockets.asyncio.client import connect as open_socket
    from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

    root = _root(url)
    try:
        # Nobody is pinged: one that computes, or a policy that thinks, may be silent for as long as
        # it takes.
        socket = await open_socket(
            f"{root}/ws", ping_interval=None, max_size=ANSWER_BYTES, close_timeout=2.0
        )
    except InvalidStatus as error:
        if error.response.status_code in _BUSY_STATUS:
            raise NoRoom from error
        raise
    except (OSError, EOFError, InvalidMessage) as error:
        raise Away(root) from error
    session = OpenEnvSession(socket, field, options)
    try:
        with contextlib.suppress(InvalidAction, WorldFailed):
            await session.ask("state")
        if field is None:
            session.field = await asyncio.to_thread(_text_field, root.replace("ws", "http", 1))
    except BaseException as error:
        await session.close()
        if isinstance(error, ConnectionClosed):
            raise Away(root) from error
        raise
    return session


def fault(url: str, *, field: str | None = None, **options: Any) -> str | None:
    """Why the policy's text can be no action; None where it can, or where the server does not
    answer now.
    """
    if field is not None:
        return None
    try:
        schema = _schema(_root(url).replace("ws", "http", 1))
    except urllib.error.HTTPError as error:
        if error.code in _NO_ANSWER or error.code >= 500:
            return None
        reason = f"status {error.code}"
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        if isinstance(schema, dict) and schema.get("properties"):
            return None
        reason = f"an action {schema!r:.60}"
    return (
        f"says nowhere what an action is; found {reason} at /schema; name the text of an action as"
        " options={'field': NAME}, or give action=json.loads where the policy writes whole"
        " actions"
    )


class OpenEnvSession:
    """One environment on the server, for as long as the connection stands."""

    def __init__(self, socket: Any, field: str | None, options: Mapping[str, Any]) -> None:
        self._socket, self.field, self._options = socket, field, dict(options)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, and the environment with it."""
        return bool(self._socket.close_code is not None)

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        """As `Session.reset`; the task's fields are sent along."""
        return _seen(await self.ask("reset", {**self._options, **task, "seed": seed}))

    def read(self, text: str) -> Any:
        """An action that the policy wrote as JSON, or its text as the action's one text field."""
        with contextlib.suppress(ValueError, RecursionError):
            action = json.loads(text)
            strict_json(action)
            if isinstance(action, dict):
                return action
        if self.field is None:
            raise InvalidAction("That is no action; write it as a JSON object.")
        return {self.field: text}

    async def step(self, action: Any) -> Seen:
        return _seen(await self.ask("step", action))

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request, return its answer. Raises NoRoom, InvalidAction or WorldFailed, as the
        server answers.
        """
        from websockets.exceptions import ConnectionClosed

        # what the server said before it closed is there to be read
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(
                json.dumps({"type": kind} if data is None else {"type": kind, "data": dict(data)})
            )
        answer = json.loads(await self._socket.recv())
        payload: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return payload
        match payload.get("code"):
            case "CAPACITY_REACHED":
                raise NoRoom(payload.get("message"))
            case "VALIDATION_ERROR" if kind == "step":
                details = f"{payload.get('message', '')} {payload.get('errors', '')}"
                raise InvalidAction(f"That is no action; {details}".strip())
            case code:
                raise WorldFailed(
                    f"the server could not {kind}; found {code}: {payload.get('message')!r:.200}"
                )

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()


def _seen(data: Mapping[str, Any]) -> Seen:
    observation, facts = data.get("observation") or {}, data.get("metadata") or {}
    cut = bool(data.get("truncated") or facts.get("truncated") or facts.get("TimeLimit.truncated"))
    return Seen(
        raw=observation,
        text=worded(observation) if observation else "",
        reward=data.get("reward"),
        terminated=bool(data.get("done")) and not cut,
        truncated=cut,
    )


def _root(url: str) -> str:
    """Of its WebSocket."""
    root = url.rstrip("/").removesuffix("/ws")
    return root.replace("http", "ws", 1) if root.startswith("http") else root


def _schema(root: str) -> Any:
    """Of an action, as the server says."""
    with urllib.request.urlopen(f"{root}/schema", timeout=5.0) as answer:
        return json.loads(answer.read(ANSWER_BYTES))["action"]


def _text_field(root: str) -> str | None:
    """The one text field that an action must have by /schema; None where there is none, or more."""
    try:
        action = _schema(root)
        kinds = action["properties"]
        needed = [
            name for name in action.get("required", ()) if kinds[name].get("type") == "string"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return needed[0] if len(needed) == 1 else None
