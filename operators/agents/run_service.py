"""The APIs of a server inside a run: its calls are turns of rollouts, and the run says how they are
sampled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import uvicorn

from operators.agents.turns_in_run import TurnsInRun
from operators.chat.chat_template import special_tokens
from operators.chat.conversation import Past
from operators.serving.app import make_app
from operators.serving.bounds import Bounds
from operators.serving.calls import ServedCall
from operators.serving.errors import bad
from operators.serving.requests import Request
from operators.serving.serve import bind
from operators.serving.service import Service

CALL_S = 1e6
"""A turn waits until its group may start: whoever called knows for how long."""
KEPT_TURNS = 1 << 20
"""Those of a session are let go of when it is over."""
_CLOSE_S = 5.0


class RunService(Service):
    """Serves the policy of a run under whatever name it is called by.

    consumes: calls of programs, on the event loop
    produces: works for `TurnsInRun`
    waits for: nothing
    """

    def __init__(
        self,
        turns: TurnsInRun,
        tokenizer: Any,
        *,
        model: str,
        past: Past,
        stop: tuple[str, ...],
        ends: frozenset[int] = frozenset(),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve the model. stop, ends: strings and ids at which the generator ends what it says.
        options: of the chat template."""
        super().__init__(
            turns,
            tokenizer,
            model=model,
            ends=ends.union(special_tokens(tokenizer).values()),
            make_sampling=_no_sampling,
            make_stop=_strings,
            call_timeout_s=CALL_S,
            exchanges=KEPT_TURNS,
            past=past,
            bounds=Bounds(samples=False),
            chat_template_kwargs=options,
        )
        self._stop, self._ends_of_turns = stop, ends

    def knows(self, model: str) -> bool:
        """Any: a program has the name of its model in its text, and the run has one policy."""
        return True

    def begin(self, request: Request, session: str | None) -> ServedCall:
        """As `Service.begin`. Raises ApiError for ids to stop at, but those at which a turn ends
        anyway."""
        others = sorted(set(request.stop_tokens) - self._ends_of_turns)
        if others:
            raise bad(
                "stop_token_ids",
                f"a turn of a run ends at strings, and at {sorted(self._ends_of_turns)} anyway; "
                f"found ids {others}; send stop=[...]",
                "unsupported_parameter",
            )
        stop = tuple(dict.fromkeys([*request.stop, *self._stop]))
        return super().begin(request.with_(stop=stop, stop_tokens=()), session)

    def _check_room(self, call: ServedCall) -> None:
        """Nothing: where the context is full the rollout is over, which the generator says."""


def _no_sampling(**_: Any) -> None:
    """How a turn is sampled is the run's to say."""


def _strings(stop: tuple[str, ...], _: tuple[int, ...]) -> tuple[str, ...]:
    """The generator makes of them what it ends a turn by."""
    return stop


class EndpointThread:
    """Serves on a port of loopback, in a thread with an event loop of its own.

    consumes: HTTP calls of programs
    produces: works for `TurnsInRun`; their answers to the callers
    waits for: its sockets
    unblocked by: `close`
    """

    def __init__(self, service: RunService, turns: TurnsInRun, port: int) -> None:
        """Bind, and begin. Raises GraphError where the port is taken."""
        otherwise = "give Endpoint(port=) another, or 0 for any that is free"
        self._listener = bind("127.0.0.1", port, otherwise=otherwise)
        self._listener.listen(1024)
        self.root = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._turns, self._service = turns, service
        app = make_app(service, sessions=turns.sessions)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
            lifespan="on",
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    def forget(self, session: str) -> None:
        """A session is over. From any thread."""
        self._turns.sessions.discard(session)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._service.forget, session)

    def close(self) -> None:
        """End all calls, and the thread."""
        self._turns.close()
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            self._loop.close()
