"""What a trainer does to need less of its device: activations computed again, layers compiled,
tensors parked.

A rank keeps its own slices of both. Both are part of a checkpoint, so a reader gets the same bytes
from a trainer that was started again, also between two versions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dataflow.weight_ends import Refresh, WeightsOut
from operators.models.folders import ModelError
from operators.models.loading import decoder_layers
from operators.models.read_weights import Shelf, return_freed_memory
from operators.training.learner.together import local

if TYPE_CHECKING:
    from operators.training.learner.learner import Learner


class Refreshed:
    """Follows a trainer's weights, step by step, for the readers of one `Refresh`."""

    def __init__(
        self, refresh: Refresh, weights: Mapping[str, Tensor], step: int, dtype: torch.dtype
    ) -> None:
        """weights: those of `step`, changed in place. dtype: in which they are read.

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
    *, learner: Learner, rank: int, ranks: int, every: int, decay: float, step: int, dtype: str
) -> None:
    """Have a learner, whose weights are of `step`, keep what one `Refresh` needs: for
    `Learner.everywhere`.
    """
    refresh = Refresh(every=every, decay=decay)
    learner.refreshed.append(Refreshed(refresh, learner.parameters, step, getattr(torch, dtype)))


def follow(*, learner: Learner, rank: int, ranks: int, step: int) -> bool:
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


def prepare(module: Any, *, gradient_checkpointing: bool | str, compile: bool) -> None:
    """Switch the layers of a loaded module, in place; after its attention was chosen. Names and
    hooks stay. gradient_checkpointing: as a trainer's knob.

    Raises:
        ModelError: the module has no layers of transformers' kind, or nothing compiles here.
    """
    if compile:
        compile_layers(module)
    if gradient_checkpointing:
        recompute_activations(module, gradient_checkpointing)


def recompute_activations(module: Any, how: bool | str = True) -> None:
    """Keep of each layer only what goes into it, and compute the rest again in the backward pass
    (arXiv 1604.06174). how: "products", keep also what matrices and attention give (arXiv
    2205.05198); "offload", keep what goes in in main memory.

    transformers' own switch works in training mode alone; a trainer's module is in eval mode, where
    there is no noise that would have to be repeated.
    """
    layers = decoder_layers(module)
    contexts = {"context_fn": _products} if how == "products" else {}
    host = HostCopies(next(module.parameters()).device) if how == "offload" else None
    for layer in layers:
        layer.forward = _recomputed(layer.forward, contexts, host)


def compile_layers(module: Any) -> None:
    """Run each layer through torch.compile, lengths left open. Attention of our own stays as it is
    between the parts: its rows come in any number. ModelError where nothing compiles.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(module)
    device = next(module.parameters()).device
    try:
        torch.compile(_probe)(torch.zeros(8, device=device))
    except Exception as error:  # a missing compiler shows as any of a dozen kinds
        text = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"compile=True needs a compiler for {device.type}, and none works here; found"
            f" {type(error).__name__}: {text[0][:200]}; install one"
            f" ({'g++' if device.type == 'cpu' else 'triton and a C compiler'}), or leave"
            " compile out"
        ) from error
    name = module.config._attn_implementation
    attention = AttentionInterface().get(name)  # type: ignore[no-untyped-call]
    if attention is not None and not attention.__module__.startswith("transformers."):
        AttentionInterface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _probe(values: Tensor) -> Tensor:
    return (values + 1).sum()


def _recomputed(
    forward: Callable[..., Any], contexts: Mapping[str, Any], host: HostCopies | None
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        with host.kept() if host is not None else contextlib.nullcontext():
            return checkpoint(
                forward,
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,
                **contexts,
                **named,
            )

    return call


aten = torch.ops.aten
_PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def _products() -> Any:
    return create_selective_checkpoint_contexts(_PRODUCTS)  # type: ignore[no-untyped-call]


class HostCopies:
    """What autograd keeps, in main memory until its backward pass; a GPU copies it on a stream of
    its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def kept(self) -> Any:
        """What is kept by code inside, but for what checkpoints within it keep by themselves."""
        return torch.autograd.graph.saved_tensors_hooks(self._away, self._back)

    def _away(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return host_copy(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def _back(self, copy: Tensor) -> Tensor:
        if self._stream is None:
            return copy.clone()
        with torch.cuda.stream(self._stream):
            tensor = copy.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        return tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Of what lies in main memory."""
    return tensor.clone()


class OffloadedLearner:
    """A learner whose device is for others between its steps, and whose moments are there for the
    update alone.

    Nothing is copied beside a forward or backward pass: that is when the device is fullest.
    """

    def __init__(self, learner: Learner, folder: Path | None = None) -> None:
        """folder: where a file may lie for what is in main memory; None: that stays there."""
        self._learner = learner
        self._weights, self._moments = Shelf(folder), Shelf(folder)

    @property
    def nbytes(self) -> int:
        """Main memory that is taken."""
        return self._weights.nbytes + self._moments.nbytes

    def bring(self, *, moments: bool) -> None:
        """Have the weights on the device, before anybody reads them; `moments`: the optimiser's
        state too.
        """
        self._weights.back()
        if moments:
            self._moments.back()

    def rest(self, *, weights: bool) -> None:
        """After an update: drop the gradients, and free the optimiser state's memory; `weights`:
        theirs too, which stay unread until `bring`.
        """
        for weight in self._learner.parameters.values():
            weight.grad = None
        state = self._learner.optimizer.state.values()
        self._moments.park(
            value for values in state for value in values.values() if _is_large(value)
        )
        if weights:
            tensors = tensors_of(self._learner.refreshed).values()
            self._weights.park([*self._learner.module.parameters(), *tensors])
            if self._learner.copies is not None:
                self._learner.copies.free()
        return_freed_memory()


def bring(*, learner: Learner, rank: int, ranks: int, moments: bool) -> None:
    """`OffloadedLearner.bring`, for `Learner.everywhere`."""
    assert learner.parked is not None, "the trainer offloads"
    learner.parked.bring(moments=moments)


def rest(*, learner: Learner, rank: int, ranks: int, weights: bool) -> None:
    """`OffloadedLearner.rest`, for `Learner.everywhere`."""
    assert learner.parked is not None, "the trainer offloads"
    learner.parked.rest(weights=weights)


def unpublished(*, learner: Learner, rank: int, ranks: int) -> int | None:
    """The version that this rank has yet to copy out of its weights, for `Learner.everywhere`;
    None: there is none.
    """
    waiting = (getattr(end, "pending", None) for end in learner.writers.values())
    return max((version for version in waiting if version is not None), default=None)


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
