"""The routes: the APIs, models, health; JSON in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from operators.serving.anthropic_messages import MESSAGES, parse_count
from operators.serving.apis import CHAT_COMPLETIONS, COMPLETIONS, TOKEN_ROUTE, Api, event, news
from operators.serving.calls import ServedCall
from operators.serving.errors import ApiError, Bounds, read_json
from operators.serving.openai_responses import RESPONSES
from operators.serving.requests import Request
from operators.serving.service import Service

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that a server without a key answers to; a web page elsewhere cannot reach it under another
name."""
APIS = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, MESSAGES, TOKEN_ROUTE)
COUNT_TOKENS = f"{MESSAGES.path}/count_tokens"
NO_KEY = {"", "none", "empty", "no-key", "dummy"}
"""What callers send for a key where a server asks for none; anything else is a session."""
GONE = "the client went away before the rollout ended"

Failed: TypeAlias = Callable[[ApiError], Mapping[str, Any]]

_log = structlog.get_logger()


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    sessions: Container[str] | None = None,
    close_timeout_s: float = 30.0,
) -> Starlette:
    """The ASGI application; it starts the engine's thread and closes it.

    Args:
        api_key: what `Authorization: Bearer` must say; None: no key, and only loopback hosts.
        sessions: keys of which every caller, on a loopback host, must have one, which is its
            session; None: sessions are named as callers like.
        close_timeout_s: given to the engine's thread to end.
    """

    def route(
        path: str,
        answer: Callable[[HttpRequest], Awaitable[Response]],
        method: str,
        failed: Failed = COMPLETIONS.failed,
    ) -> Route:
        async def guarded(http: HttpRequest) -> Response:
            try:
                _admit(http, api_key, sessions)
                return await answer(http)
            except ApiError as error:
                return _refusal(error, failed)
            except Exception as error:
                _log.exception("a call failed", path=path)
                why = f"the server failed: {type(error).__name__}; its log has the rest"
                return _refusal(ApiError(500, why), failed)

        return Route(path, guarded, methods=[method])

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await asyncio.to_thread(service.thread.close, close_timeout_s)
        await asyncio.sleep(0)  # what the thread told last stands in the loop's queue

    def session_of(http: HttpRequest, user: str | None) -> str | None:
        """Header, user, or the key where the server asks for none: each rollout of an agent may
        have one of its own.
        """
        key = _key_of(http)
        if sessions is not None:
            return key
        is_name = api_key is None and key is not None and key.lower() not in NO_KEY
        return http.headers.get("x-session-id") or user or (key if is_name else None)

    def served(api: Api) -> Route:
        async def answer(http: HttpRequest) -> Response:
            service.check_room()
            request = await _request(http, service, api.parse)
            call = service.begin(request, session_of(http, request.user))
            if request.stream:
                stream = _stream(service, http, call, api)
                return StreamingResponse(stream, media_type="text/event-stream", headers=_HEADERS)
            async with contextlib.aclosing(_rounds(service, http, call)) as rounds:
                async for _ in rounds:
                    pass
            if call.failure is not None:
                raise call.failure
            return JSONResponse(api.whole(call, service.vocabulary))

        return route(api.path, answer, "POST", api.failed)

    def model(name: str) -> dict[str, Any]:
        """As OpenAI's clients and Anthropic's know one."""
        created = datetime.fromtimestamp(service.started_s, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "dataflow",
            "type": "model",
            "display_name": name,
            "created_at": created,
            "max_model_len": service.thread.engine.context_tokens,
        }

    async def models(_: HttpRequest) -> Response:
        name = service.model
        page = {"object": "list", "has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({**page, "data": [model(name)]})

    async def named_model(http: HttpRequest) -> Response:
        service.check_model(name := http.path_params["name"])
        return JSONResponse(model(name))

    async def count(http: HttpRequest) -> Response:
        request = await _request(http, service, parse_count)
        service.check_model(request.model)
        tokens = service.count(request, session_of(http, request.user))
        return JSONResponse({"input_tokens": tokens})

    async def health(_: HttpRequest) -> Response:
        thread = service.thread
        state = {
            "status": "ok" if thread.failure is None else "failed",
            "error": thread.failure,
            "model": service.model,
            "version": thread.engine.version,
            "live": thread.engine.live,
            "waiting": thread.waiting,
            "recorded": service.recorded,
        }
        return JSONResponse(state, 200 if thread.failure is None else 503)

    app = Starlette(
        routes=[
            *map(served, APIS),
            route(COUNT_TOKENS, count, "POST", MESSAGES.failed),
            route("/v1/models", models, "GET"),
            route("/v1/models/{name:path}", named_model, "GET"),
            route("/health", health, "GET"),
        ],
        exception_handlers={HTTPException: _unrouted},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _admit(http: HttpRequest, api_key: str | None, sessions: Container[str] | None) -> None:
    """Whether this caller may call at all."""
    if sessions is not None and (_key_of(http) or "") not in sessions:
        raise ApiError(
            401,
            "the API key is that of no session that is open; send the one that the program was"
            " given, while it runs",
            code="invalid_api_key",
        )
    if api_key is None:
        if http.url.hostname not in LOOPBACK:
            raise ApiError(
                403,
                "without an API key only loopback hosts are answered; found Host"
                f" {http.url.hostname!r}; call 127.0.0.1, or start the server with --api-key-env",
                code="host_not_allowed",
            )
        return
    if not hmac.compare_digest((_key_of(http) or "").encode(), api_key.encode()):
        raise ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
        )


def _key_of(http: HttpRequest) -> str | None:
    """What the caller sent as its key: as OpenAI's clients do, or as Anthropic's."""
    kind, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else http.headers.get("x-api-key")


_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _stream(
    service: Service, http: HttpRequest, call: ServedCall, api: Api
) -> AsyncIterator[str]:
    events = api.events(call, service.vocabulary)
    try:
        async with contextlib.aclosing(_rounds(service, http, call)) as rounds:
            async for _ in rounds:
                if call.failure is not None:
                    raise call.failure
                if new := "".join(map(event, news(events))):
                    yield new
        closing = api.done
    except ApiError as error:
        closing = event(api.failed(error)) + api.done
    if closing:
        yield closing


async def _rounds(service: Service, http: HttpRequest, call: ServedCall) -> AsyncGenerator[None]:
    """Watch a call to its end: goes round whenever something is new. Whoever leaves, ends the call.

    Raises:
        ApiError: 499 when the client went away, 504 at the call's deadline.
    """
    now, timeout_s = asyncio.get_running_loop().time, service.call_timeout_s
    leaving, deadline = asyncio.create_task(_leave(http)), now() + timeout_s
    try:
        while True:
            over = call.is_over
            call.news.clear()
            yield
            if over:
                return
            waits = asyncio.create_task(call.news.wait())
            patience = max(0.0, deadline - now())
            try:
                await asyncio.wait(
                    {waits, leaving}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waits.cancel()
            if call.news.is_set():
                continue
            if leaving.done():
                raise ApiError(499, GONE, code="client_gone")
            why = (
                f"the call was not over after {timeout_s:g} s; ask for fewer tokens, or call again"
                " later"
            )
            service.end(call, why)
            raise ApiError(504, why, code="timeout")
    finally:
        leaving.cancel()
        service.end(call, GONE)


async def _leave(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _request(
    http: HttpRequest, service: Service, parse: Callable[[Any, Bounds], Request]
) -> Request:
    """What a call's JSON asks for; its bytes count as being read meanwhile. Raises ApiError: 408,
    413, 415, 429, 400.
    """
    bounds, read = service.bounds, bytearray()
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"a call is JSON; found Content-Type {kind!r}; send Content-Type: application/json"
        )
    try:
        try:
            async with asyncio.timeout(bounds.body_s):
                async for piece in http.stream():
                    if len(read) + len(piece) > bounds.body_bytes:
                        raise ApiError(
                            413, f"the body has more than {bounds.body_bytes} bytes; shorten it"
                        )
                    service.reading.take(len(piece))
                    read += piece
            value = read_json(read.decode(), bounds.values)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body was not there after {bounds.body_s:g} s; send it at once"
            ) from error
        except ValueError as error:
            raise ApiError(
                400, f"the body cannot be read as JSON: {error}; mend it", code="invalid_json"
            ) from error
        return parse(value, bounds)
    finally:
        service.reading.give(len(read))


def _refusal(error: ApiError, failed: Failed = COMPLETIONS.failed) -> JSONResponse:
    return JSONResponse(
        failed(error), error.status, {"retry-after": "1"} if error.status == 429 else None
    )


async def _unrouted(http: HttpRequest, error: Exception) -> Response:
    """An address or method that is not served."""
    assert isinstance(error, HTTPException)
    posts = [*(api.path for api in APIS), COUNT_TOKENS]
    routes = ", ".join([*(f"POST {path}" for path in posts), "GET /v1/models", "GET /health"])
    message = (
        f"{http.method} {http.url.path} is not served ({error.detail}); this server has {routes}"
    )
    return _refusal(ApiError(error.status_code, message, code="not_found"))
