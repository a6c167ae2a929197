"""A rollout that vLLM decodes, as its parent knows it: how it started and what it has drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.results import PromptStart, Row
from operators.engine.sampling_params import Sampling
from operators.engine.stop_strings import StopStrings


@dataclass
class Live:
    """A rollout that vLLM decodes."""

    start: PromptStart
    ticket: int
    age: int
    seed: int
    sampling: Sampling
    stop: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def row(self) -> Row:
        """Prompt and completion so far."""
        before = len(self.start.prompt)
        drawn = RolloutTokens.drawn(
            np.array(self.tokens), np.array(self.logprobs), np.array(self.versions)
        )
        return Row(
            ticket=self.ticket,
            age=self.age,
            tokens=RolloutTokens.joined([RolloutTokens.given(self.start.prompt), drawn]),
            start=before,
            limit=self.start.limit,
            seed=self.seed,
            sampling=self.sampling,
            stop=self.stop,
        )
