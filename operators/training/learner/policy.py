"""The model as the trainer sees it: log-probabilities of a packed micro-batch's tokens; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.tokens.sampling_mask import SamplingMask
from operators.training.learner.head import Shape, logprobs_of_hidden
from operators.training.learner.head_module import HeadModule
from operators.training.learner.logprobs import Wanted, logprobs_of_logits
from operators.training.learner.packed_inputs import computing, on_device, packed_inputs
from operators.training.learner.packed_probe import PROBE_TOLERANCE, probe, switch_to_packed
from operators.training.learner.packing import Array, TokenTree

ROUNDED_TOLERANCE = 0.1
"""PROBE_TOLERANCE where logits are rounded to 16 bits, and the sliced head's are not."""
MOST_LOGITS = 2**22
"""Up to so many logits are held all at once: 16 MiB cost less time than computing them again in the backward pass."""


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

        temperature: that the rollouts were sampled at. compute: type of the matrix products under autocast;
        None: that of the weights. packed: whether nodes go through the model without padding; None: where a
        probe shows that the model's log-probabilities stay what they were.
        """
        self.module = module
        self.temperature = self._declared = temperature
        self._device = next(module.parameters()).device
        self._compute = compute
        self._vocabulary = int(module.config.get_text_config().vocab_size)
        self._head: HeadModule | None = None
        self.packs = False
        if packed is None or packed:
            self.packs = switch_to_packed(module, self._probed, must=bool(packed))
        self._head = self._proved_head()

    def at(self, temperature: float) -> None:
        """As `Forward` has it."""
        self.temperature = temperature if temperature > 0 else self._declared

    @property
    def slices(self) -> bool:
        """Whether large micro-batches are computed without ever holding all logits."""
        return self._head is not None

    def computed(self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]) -> dict[str, Tensor]:
        """`new_logprobs` and, where wanted, `entropy`; see `logprobs`."""
        logprobs_T, entropy_T = self.logprobs(packed, left_T, entropy="entropy" in wanted)
        return {"new_logprobs": logprobs_T} | ({} if entropy_T is None else {"entropy": entropy_T})

    def logprobs(
        self, packed: TokenTree, left_T: SamplingMask | None = None, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [T] of the trained tokens and, where asked for, the entropy [T] in nats.

        left_T: the ids that truncation left at each of them; both numbers are then those of the distribution over
        these ids alone, so that with the generator's weights they are the generator's, whatever top-k, top-p or min-p
        it used. A repetition penalty changes the logits themselves and is not undone: with one, the
        log-probabilities of trainer and generator differ, and the loss's importance ratio has to make up for it.
        """
        if self._head is not None and len(packed.heads_U) * self._vocabulary > MOST_LOGITS:
            return self._through_head(self._head, packed, left_T, entropy)
        wanted = self._wanted(packed.head_T, packed.targets_T, left_T)
        return logprobs_of_logits(self._logits(packed), wanted, self.temperature, entropy=entropy)

    def _wanted(self, head_T: Array, targets_T: Array, left_T: SamplingMask | None) -> Wanted:
        """On the device."""
        if left_T is None:
            return Wanted(self._to(head_T), self._to(targets_T))
        lengths_T = np.diff(left_T.offsets)
        masked = np.flatnonzero(lengths_T)
        segment_K = np.repeat(np.arange(len(masked)), lengths_T[masked])
        return Wanted(
            self._to(head_T),
            self._to(targets_T),
            self._to(masked),
            self._to(segment_K),
            self._to(left_T.ids).long(),
        )

    def _through_head(
        self, head: HeadModule, packed: TokenTree, left_T: SamplingMask | None, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`logprobs`, computed in the model's last layer, for all nodes or for one bucket of rows after the other."""
        shape = Shape(scale=head.after.scale / self.temperature, cap=head.after.cap)

        def found_by(rows_U: Tensor | None, wanted: Wanted, run: Callable[[], Any]) -> Tensor:
            def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                hidden_U_D = hidden if rows_U is None else hidden[rows_U]
                found = logprobs_of_hidden(hidden_U_D, weight, bias, wanted, shape, entropy=entropy)
                return torch.stack([values for values in found if values is not None], -1)

            return head.call(compute, run)

        with computing(self._compute, self._device):
            if self.packs:
                wanted = self._wanted(packed.head_T, packed.targets_T, left_T)
                found_T = found_by(None, wanted, lambda: self._run_packed(packed))
            else:
                found, places = [], []
                for bucket, rows_U, head_T, tokens in _by_bucket(packed):
                    kept = None if left_T is None else left_T.take(tokens)
                    wanted = self._wanted(head_T, packed.targets_T[tokens], kept)
                    found.append(found_by(self._to(rows_U), wanted, partial(self._run_padded, packed, bucket)))
                    places.append(tokens)
                found_T = torch.cat(found)[self._to(np.argsort(np.concatenate(places)))]
        return found_T[:, 0], found_T[:, 1] if entropy else None

    def _logits(self, packed: TokenTree) -> Tensor:
        """Logits [U, V] at the nodes that trained tokens are predicted from."""
        with computing(self._compute, self._device):
            if self.packs:
                return self._run_packed(packed).logits[0]  # type: ignore[no-any-return]
            logits = [self._run_padded(packed, bucket).logits.flatten(0, 1) for bucket in packed.buckets]
            return torch.cat(logits)[self._to(packed.back_N[packed.heads_U])]

    def _run_packed(self, packed: TokenTree) -> Any:
        """The model on all nodes at once; its last layer sees those of U."""
        return self.module(logits_to_keep=self._to(packed.heads_U), **packed_inputs(packed, self._device))

    def _run_padded(self, packed: TokenTree, bucket: Array) -> Any:
        """The model on right-padded rows, where its attention cannot be replaced; its last layer sees them all."""
        return self.module(input_ids=self._to(packed.tokens_N)[self._to(bucket)], use_cache=False)

    def _to(self, array: Array) -> Tensor:
        return on_device(array, self._device)

    def _proved_head(self) -> HeadModule | None:
        """The model's last layer, if on a probe it gives the log-probabilities that the model's logits give."""
        few = probe(self.module)
        run = partial(self._run_packed, few) if self.packs else partial(self._run_padded, few, few.buckets[0])
        with computing(self._compute, self._device):
            head = HeadModule.of(self.module, run)
        if head is None:
            return None
        with torch.no_grad():
            logits = self._logits(few)
            wanted = self._wanted(few.head_T, few.targets_T, None)
            from_logits, _ = logprobs_of_logits(logits, wanted, self.temperature, entropy=False)
            found, _ = self._through_head(head, few, None, entropy=False)
        tolerance = PROBE_TOLERANCE if logits.dtype in (torch.float32, torch.float64) else ROUNDED_TOLERANCE
        return head if bool(((found - from_logits).abs() <= tolerance).all()) else None

    def _probed(self, is_packed: bool) -> Tensor:
        self.packs = is_packed
        return self.logprobs(probe(self.module))[0]


def _by_bucket(packed: TokenTree) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Each bucket, with the places in it that trained tokens are predicted from, for each such token an index into
    them, and which of the T it is."""
    at_U = packed.back_N[packed.heads_U]
    begin = 0
    for bucket in packed.buckets:
        inside_U = (at_U >= begin) & (at_U < begin + bucket.size)
        tokens = np.flatnonzero(inside_U[packed.head_T])
        head_T = (np.cumsum(inside_U) - 1)[packed.head_T[tokens]]
        yield bucket, at_U[inside_U] - begin, head_T, tokens
        begin += bucket.size
