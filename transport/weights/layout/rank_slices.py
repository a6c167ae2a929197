"""Which part of each full tensor a local one holds: a reader that is one rank of several takes its slices alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import Shaped

T = TypeVar("T", bound=Shaped)

Piece = tuple[Sequence[int], int | None, Sequence[Sequence[int]]]
"""(shape of the full tensor, dimension along which it is cut, ranges [first, last) along it, end to end in the local
tensor); without a dimension: all of it. Lists do as well, as msgpack gives them."""


@dataclass(frozen=True)
class Part(Generic[T]):
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


def parts(tensors: Mapping[str, T], pieces: Mapping[str, Piece] | None, whose: str) -> dict[str, Part[T]]:
    """Each tensor with its piece, by name; one without a piece is whole.

    LayoutMismatch where a piece is of no tensor, does not lie in its full shape, or gives another shape."""
    pieces = pieces or {}
    for name in pieces.keys() - tensors.keys():
        raise LayoutMismatch(
            f"{whose} names a piece of a tensor that it does not have; found '{name}'; give pieces of its tensors alone"
        )
    return {name: _part(name, tensor, pieces.get(name), whose) for name, tensor in tensors.items()}


def _part(name: str, local: T, piece: Piece | None, whose: str) -> Part[T]:
    here = tuple(local.shape)
    if piece is None:
        return Part(local, here)
    shape, dim, runs = tuple(piece[0]), piece[1], tuple((first, last) for first, last in piece[2])
    expected = list(shape)
    if dim is not None:
        if not 0 <= dim < len(shape) or any(not 0 <= first <= last <= shape[dim] for first, last in runs):
            raise LayoutMismatch(
                f"{whose} holds a piece of '{name}' that does not lie in it; found {list(map(list, runs))} along "
                f"dimension {dim} of {list(shape)}; cut it anew"
            )
        expected[dim] = sum(last - first for first, last in runs)
    if list(here) != expected:
        raise LayoutMismatch(
            f"{whose} has another shape for its piece of '{name}'; found {list(here)}, but ranges "
            f"{list(map(list, runs))} along dimension {dim} of {list(shape)} make {expected}; cut it anew"
        )
    return Part(local, shape) if dim is None else Part(local, shape, dim, runs)
