"""Log-probabilities computed in a model's last layer, so that no large micro-batch ever holds all
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dataflow.tokens.sampling_mask import SamplingMask
from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.learner.head import Shape, logprobs_of_hidden
from operators.training.learner.head_module import HeadModule
from operators.training.learner.logprobs import Wanted, logprobs_of_logits
from operators.training.learner.packed_probe import PROBE_TOLERANCE, probe
from operators.training.learner.packing import Array, TokenTree

ROUNDED_TOLERANCE, ROUNDED_SHARE = 0.1, 2.0**-7
"""PROBE_TOLERANCE where logits are rounded to 16 bits, and the sliced head's are not: at least, and
of the largest."""


class PackedModel(Protocol):
    """The methods of the model that the head needs; see `Policy`."""

    module: Any
    temperature: float
    packs: bool
    direct: DirectGradients | None

    def computing(self) -> Any:
        """The context of its matrix products."""

    def wanted(self, head_T: Array, targets_T: Array, left_T: SamplingMask | None) -> Wanted:
        """What is asked for, on its device."""

    def logits(self, packed: TokenTree) -> Tensor:
        """Logits [U, V]."""

    def run_packed(self, packed: TokenTree) -> Any:
        """The model on all nodes at once."""

    def run_padded(self, packed: TokenTree, bucket: Array) -> Any:
        """The model on right-padded rows."""

    def to(self, array: Array) -> Tensor:
        """On its device."""


def proved_head(model: PackedModel) -> HeadModule | None:
    """The model's last layer, if on a probe it gives the log-probabilities that the model's logits
    give.
    """
    few = probe(model.module)
    run = (
        partial(model.run_packed, few)
        if model.packs
        else partial(model.run_padded, few, few.buckets[0])
    )
    with model.computing():
        head = HeadModule.of(model.module, run)
    if head is None:
        return None
    with torch.no_grad():
        logits = model.logits(few)
        selection = model.wanted(few.head_T, few.targets_T, None)
        from_logits, _ = logprobs_of_logits(logits, selection, model.temperature, entropy=False)
        from_head, _ = logprobs_of_head(head, model, few, None, entropy=False)
    tolerance = PROBE_TOLERANCE
    if logits.dtype not in (torch.float32, torch.float64):
        tolerance = max(ROUNDED_TOLERANCE, ROUNDED_SHARE * float(logits.abs().max()))
    return head if bool(((from_head - from_logits).abs() <= tolerance).all()) else None


def logprobs_of_head(
    head: HeadModule,
    model: PackedModel,
    packed: TokenTree,
    left_T: SamplingMask | None,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """`Policy.logprobs`, computed in the last layer, for all nodes or for one bucket of rows after
    the other.
    """
    shape = Shape(scale=head.after.scale / model.temperature, cap=head.after.cap)

    def found_by(rows_U: Tensor | None, selection: Wanted, run: Callable[[], Any]) -> Tensor:
        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            hidden_U_D = hidden if rows_U is None else hidden[rows_U]
            outputs = logprobs_of_hidden(
                hidden_U_D, weight, bias, selection, shape, entropy=entropy, direct=model.direct
            )
            return torch.stack([values for values in outputs if values is not None], -1)

        return head.call(compute, run)

    with model.computing():
        if model.packs:
            selection = model.wanted(packed.head_T, packed.targets_T, left_T)
            found_T = found_by(None, selection, lambda: model.run_packed(packed))
        else:
            parts, places = [], []
            for bucket, rows_U, head_T, tokens in _by_bucket(packed):
                masks = None if left_T is None else left_T.take(tokens)
                selection = model.wanted(head_T, packed.targets_T[tokens], masks)
                parts.append(
                    found_by(model.to(rows_U), selection, partial(model.run_padded, packed, bucket))
                )
                places.append(tokens)
            found_T = torch.cat(parts)[model.to(np.argsort(np.concatenate(places)))]
    return found_T[:, 0], found_T[:, 1] if entropy else None


def _by_bucket(packed: TokenTree) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Each bucket, with the places in it that trained tokens are predicted from, for each such
    token an index into them, and which of the T it is.
    """
    at_U = packed.back_N[packed.heads_U]
    begin = 0
    for bucket in packed.buckets:
        inside_U = (at_U >= begin) & (at_U < begin + bucket.size)
        tokens = np.flatnonzero(inside_U[packed.head_T])
        head_T = (np.cumsum(inside_U) - 1)[packed.head_T[tokens]]
        yield bucket, at_U[inside_U] - begin, head_T, tokens
        begin += bucket.size
