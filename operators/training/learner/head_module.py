"""A model's own last layer made to give log-probabilities instead of logits, within the model's own
forward pass.

The layer is called by the model as ever, so whatever hangs on the call (the hooks that gather a
sharded weight, or take its gradient away) finds what it expects; only what the layer computes is
another function of the same hidden states and the same weight. What the model does to logits
afterwards is found out when it is loaded, and undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from operators.training.learner.head import Shape

SMALL = 2.0**-10
"""Numbers that go through a cap are made so small that it leaves them as exact as they were; a
power of two."""


@dataclass(frozen=True)
class HeadModule:
    """The last layer of a causal language model, and what the model does to its logits."""

    layer: torch.nn.Linear
    after: Shape

    @classmethod
    def of(cls, module: Any, run: Callable[[], Any]) -> HeadModule | None:
        """The last layer of `module`; None where it is no plain linear one (tensor parallel, an
        adapter on it), or where the model does more to its logits than cap and scale them.

        run: calls the model on a few tokens; what comes out of known numbers in the layer's place
        is looked at.
        """
        layer = module.get_output_embeddings()
        if (
            not isinstance(layer, torch.nn.Linear)
            or type(layer).forward is not torch.nn.Linear.forward
        ):
            return None
        if "forward" in vars(layer):
            return None
        cap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
        probe = torch.zeros(0)

        def forward(hidden: Tensor) -> Tensor:
            nonlocal probe
            shape = hidden.shape[:-1]
            probe = torch.linspace(-4.0, 4.0, shape.numel(), device=hidden.device).view(*shape, 1)
            return probe

        try:
            with torch.no_grad(), _instead(layer, forward):
                logits = run().logits
        except Exception:  # any refusal means the same: this architecture keeps its logits
            return None
        if logits.shape != probe.shape:
            return None
        capped = probe if not cap else cap * torch.tanh(probe / cap)
        scale = float(logits.flatten()[-1] / capped.flatten()[-1])
        is_known = scale > 0 and torch.allclose(logits, scale * capped, rtol=1e-5, atol=1e-6)
        return cls(layer, Shape(scale=scale, cap=cap or None)) if is_known else None

    def call(
        self, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor], run: Callable[[], Any]
    ) -> Tensor:
        """What `compute` makes of hidden states [U, D], weight and bias: [T, n], through the
        model's forward.

        compute: gets the hidden states of all positions that the layer is asked for. run: calls the
        model.
        """
        small = 1.0 if self.after.cap is None else SMALL

        def forward(hidden: Tensor) -> Tensor:
            return compute(hidden.flatten(0, -2), self.layer.weight, self.layer.bias)[None] * small

        with _instead(self.layer, forward):
            numbers: Tensor = run().logits[0]
        numbers = numbers / self.after.scale
        if self.after.cap is not None:
            numbers = torch.atanh(numbers / self.after.cap) * (self.after.cap / SMALL)
        return numbers


@contextlib.contextmanager
def _instead(layer: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a layer compute something else for a while."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
