"""What a trainer does to need less of its device: activations computed again, layers compiled, tensors parked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operators.models.errors import ModelError
from operators.training.learner.refreshed import Refreshed, tensors_of


def prepare(module: Any, *, gradient_checkpointing: bool, compile: bool) -> None:
    """Switch the layers of a loaded module, in place; after its attention was chosen. Names and hooks stay.

    Raises:
        ModelError: the module has no layers of transformers' kind, or nothing compiles here.
    """
    if compile:
        compile_layers(module)
    if gradient_checkpointing:
        recompute_activations(module)


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """The repeated blocks of a model of transformers. ModelError where it marks none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[torch.nn.Module] = [
        layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no layers that can be switched one by one; found no "
            f"GradientCheckpointingLayer of transformers; leave gradient_checkpointing and compile out"
        )
    return found


def recompute_activations(module: Any) -> None:
    """Keep of each layer only what goes into it, and compute the rest again in the backward pass (arXiv 1604.06174).

    transformers' own switch works in training mode alone; a trainer's module is in eval mode, where there is no noise
    that would have to be repeated.
    """
    for layer in decoder_layers(module):
        layer.forward = _recomputed(layer.forward)


def compile_layers(module: Any) -> None:
    """Run each layer through torch.compile, lengths left open. Attention of our own stays as it is between the parts:
    its rows come in any number. ModelError where nothing compiles."""
    from transformers import AttentionInterface

    layers = decoder_layers(module)
    device = next(module.parameters()).device
    try:
        torch.compile(_probe)(torch.zeros(8, device=device))
    except Exception as error:  # a missing compiler shows as any of a dozen kinds
        text = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"compile=True needs a compiler for {device.type}, and none works here; found {type(error).__name__}: "
            f"{text[0][:200]}; install one ({'g++' if device.type == 'cpu' else 'triton and a C compiler'}), or leave "
            f"compile out"
        ) from error
    name = module.config._attn_implementation
    attention = AttentionInterface().get(name)  # type: ignore[no-untyped-call]
    if attention is not None and not attention.__module__.startswith("transformers."):
        AttentionInterface.register(name, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _probe(values: Tensor) -> Tensor:
    return (values + 1).sum()


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **named)

    return call


@dataclass
class _Place:
    """The memory behind one or several tensors."""

    storage: torch.UntypedStorage
    host: Tensor
    """As many bytes of main memory."""


class Shelf:
    """Main memory for tensors that nobody reads for a while, of one kind of device.

    Their own memory is given back; the tensors, and whatever shares memory with them, stay the same objects and have
    their values again after `back`. Main memory is taken once, and pinned for a GPU.
    """

    def __init__(self, kind: str = "cuda") -> None:
        """Tensors of other kinds of devices are left where they are."""
        self._kind = kind
        self._places: dict[int, _Place] = {}
        self._is_full = False

    @property
    def nbytes(self) -> int:
        """Main memory that it holds."""
        return sum(place.host.nbytes for place in self._places.values())

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy them to main memory, after all that the current stream does, and give their own back."""
        if self._is_full:
            return
        places: dict[int, _Place] = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if storage.device.type == self._kind and storage.resizable() and storage._cdata not in places:
                places[storage._cdata] = self._places.get(storage._cdata) or _Place(storage, _room(storage))
        for place in places.values():
            place.host.copy_(_bytes(place.storage), non_blocking=True)
        if self._kind == "cuda" and places:
            torch.cuda.synchronize()
        for place in places.values():
            place.storage.resize_(0)
        self._places, self._is_full = places, True

    @torch.no_grad()
    def back(self) -> None:
        """Have them on their devices, for all that the current stream does from now on."""
        if not self._is_full:
            return
        for place in self._places.values():
            place.storage.resize_(place.host.nbytes)
            _bytes(place.storage).copy_(place.host, non_blocking=True)
        self._is_full = False


class Parking(Protocol):
    """What has a model and an optimiser to park: a learner."""

    parameters: dict[str, Tensor]
    """Those that are trained."""
    optimizer: torch.optim.Optimizer
    parked: Parked | None
    refreshed: list[Refreshed]

    @property
    def module(self) -> torch.nn.Module:
        """The model."""


class Parked:
    """A learner whose device is for others between its steps, and whose moments are there for the update alone.

    Nothing is copied beside a forward or backward pass: that is when the device is fullest.
    """

    def __init__(self, learner: Parking, kind: str = "cuda") -> None:
        self._learner = learner
        self._weights, self._moments = Shelf(kind), Shelf(kind)

    @property
    def nbytes(self) -> int:
        """Main memory that is taken."""
        return self._weights.nbytes + self._moments.nbytes

    def bring(self, *, moments: bool) -> None:
        """Have the weights on the device, before anybody reads them; `moments`: the optimiser's state too."""
        self._weights.back()
        if moments:
            self._moments.back()

    def rest(self, *, weights: bool) -> None:
        """After an update: drop the gradients, and give the memory of the optimiser's state back; `weights`: theirs
        too, which nobody may read until `bring`."""
        for weight in self._learner.parameters.values():
            weight.grad = None
        state = self._learner.optimizer.state.values()
        self._moments.park(value for values in state for value in values.values() if _is_large(value))
        if weights:
            kept = tensors_of(self._learner.refreshed).values()
            self._weights.park([*self._learner.module.parameters(), *kept])


def bring(*, learner: Parking, rank: int, ranks: int, moments: bool) -> None:
    """`Parked.bring`, for `Learner.everywhere`."""
    assert learner.parked is not None, "the trainer offloads"
    learner.parked.bring(moments=moments)


def rest(*, learner: Parking, rank: int, ranks: int, weights: bool) -> None:
    """`Parked.rest`, for `Learner.everywhere`."""
    assert learner.parked is not None, "the trainer offloads"
    learner.parked.rest(weights=weights)


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that several share out."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _room(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
