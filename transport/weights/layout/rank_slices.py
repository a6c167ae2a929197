"""Which part of each full tensor a local one holds: a reader that is one rank of several takes its slices alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import Shaped

T = TypeVar("T", bound=Shaped)

RankSlice = tuple[Sequence[int], int | None, Sequence[Sequence[int]]]
"""(shape of the full tensor, dimension along which it is cut, ranges [first, last) along it, end to end in the local
tensor); without a dimension: all of it. Lists do as well, as msgpack gives them."""


@dataclass(frozen=True)
class LocalTensor(Generic[T]):
    """A local tensor, and what it holds of the full one."""

    local: T
    shape: tuple[int, ...]
    """Of the full tensor, which is what the layout tells."""
    dim: int = 0
    runs: tuple[tuple[int, int], ...] | None = None
    """None: all of it."""

    def cuts(self) -> Iterator[tuple[int, int, int]]:
        """(first index in the local tensor, first in the full one, length) of each run."""
        at = 0
        for first, last in self.runs or ():
            yield at, first, last - first
            at += last - first


def local_tensors(
    tensors: Mapping[str, T], slices: Mapping[str, RankSlice] | None, whose: str
) -> dict[str, LocalTensor[T]]:
    """Each tensor with its slice, by name; one without is whole.

    LayoutMismatch where a slice is of no tensor, does not lie in its full shape, or gives another shape."""
    slices = slices or {}
    for name in slices.keys() - tensors.keys():
        raise LayoutMismatch(
            f"{whose} names a slice of a tensor that it does not have; found '{name}'; give slices of its tensors alone"
        )
    return {name: _local_tensor(name, tensor, slices.get(name), whose) for name, tensor in tensors.items()}


def _local_tensor(name: str, local: T, slice_: RankSlice | None, whose: str) -> LocalTensor[T]:
    here = tuple(local.shape)
    if slice_ is None:
        return LocalTensor(local, here)
    shape, dim, runs = tuple(slice_[0]), slice_[1], tuple((first, last) for first, last in slice_[2])
    expected = list(shape)
    if dim is not None:
        if not 0 <= dim < len(shape) or any(not 0 <= first <= last <= shape[dim] for first, last in runs):
            raise LayoutMismatch(
                f"{whose} holds a slice of '{name}' that does not lie in it; found {list(map(list, runs))} along "
                f"dimension {dim} of {list(shape)}; cut it anew"
            )
        expected[dim] = sum(last - first for first, last in runs)
    if list(here) != expected:
        raise LayoutMismatch(
            f"{whose} has another shape for its slice of '{name}'; found {list(here)}, but ranges "
            f"{list(map(list, runs))} along dimension {dim} of {list(shape)} make {expected}; cut it anew"
        )
    return LocalTensor(local, shape) if dim is None else LocalTensor(local, shape, dim, runs)
