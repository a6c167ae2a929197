"""A rollout that vLLM decodes, as its parent knows it: how it started and what it has drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from operators.engine.results import Row, Start
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings


@dataclass
class Live:
    """A rollout that vLLM decodes."""

    start: Start
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
        return Row(
            ticket=self.ticket,
            age=self.age,
            tokens=np.concatenate([self.start.prompt, np.array(self.tokens, np.int64)]).astype(np.int32),
            logprobs=np.concatenate([np.zeros(before), np.array(self.logprobs)]).astype(np.float32),
            versions=np.concatenate([np.full(before, -1), np.array(self.versions, np.int64)]).astype(np.int32),
            start=before,
            limit=self.start.limit,
            seed=self.seed,
            sampling=self.sampling,
            stop=self.stop,
            kept=None,
        )
