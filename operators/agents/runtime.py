"""The agents of a graph at work: a program for each rollout, whose calls are turns of an
episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
import xxhash

from dataflow.records import AnyArray
from dataflow.runtime import Context
from dataflow.scoring.pool import Asked
from operators.agents.declaration import AgentKnobs
from operators.agents.programs import Programs, TurnsInRun
from operators.chat.chat_template import special_tokens
from operators.chat.conversation import Past
from operators.engine.stop_strings import stops_of
from operators.episodes.chat import TurnQuestion
from operators.episodes.conversations import Begin
from operators.episodes.dialogue import ContextOf, Heard, SaidTurn, TurnRequest
from operators.episodes.runtime import UNBOUNDED, EpisodesRuntime, LiveEpisode
from operators.generation.groups import PromptGroup
from operators.generation.tokenize import RowLayout
from operators.models.borders import longest
from operators.models.loading import load_configs, load_tokenizer
from operators.serving.app import make_app
from operators.serving.calls import ServedCall
from operators.serving.errors import Bounds, bad
from operators.serving.requests import Request
from operators.serving.serve import bind
from operators.serving.service import Service

# The APIs of a server inside a run: its calls are turns of rollouts, and the run says how they
# are sampled.

CALL_S = 1e6
"""A turn waits until its group may start: whoever called knows for how long."""
KEPT_TURNS = 1 << 20
"""Those of a session are let go of when it is over."""
_CLOSE_S = 5.0


class RunService(Service):
    """Serves the run's policy, under any model name.

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
        """Serve the model. stop, ends: strings and ids that end the generator's turns. options: of
        the chat template.
        """
        super().__init__(
            turns,
            tokenizer,
            model=model,
            ends=ends.union(special_tokens(tokenizer).values()),
            make_sampling=_no_sampling,
            make_stop=_strings,
            call_timeout_s=CALL_S,
            most_turns=KEPT_TURNS,
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
        anyway.
        """
        unsupported = sorted(set(request.stop_tokens) - self._ends_of_turns)
        if unsupported:
            raise bad(
                "stop_token_ids",
                f"a turn of a run ends at strings, and at {sorted(self._ends_of_turns)} anyway; "
                f"found ids {unsupported}; send stop=[...]",
                "unsupported_parameter",
            )
        stop = tuple(dict.fromkeys([*request.stop, *self._stop]))
        return super().begin(replace(request, stop=stop, stop_tokens=()), session)

    def _check_room(self, call: ServedCall) -> None:
        """Nothing: where the context is full the rollout is over, which the generator says."""


def _no_sampling(**_: Any) -> None:
    """The run decides how turns are sampled, not the caller."""


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


class WholePrompts:
    """What a program sent with its latest call, which is all that the policy sees: its
    conversations begin with nothing.
    """

    def __init__(self) -> None:
        """Nothing was sent."""
        self.prompt: AnyArray = np.zeros(0, np.int32)
        self.stop: tuple[str, ...] = ()
        """Strings at which its turn ends."""

    def __call__(self, history: str | None) -> tuple[AnyArray, ContextOf]:
        return np.zeros(0, np.int32), self._context

    def _context(
        self,
        prompt: AnyArray,
        turns: Sequence[SaidTurn],
        heard: Sequence[Heard],
        rewritten: str | None,
    ) -> AnyArray:
        return self.prompt


class AgentsRuntime(EpisodesRuntime):
    """Runs a program for each rollout of each prompt.

    consumes: as `EpisodesRuntime`; calls of programs over HTTP
    produces: the same
    waits for: programs; the generator, in no call
    unblocked by: what they ask, their ends, or the limits of time and memory; answers
    """

    def __init__(self, agent: AgentKnobs, context: Context) -> None:
        """Load the tokenizer of the generator's model, open the endpoint, start the process that
        starts programs.
        """
        assert agent.generator is not None and agent.generator.uses is not None, (
            "the graph was checked"
        )
        config, generation = load_configs(agent.generator.uses)
        self._turns_in_run = TurnsInRun(
            longest(agent.generator.uses, config, agent.generator.traits.sampling.context_tokens)
            or UNBOUNDED
        )
        tokenizer = load_tokenizer(agent.generator.uses)
        generator = agent.generator
        ends, stop = stops_of(
            tokenizer,
            SimpleNamespace(config=config, generation_config=generation),
            generator.traits.sampling.stop,
            int(config.get_text_config().vocab_size),
            chat=bool(generator.traits.chat),
        )
        service = RunService(
            self._turns_in_run,
            copy.deepcopy(tokenizer),
            model=agent.model_name,
            past=agent.past,
            stop=stop,
            ends=ends,
            options=generator.traits.chat_options,
        )
        self._endpoint = EndpointThread(service, self._turns_in_run, agent.port)

        def decode(ids: AnyArray) -> str:
            return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

        self._programs = Programs(
            agent,
            self._turns_in_run,
            self._endpoint.root,
            self._endpoint.forget,
            decode,
            start_s=context.run.limits.start_s,
            clock=context.clock,
        )
        super().__init__(agent, context, lambda box: self._programs)

    def close(self) -> None:
        """End the programs and the endpoint; recorded turns stay on the disk."""
        super().close()
        self._endpoint.close()
        self._turns_in_run.let_go()

    def _encoded(
        self, prompts: Sequence[str], layouts: Sequence[RowLayout]
    ) -> list[AnyArray | str]:
        """Bytes of a prompt, which the policy never sees: the program makes of it what it likes."""
        return [np.frombuffer(prompt.encode(), np.uint8).astype(np.int64) for prompt in prompts]

    def _begins(self, group: PromptGroup, prompt: str, layout: RowLayout) -> Begin:
        return WholePrompts()

    def _question(self, episode: LiveEpisode, query: Asked) -> TurnQuestion:
        recorded = {
            number: talk.turns[0].given for number, talk in episode.talk.talks.items() if talk.turns
        }
        call, question = self._programs.question(query, recorded)
        begin = episode.talk.begin
        assert isinstance(begin, WholePrompts), "it was made here"
        begin.prompt, begin.stop = call.prompt, call.stop
        return question

    def _request(self, query: Asked, request: TurnRequest) -> TurnRequest:
        begin = self._live[query.job].talk.begin
        assert isinstance(begin, WholePrompts), "it was made here"
        if not begin.stop:
            return request
        number = (
            xxhash.xxh3_64_intdigest(f"{request.number}/{json.dumps(begin.stop)}".encode()) >> 1
        )
        return replace(request, number=number, stop=begin.stop)

    def _say(
        self, episode: LiveEpisode, query: Asked, turn: tuple[int, int], text: str | None
    ) -> None:
        conversation, number = turn
        self._programs.say(
            query, None if text is None else episode.talk.talks[conversation].turns[number]
        )
        if episode.error is not None and self._live.get(query.job) is episode:
            self._programs.stop(query.job, episode.error)
