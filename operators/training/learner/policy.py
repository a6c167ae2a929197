"""The model as the trainer sees it: log-probabilities of a packed micro-batch's tokens; imports
torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.tokens.sampling_mask import SamplingMask
from operators.models.borders import settle_rope
from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.learner.head_module import HeadModule
from operators.training.learner.logprobs import Wanted, logprobs_of_logits
from operators.training.learner.packed_inputs import computing, on_device, packed_inputs
from operators.training.learner.packed_probe import probed_in, switch_to_packed
from operators.training.learner.packing import Array, TokenTree
from operators.training.learner.sliced_head import logprobs_of_head, proved_head

MOST_LOGITS = 2**22
"""Up to so many logits are held all at once: 16 MiB cost less time than computing them again in the
backward pass."""


class Policy:
    """A causal language model that gives log-probabilities of trained tokens."""

    def __init__(
        self,
        module: Any,
        *,
        temperature: float = 1.0,
        compute: torch.dtype | None = None,
        packed: bool | None = None,
    ) -> None:
        """module: in eval mode (prefixes can be shared only without dropout).

        temperature: that the rollouts were sampled at. compute: type of the matrix products under
        autocast; None: that of the weights. packed: whether nodes go through the model without
        padding; None: where a probe shows that the model's log-probabilities stay what they were.
        """
        settle_rope(module, type(module).__name__, None)
        self.module = module
        self.temperature = self._declared = temperature
        self._device = next(module.parameters()).device
        self.compute = probed_in(module, compute)
        self._vocabulary = int(module.config.get_text_config().vocab_size)
        self._head: HeadModule | None = None
        self.direct: DirectGradients | None = None
        self.packs = False
        if packed is None or packed:
            self.packs = switch_to_packed(module, self._probed, self.compute, must=bool(packed))
        self._head = proved_head(self)
        self.compute = compute

    def at(self, temperature: float) -> None:
        self.temperature = temperature if temperature > 0 else self._declared

    @property
    def slices(self) -> bool:
        """Whether large micro-batches are computed without ever holding all logits."""
        return self._head is not None

    def computed(
        self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """`new_logprobs` and, where wanted, `entropy`; see `logprobs`."""
        logprobs_T, entropy_T = self.logprobs(packed, left_T, entropy="entropy" in wanted)
        return {"new_logprobs": logprobs_T} | ({} if entropy_T is None else {"entropy": entropy_T})

    def logprobs(
        self, packed: TokenTree, left_T: SamplingMask | None = None, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [T] of the trained tokens and, where asked for, the entropy [T] in
        nats.

        left_T: the ids that truncation left at each of them; both numbers are then those of the
        distribution over these ids alone, so that with the generator's weights they are the
        generator's, whatever top-k, top-p or min-p it used. A repetition penalty changes the logits
        themselves and is not undone: with one, the log-probabilities of trainer and generator
        differ, and the loss's importance ratio has to make up for it.
        """
        is_rounded = self.direct is not None and self.direct.is_rounded  # but the last layer is not
        if self._head is not None and (
            is_rounded or len(packed.heads_U) * self._vocabulary > MOST_LOGITS
        ):
            return logprobs_of_head(self._head, self, packed, left_T, entropy=entropy)
        selection = self.wanted(packed.head_T, packed.targets_T, left_T)
        return logprobs_of_logits(self.logits(packed), selection, self.temperature, entropy=entropy)

    def wanted(self, head_T: Array, targets_T: Array, left_T: SamplingMask | None) -> Wanted:
        """On the device."""
        if left_T is None:
            return Wanted(self.to(head_T), self.to(targets_T))
        lengths_T = np.diff(left_T.offsets)
        masked = np.flatnonzero(lengths_T)
        segment_K = np.repeat(np.arange(len(masked)), lengths_T[masked])
        return Wanted(
            self.to(head_T),
            self.to(targets_T),
            self.to(masked),
            self.to(segment_K),
            self.to(left_T.ids).long(),
        )

    def computing(self) -> Any:
        """The context of its matrix products."""
        return computing(self.compute, self._device)

    def logits(self, packed: TokenTree) -> Tensor:
        """Logits [U, V] at the nodes that trained tokens are predicted from."""
        with self.computing():
            if self.packs:
                return self.run_packed(packed).logits[0]  # type: ignore[no-any-return]
            logits = [
                self.run_padded(packed, bucket).logits.flatten(0, 1) for bucket in packed.buckets
            ]
            return torch.cat(logits)[self.to(packed.back_N[packed.heads_U])]

    def run_packed(self, packed: TokenTree) -> Any:
        """The model on all nodes at once; its last layer sees those of U."""
        return self.module(
            logits_to_keep=self.to(packed.heads_U), **packed_inputs(packed, self._device)
        )

    def run_padded(self, packed: TokenTree, bucket: Array) -> Any:
        """The model on right-padded rows, where its attention cannot be replaced; its last layer
        sees them all.
        """
        return self.module(input_ids=self.to(packed.tokens_N)[self.to(bucket)], use_cache=False)

    def to(self, array: Array) -> Tensor:
        """On the device."""
        return on_device(array, self._device)

    def _probed(self, is_packed: bool, tree: TokenTree) -> Tensor:
        self.packs = is_packed
        return self.logprobs(tree)[0]
