"""Copies of float32 weights in the type that a model computes in; imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def adds_up_in_float32(module: Any) -> None:
    """Have what the layers add up in float32 though their products are not, as engines on CPUs do:
    it begins with the embeddings.
    """
    module.get_input_embeddings().register_forward_hook(
        lambda layer, inputs, output: output.float()
    )


class ComputeCopies:
    """What stands in a module for its weights while it computes, as FSDP2 has it on several ranks.

    A backward pass gives gradients in that type; each micro-batch's are added to the weights' own.
    """

    def __init__(
        self, module: nn.Module, compute: torch.dtype, but: Container[Tensor] = ()
    ) -> None:
        """but: weights that stay themselves, as what multiplies them rounds them."""
        self._compute = compute
        self._by_weight: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for part in module.modules():
            for leaf, weight in part._parameters.items():
                if weight is not None and weight.dtype != compute and weight not in but:
                    if weight not in self._by_weight:
                        self._by_weight[weight] = self._copy_of(weight)
                    self._places.append((part._parameters, leaf, weight))

    def refresh(self) -> None:
        """Be those of the weights as they are now."""
        with torch.no_grad():
            for weight, copy in self._by_weight.items():
                if copy.numel() != weight.numel():
                    copy.data = torch.empty_like(weight, dtype=self._compute)
                copy.copy_(weight)

    def free(self) -> None:
        """Take no memory until `refresh`."""
        for copy in self._by_weight.values():
            copy.data = copy.data.new_empty(0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the copies, for a forward and its backward pass."""
        for parameters, leaf, weight in self._places:
            parameters[leaf] = self._by_weight[weight]
        try:
            yield
        finally:
            for parameters, leaf, weight in self._places:
                parameters[leaf] = weight

    def _copy_of(self, weight: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(
            torch.empty(0, dtype=self._compute, device=weight.device), weight.requires_grad
        )
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(_adding_to(weight))  # type: ignore[no-untyped-call]
        return copy


def _adding_to(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def add(copy: Tensor) -> None:
        assert copy.grad is not None, "it was just computed"
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad += copy.grad
        copy.grad = None

    return add
