"""The agents of a graph at work: a program for each rollout, whose calls are turns of an
episode."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import xxhash

from dataflow.records import AnyArray
from dataflow.runtime import Context as RunContext
from dataflow.scoring.process import Asked
from operators.agents.knobs import AgentKnobs
from operators.agents.programs import Programs
from operators.agents.run_service import EndpointThread, RunService
from operators.agents.turns_in_run import TurnsInRun
from operators.engine.stop_strings import stops_of
from operators.episodes.chat import TurnQuestion
from operators.episodes.conversations import Begin
from operators.episodes.dialogue import Context, SaidTurn, TurnRequest
from operators.episodes.heard import Heard
from operators.episodes.runtime import UNBOUNDED, EpisodesRuntime, LiveEpisode
from operators.generation.groups import PromptGroup
from operators.generation.tokenize import RowLayout
from operators.models.borders import longest
from operators.models.loading import load_configs, load_tokenizer


class WholePrompts:
    """What a program sent with its latest call, which is all that the policy sees: its
    conversations begin with nothing."""

    def __init__(self) -> None:
        """Nothing was sent."""
        self.prompt: AnyArray = np.zeros(0, np.int32)
        self.stop: tuple[str, ...] = ()
        """Strings at which its turn ends."""

    def __call__(self, history: str | None) -> tuple[AnyArray, Context]:
        """As `talks.Begin`."""
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

    def __init__(self, agent: AgentKnobs, context: RunContext) -> None:
        """Load the tokenizer of the generator's model, open the endpoint, start the process that
        starts programs."""
        assert agent.generator is not None and agent.generator.uses is not None, (
            "the graph was checked"
        )
        config, generation = load_configs(agent.generator.uses)
        self._turns_in_run = TurnsInRun(
            longest(agent.generator.uses, config, agent.generator.traits.context_tokens)
            or UNBOUNDED
        )
        tokenizer = load_tokenizer(agent.generator.uses)
        generator = agent.generator
        ends, stop = stops_of(
            tokenizer,
            SimpleNamespace(config=config, generation_config=generation),
            getattr(generator, "stop", ()),
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
            options=getattr(generator, "chat_template_kwargs", None),
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
            start_s=context.limits.start_s,
            clock=context.clock,
        )
        super().__init__(agent, context, lambda box: self._programs)

    def close(self) -> None:
        """End the programs and the endpoint; what was said stays on the disk."""
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

    def _question(self, each: LiveEpisode, asked: Asked) -> TurnQuestion:
        recorded = {
            number: talk.turns[0].given for number, talk in each.talk.talks.items() if talk.turns
        }
        call, question = self._programs.question(asked, recorded)
        begin = each.talk.begin
        assert isinstance(begin, WholePrompts), "it was made here"
        begin.prompt, begin.stop = call.prompt, call.stop
        return question

    def _request(self, asked: Asked, request: TurnRequest) -> TurnRequest:
        begin = self._live[asked.job].talk.begin
        assert isinstance(begin, WholePrompts), "it was made here"
        if not begin.stop:
            return request
        number = (
            xxhash.xxh3_64_intdigest(f"{request.number}/{json.dumps(begin.stop)}".encode()) >> 1
        )
        return replace(request, number=number, stop=begin.stop)

    def _say(
        self, each: LiveEpisode, asked: Asked, turn: tuple[int, int], text: str | None
    ) -> None:
        conversation, number = turn
        self._programs.say(
            asked, None if text is None else each.talk.talks[conversation].turns[number]
        )
        if each.error is not None and self._live.get(asked.job) is each:
            self._programs.stop(asked.job, each.error)
