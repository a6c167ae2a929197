"""The model as the trainer sees it: log-probabilities of a packed micro-batch's tokens; imports
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import SamplingMask
from operators.models.borders import settle_rope
from operators.models.folders import ModelError
from operators.training.learner.cpu import DirectGradients
from operators.training.learner.head import (
    HeadModule,
    Shape,
    Wanted,
    logprobs_of_hidden,
    logprobs_of_logits,
)
from operators.training.learner.packed_attention import (
    ATTENTION,
    PROBE_TOLERANCE,
    computing,
    on_device,
    packed_inputs,
    probe,
    probed_in,
    switch_to_packed,
)
from operators.training.learner.rows import TokenTree

ROUNDED_TOLERANCE, ROUNDED_SHARE = 0.1, 2.0**-7
"""PROBE_TOLERANCE where logits are rounded to 16 bits, and the sliced head's are not: at least, and
of the largest."""


def proved_head(model: Policy) -> HeadModule | None:
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
    model: Policy,
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
                hidden_U_D,
                weight,
                bias,
                selection,
                shape,
                entropy=entropy,
                direct=model.direct,
                alike=model.alike,
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
    return found_T[:, 0].clone(), found_T[:, 1].clone() if entropy else None  # FSDP2: no views


def _by_bucket(packed: TokenTree) -> Iterator[tuple[AnyArray, AnyArray, AnyArray, AnyArray]]:
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
        self.alike: dist.ProcessGroup | None = None
        """Ranks that share out its layers and, once they all train, the rows of its head."""
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
        is_rounded = self.compute is not None  # but what the last layer adds up is not
        if self._head is not None and (
            is_rounded or len(packed.heads_U) * self._vocabulary > MOST_LOGITS
        ):
            return logprobs_of_head(self._head, self, packed, left_T, entropy=entropy)
        selection = self.wanted(packed.head_T, packed.targets_T, left_T)
        return logprobs_of_logits(self.logits(packed), selection, self.temperature, entropy=entropy)

    def wanted(self, head_T: AnyArray, targets_T: AnyArray, left_T: SamplingMask | None) -> Wanted:
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

    def run_padded(self, packed: TokenTree, bucket: AnyArray) -> Any:
        """The model on right-padded rows, where its attention cannot be replaced; its last layer
        sees them all.
        """
        return self.module(input_ids=self.to(packed.tokens_N)[self.to(bucket)], use_cache=False)

    def to(self, array: AnyArray) -> Tensor:
        """On the device."""
        return on_device(array, self._device)

    def _probed(self, is_packed: bool, tree: TokenTree) -> Tensor:
        self.packs = is_packed
        return self.logprobs(tree)[0]


HEADS = ("score", "classifier")
"""What transformers calls the last layer of models that classify tokens or sequences."""
CAUSAL_TOLERANCE = 1e-4


class Critic:
    """Numbers at the nodes that tokens are predicted from: the value of what stands before each
    token.

    The module is transformers' classifier of tokens or of sequences, called as a whole; its last
    layer is watched, and computed once more in float32, because a value in bfloat16 is known to one
    part in 256 only.
    """

    def __init__(
        self, module: Any, *, compute: torch.dtype | None = None, packed: bool | None = None
    ) -> None:
        """module: in eval mode. compute: type of the matrix products under autocast; None: that of
        the weights. packed: whether nodes go through it without padding; None: where a probe finds
        the same numbers.

        Raises ModelError when it has no last layer with one number, or its numbers depend on what
        comes later.
        """
        settle_rope(module, type(module).__name__, None)
        self.module = module
        self._device = next(module.parameters()).device
        self.compute = probed_in(module, compute)
        self._numbers: list[Tensor] = []
        self.direct: DirectGradients | None = None
        self._watch()
        if module.config._attn_implementation != ATTENTION:
            with torch.no_grad():
                self._check_causal()
        self.packs = False
        if packed is None or packed:
            self.packs = switch_to_packed(module, self._values, self.compute, must=bool(packed))
        self.compute = compute

    def at(self, temperature: float) -> None:
        """Values have none."""

    def computed(
        self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """`new_values`; truncation has no part in them."""
        return {"new_values": self.values(packed)}

    def values(self, packed: TokenTree) -> Tensor:
        """[T] float32: the number at the node before each trained token."""
        return self._values(self.packs, packed)

    def _values(self, is_packed: bool, packed: TokenTree) -> Tensor:
        nodes_T = packed.heads_U[packed.head_T]
        if is_packed:
            return self._call(**packed_inputs(packed, self._device))[self._to(nodes_T)]
        tokens_N = self._to(packed.tokens_N)
        rows = [
            self._call(input_ids=tokens_N[self._to(bucket)], use_cache=False)
            for bucket in packed.buckets
        ]
        numbers = torch.cat(rows)
        return numbers[self._to(packed.back_N[nodes_T])]

    def _call(self, **inputs: Any) -> Tensor:
        """The last layer's numbers at all positions, end to end."""
        with computing(self.compute, self._device):
            self.module(**inputs)
        return self._numbers.pop().flatten()

    def _watch(self) -> None:
        heads = [
            layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, torch.nn.Linear)
            and layer.out_features == 1
            and set(name.split(".")) & set(HEADS)
        ]
        if not heads:
            children = [name for name, _ in self.module.named_children()]
            raise ModelError(
                f"a critic or judge ends in one linear layer called {' or '.join(HEADS)} with one"
                f" number, but {type(self.module).__name__} has {children}; give a model that"
                " transformers loads with such a head"
            )
        for head in heads:
            head.register_forward_hook(self._keep)

    def _keep(self, head: torch.nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch.autocast(self._device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            self._numbers = [F.linear(inputs[0].float(), head.weight.float(), bias)]

    def _check_causal(self) -> None:
        """Packing shares prefixes: right only where a number depends on nothing that comes after
        it.
        """
        tokens = torch.arange(1, 9, device=self._device)[None] % int(
            self.module.config.get_text_config().vocab_size
        )
        changed = tokens.clone()
        changed[0, -1] = 0
        first, second = (self._call(input_ids=ids, use_cache=False) for ids in (tokens, changed))
        is_alike = len(first) == tokens.shape[1] and torch.allclose(
            first[:-1], second[:-1], atol=CAUSAL_TOLERANCE, rtol=CAUSAL_TOLERANCE
        )
        if not is_alike:
            raise ModelError(
                f"{type(self.module).__name__} reads text in both directions, but a critic or judge"
                " reads it from left to right, so that prefixes are computed once; give a causal"
                " model, such as a Llama or a Qwen"
            )

    def _to(self, array: AnyArray) -> Tensor:
        return on_device(array, self._device)
