"""The agents of a graph at work: a program for each rollout, whose calls are turns of an episode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from dataflow.model import Model
from dataflow.records import AnyArray
from dataflow.runtime import Context
from dataflow.scoring.failure import UNUSABLE
from dataflow.scoring.process import Asked
from operators.agents.knobs import AgentKnobs
from operators.agents.programs import Programs
from operators.agents.run_service import EndpointThread, RunService
from operators.agents.talk import PromptedDialogue, nothing_given
from operators.agents.turns_in_run import TurnsInRun
from operators.chat.chat_format import ChatError
from operators.episodes.dialogue import Dialogue, SaidTurn, TurnRequest
from operators.episodes.runtime import UNBOUNDED, EpisodesRuntime, LiveEpisode
from operators.generation.groups import PromptGroup
from operators.models.loading import load_configs, load_tokenizer


def own_context_tokens(model: Model) -> int:
    """The model's own limit of prompt and completion."""
    config: Any = load_configs(model)[0].get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNBOUNDED)


def _stopping(request: TurnRequest, stop: tuple[str, ...]) -> TurnRequest:
    """The same turn, which ends at strings: another one than without them."""
    number = xxhash.xxh3_64_intdigest(f"{request.number}/{json.dumps(stop)}".encode()) >> 1
    return replace(request, number=number, stop=stop)


class AgentsRuntime(EpisodesRuntime):
    """Runs a program for each rollout of each prompt.

    consumes: as `EpisodesRuntime`; calls of programs over HTTP
    produces: the same
    waits for: programs; the generator, in no call
    unblocked by: what they ask, their ends, or the limits of time and memory; answers
    """

    def __init__(self, agent: AgentKnobs, context: Context) -> None:
        """Load the tokenizer of the generator's model, open the endpoint, start the process that starts programs."""
        assert agent.generator is not None and agent.generator.uses is not None, "the graph was checked"
        most = agent.generator.traits.context_tokens or own_context_tokens(agent.generator.uses)
        self._turns_in_run = TurnsInRun(most)
        service = RunService(
            self._turns_in_run, load_tokenizer(agent.generator.uses), model=agent.model_name, past=agent.past,
            stop=tuple(getattr(agent.generator, "stop", ())),
        )  # fmt: skip
        self._endpoint = EndpointThread(service, self._turns_in_run, agent.port)
        self._programs = Programs(agent, self._turns_in_run, self._endpoint.root, self._endpoint.forget)
        super().__init__(agent, context, self._programs)

    def status(self) -> dict[str, float | int | str]:
        """As an episode's; rollouts that failed as their program rewrote its conversation, or made calls at once."""
        return {**super().status(), **self._programs.counts}

    def close(self) -> None:
        """End the programs and the endpoint; what was said stays on the disk."""
        super().close()
        self._endpoint.close()
        self._turns_in_run.let_go()

    def _encoded(self, prompts: Sequence[str]) -> list[AnyArray | str]:
        """Bytes of a prompt, which the policy never sees: the program makes of it what it likes."""
        return [np.frombuffer(prompt.encode(), np.uint8).astype(np.int64) for prompt in prompts]

    def _talk(self, key: str, group: PromptGroup, prompt: str) -> Dialogue:
        return PromptedDialogue(
            key=key, prompt=np.zeros(0, np.int32), max_turns=self._episode.max_turns,
            max_tokens=self._episode.max_tokens or UNBOUNDED, given=nothing_given, decode=self._text,
        )  # fmt: skip

    def _found(self, each: LiveEpisode, asked: Asked) -> TurnRequest | SaidTurn | None:
        assert isinstance(each.talk, PromptedDialogue), "it was made here"
        try:
            question = self._programs.question(asked)
            found = each.talk.ask_behind(asked.number, question.prompt, question.most)
            return _stopping(found, question.stop) if isinstance(found, TurnRequest) and question.stop else found
        except ChatError as error:
            self._programs.counts["rewritten"] += 1
            each.error = f"{self._name}: {UNUSABLE}: {error}"
            return None

    def _say(self, asked: Asked, turn: SaidTurn | None) -> None:
        self._programs.say(asked, turn)
        each = self._live.get(asked.job)
        if each is not None and each.error is not None:
            self._programs.stop(asked.job, each.error)

    def _text(self, ids: AnyArray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
