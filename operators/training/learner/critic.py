"""A causal model with a number per token, as the trainer sees it: values of prefixes of packed
nodes; imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dataflow.tokens.sampling_mask import SamplingMask
from operators.models.borders import settle_rope
from operators.models.errors import ModelError
from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.learner.packed_attention import ATTENTION
from operators.training.learner.packed_inputs import computing, on_device, packed_inputs
from operators.training.learner.packed_probe import probed_in, switch_to_packed
from operators.training.learner.packing import Array, TokenTree

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

    def _to(self, array: Array) -> Tensor:
        return on_device(array, self._device)
