"""Which part of each full tensor a rank of vLLM takes: from what its own loaders did to stand-ins,
so that no family of models needs a table. No vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from operators.models.folders import ModelError

Operation = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""A method of a tensor that returns a view (or several), with its arguments."""
Piece = tuple[tuple[int, ...], int | None, tuple[tuple[int, int], ...]]
"""What a rank holds of a full tensor: its shape, the dimension along which it is cut (None: it is
the whole), and ranges along that, end to end in the rank's tensor."""
Box = tuple[tuple[int, int], ...]
"""First and last (exclusive) along each dimension of a full tensor."""


def view_of(tensor: torch.Tensor, operations: Iterable[Operation]) -> torch.Tensor:
    """What a loader saw of a tensor after these operations."""
    view: Any = tensor
    for name, arguments, named in operations:
        view = getattr(view, name)(*arguments, **dict(named))
    assert isinstance(view, torch.Tensor), "several views are followed by the choice of one"
    return view


def box_of(shape: tuple[int, ...], operations: Sequence[Operation]) -> Box:
    """The part of a full tensor that a view of it covers. ModelError where that is no box, as of
    every second row.

    >>> box_of((6, 4), [("narrow", (0, 2, 3), ())])
    ((2, 5), (0, 4))
    >>> box_of((8, 6, 4), [("__getitem__", (5,), ()), ("narrow", (1, 2, 2), ())])
    ((5, 6), (0, 6), (2, 4))
    """
    full = torch.empty(shape, device="meta")
    view = view_of(full, operations)
    long = [dim for dim, size in enumerate(shape) if size > 1]
    starts, sizes, rest = [0] * len(shape), [1] * len(shape), int(view.storage_offset())
    for dim in long:
        starts[dim], rest = divmod(rest, full.stride(dim))
    spans = [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1]
    by_step = {full.stride(dim): dim for dim in long}
    for size, step in spans:
        dim = by_step.get(step, -1)
        if dim < 0 or sizes[dim] > 1 or starts[dim] + size > shape[dim]:
            raise ModelError(
                f"vLLM takes a part of a weight of shape {list(shape)} that is no box of it; found"
                f' steps {list(view.stride())} of sizes {list(view.shape)}; use engine="native"'
            )
        sizes[dim] = size
    return tuple((first, first + size) for first, size in zip(starts, sizes, strict=True))


def slice_of(shape: tuple[int, ...], boxes: Iterable[Box]) -> Piece:
    """The least slice along one dimension that has all of these boxes: shape, dimension (None: it
    is the whole), and ranges along it.

    >>> slice_of((8, 4), [((0, 2), (0, 4)), ((6, 8), (0, 4))])
    ((8, 4), 0, ((0, 2), (6, 8)))
    >>> slice_of((8, 4), [((0, 8), (0, 4))])
    ((8, 4), None, ())
    """
    boxes = set(boxes)
    best: tuple[int, int | None, tuple[tuple[int, int], ...]] = (prod(shape), None, ())
    for dim, size in enumerate(shape):
        runs = _merged({box[dim] for box in boxes})
        share = sum(last - first for first, last in runs) * prod(shape) // max(1, size)
        if share < best[0]:
            best = (share, dim, runs)
    return shape, best[1], best[2]


def local_shape(piece: Piece) -> tuple[int, ...]:
    """Of the tensor that holds a slice.

    >>> local_shape(((8, 4), 0, ((0, 2), (6, 8))))
    (4, 4)
    """
    shape, dim, runs = piece
    if dim is None:
        return tuple(shape)
    length = sum(last - first for first, last in runs)
    return (*shape[:dim], length, *shape[dim + 1 :])


def part(local: torch.Tensor, piece: Piece, box: Box) -> torch.Tensor:
    """A box of a full tensor, as a view of the slice of it that has the box."""
    _, cut, runs = piece
    for dim, (first, last) in enumerate(box):
        at = first
        if dim == cut:
            before = 0
            for begin, end in runs:
                if begin <= first and last <= end:
                    at = before + first - begin
                    break
                before += end - begin
            else:
                raise AssertionError(f"the slice has no {box}")
        local = local.narrow(dim, at, last - first)
    return local


def slices_of(
    shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Iterable[Box]]
) -> dict[str, Piece]:
    """By name, the slice of each tensor that a rank takes; of one of which it takes nothing, the
    first element along the first dimension, as every rank holds every tensor.
    """
    nothing: Box
    slices = {}
    for name, shape in shapes.items():
        nothing = ((0, 1), *((0, size) for size in shape[1:])) if shape else ()
        slices[name] = slice_of(shape, boxes.get(name) or [nothing])
    return slices


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return tuple(runs)
