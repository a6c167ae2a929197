"""What a trainer keeps for readers that it refreshes: a moving average, and the version that they
have; imports torch.

A rank keeps its own slices of both. Both are part of a checkpoint, so a reader gets the same bytes
from a trainer that was started again, also between two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dataflow.weight_ends import Refresh, WeightsOut
from operators.training.learner.together import local


class Following(Protocol):
    """What has weights to follow: a learner."""

    parameters: dict[str, Tensor]
    refreshed: list[Refreshed]
    writers: dict[int, WeightsOut]
    settle_s: float


class Refreshed:
    """Follows a trainer's weights, step by step, for the readers of one `Refresh`."""

    def __init__(
        self, refresh: Refresh, weights: Mapping[str, Tensor], step: int, dtype: torch.dtype
    ) -> None:
        """weights: those of `step`, changed in place. dtype: in which they are read. After earlier
        steps, average and version are still to be filled, through `tensors`.

        Where steps are behind them, average and version are still to be filled, through
        `tensors`.
        """
        self.refresh = refresh
        self._weights = dict(weights)
        self._dtype = dtype
        self._average = _copied(weights, torch.float32) if refresh.decay else None
        self._sent: dict[str, Tensor] | None = None
        if refresh.newest(step):
            self._keep()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average and the version, as <parameter>/<which>.<refresh>: what a checkpoint has to
        hold.
        """
        by_kind = {"average": self._average or {}, "sent": self._sent or {}}
        at = f"{self.refresh.every}-{self.refresh.decay!r}"
        return {
            f"{name}/{kind}-{at}": tensor
            for kind, tensors in by_kind.items()
            for name, tensor in tensors.items()
        }

    @property
    def offered(self) -> dict[str, Tensor]:
        """The version that readers are to have, by the weights' names; before the first, the
        weights.
        """
        return self._sent or self._source

    @property
    def offers_weights(self) -> bool:
        """Whether what is offered are the weights themselves, which every step changes."""
        return self._sent is None and self._average is None

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take in the weights of the step after the one before."""
        if self._average is not None:
            for name, average in self._average.items():
                local(average).lerp_(local(self._weights[name]).float(), 1.0 - self.refresh.decay)
        if self.refresh.newest(step) == step:
            self._keep()

    @property
    def _source(self) -> dict[str, Tensor]:
        return self._weights if self._average is None else self._average

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep the version of this step, unless the next step makes the next one."""
        if self.refresh.every == 1:
            return
        if self._sent is None:
            self._sent = _copied(self._source, self._dtype)
        for name, tensor in self._sent.items():
            local(tensor).copy_(local(self._source[name]))


def add(
    *, learner: Following, rank: int, ranks: int, every: int, decay: float, step: int, dtype: str
) -> None:
    """Have a learner, whose weights are of `step`, keep what one `Refresh` needs: for
    `Learner.everywhere`.
    """
    refresh = Refresh(every=every, decay=decay)
    learner.refreshed.append(Refreshed(refresh, learner.parameters, step, getattr(torch, dtype)))


def follow(*, learner: Following, rank: int, ranks: int, step: int) -> bool:
    """`Refreshed.follow`, for `Learner.everywhere`, after `settle`."""
    changing = [
        line
        for line, reference in enumerate(learner.refreshed, 1)
        if reference.refresh.newest(step) == step
    ]
    settled = settle(
        [learner.writers[line] for line in changing if line in learner.writers], learner.settle_s
    )
    for reference in learner.refreshed:
        reference.follow(step)
    return settled


def settle(writers: Iterable[WeightsOut], wait_s: float) -> bool:
    """Wait until no reader uses these versions, before they change. False where a reader was given
    up after a long wait.
    """
    settled = [writer.settle(wait_s) for writer in writers]
    return all(settled)


def tensors_of(refreshed: Iterable[Refreshed]) -> dict[str, Tensor]:
    """All that several keep."""
    return {name: tensor for reference in refreshed for name, tensor in reference.tensors.items()}


@torch.no_grad()
def _copied(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the same placement, in memory of their own."""
    return {name: tensor.detach().to(dtype, copy=True) for name, tensor in tensors.items()}
