"""The likeliest tokens beside each that is drawn, for rollouts that ask for them.

Axes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from dataflow.records import AnyArray
from operators.engine.sampler import RowSampling, likeliest

Likeliest: TypeAlias = "list[tuple[int, float]]"
"""Ids and log-probabilities under the distribution that was drawn from, the likeliest first; none
of probability 0."""


class Alternatives:
    """By ticket, what might have been drawn at each token of its completion."""

    def __init__(self) -> None:
        """Begin with none asked for."""
        self._asked: dict[int, int] = {}
        self._found: dict[int, list[Likeliest]] = {}

    def __bool__(self) -> bool:
        """Whether any rollout asks."""
        return bool(self._asked)

    def ask(self, tickets: Sequence[int], count: int) -> None:
        """Note so many at each token of these rollouts from now on."""
        for ticket in tickets if count else ():
            self._asked[ticket], self._found[ticket] = count, []

    def of(self, ticket: int) -> list[Likeliest]:
        """What was noted so far; maybe one more than the rollout has tokens."""
        return self._found.get(ticket, [])

    def take(self, ticket: int) -> list[Likeliest]:
        """The same, and forget the rollout."""
        self._asked.pop(ticket, None)
        return self._found.pop(ticket, [])

    def note(
        self,
        tickets: AnyArray,
        logits: torch.Tensor,
        sampling: RowSampling,
        seen: torch.Tensor | None,
    ) -> None:
        """The newest draw of rows [n] with these tickets, from logits [n, V]."""
        at = np.flatnonzero(np.isin(tickets, list(self._asked))) if self._asked else ()
        if not len(at):
            return
        most = max(self._asked[ticket] for ticket in tickets[at].tolist())
        ids, logprobs = (
            tensor.cpu().numpy()[at] for tensor in likeliest(logits, sampling, most, seen=seen)
        )
        for ticket, tokens, values in zip(
            tickets[at].tolist(), ids.tolist(), logprobs.tolist(), strict=True
        ):
            pairs = zip(tokens, values, strict=True)
            self._found[ticket].append(
                [pair for pair in pairs if pair[1] > -np.inf][: self._asked[ticket]]
            )
