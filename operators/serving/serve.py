"""Puts a server together: engine, thread, record, routes; and runs it on an address that it may be
bound to.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import GraphError

if TYPE_CHECKING:
    import uvicorn

    from operators.engine.build import BuiltEngine
    from operators.serving.rows import RolloutLog
    from operators.serving.service import OnRollout, Service


def check_address(host: str, api_key: str | None) -> None:
    """Refuse an address that others can reach, unless a key is asked of them. Raises GraphError."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and api_key is None:
        raise GraphError(
            f"the server would be open to anyone who reaches {host}; found no API key; "
            f"bind it to 127.0.0.1, or name an environment variable with a key: --api-key-env NAME"
        )


def bind(
    host: str, port: int, *, otherwise: str = "name another --port or --host"
) -> socket.socket:
    """A socket at this address, not listening yet. otherwise: what to do where the address cannot
    be had, which raises GraphError.
    """
    if not 0 <= port < 1 << 16:
        raise GraphError(
            f"there is no such port; found {port}; give --port from 0 (any that is free) to 65535"
        )
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise GraphError(
            f"the server cannot be bound to {host} port {port}; found: {error}; {otherwise}"
        ) from error
    return listener


def make_service(
    built: BuiltEngine,
    *,
    model: str,
    record: RolloutLog | None = None,
    on_rollout: Sequence[OnRollout] = (),
    most_waiting: int = 256,
    stream_s: float = 0.02,
    chat_template: str | None = None,
    **knobs: Any,
) -> Service:
    """A service over an engine that nothing else drives.

    Args:
        built: from `operators.engine.build.make_engine`.
        model: the name that callers use.
        record: rollouts are appended to it.
        on_rollout: called with the rows of every prompt whose rollouts have ended, on the event
            loop.
        most_waiting: prompts that may wait for a slot; more are refused with 429.
        stream_s: seconds between two looks at the rollouts that stream.
        chat_template: instead of the tokenizer's own.
        knobs: of `Service`: vocabulary, call_timeout_s, exchanges.
    """
    from operators.engine.interface import PromptStart
    from operators.engine.sampling_params import Sampling
    from operators.engine.stop_strings import StopCache
    from operators.serving.engine_thread import EngineThread
    from operators.serving.service import Service

    tokenizer = copy.deepcopy(built.tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return Service(
        EngineThread(built.engine, PromptStart, most_waiting=most_waiting, stream_s=stream_s),
        tokenizer,
        model=model,
        ends=built.ends,
        make_sampling=Sampling,
        make_stop=StopCache(built.tokenizer, built.ends),
        on_rollout=(*on_rollout, *([] if record is None else [record.append])),
        numbers=None if record is None else record.numbers,
        **knobs,
    )


async def attend(
    server: uvicorn.Server, service: Service, listener: socket.socket, *, grace_s: float
) -> None:
    """Run a uvicorn server until it is told to exit; calls that still run `grace_s` later end with
    an error.
    """
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.should_exit and not serving.done():
        await asyncio.wait({serving}, timeout=0.1)
    await asyncio.wait({serving}, timeout=grace_s)
    service.end_all("the server was shut down before the rollout ended")
    await serving


def read_template(path: Path) -> str:
    """A chat template from a file. Raises GraphError where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise GraphError(
            f"the chat template {path} cannot be read; found {error}; name a file in UTF-8"
        ) from error
