"""Which part of a tensor a rank takes, from what a loader does to it, against real tensors."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from operators.engine.vllm.landing import (
    box_of,
    local_shape,
    part,
    slice_of,
    slices_of,
    view_of,
)
from operators.models.folders import ModelError


@st.composite
def looked_at(draw):
    """A shape, and operations of loaders on a tensor of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    current, operations = list(shape), []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("narrow", "choose", "unsqueeze", "chunk", "unbind")))
        if not current:
            break
        dim = draw(st.integers(0, len(current) - 1))
        if kind == "narrow":
            first = draw(st.integers(0, current[dim] - 1))
            length = draw(st.integers(1, current[dim] - first))
            operations.append(("narrow", (dim, first, length), ()))
            current[dim] = length
        elif kind == "choose":
            operations.append(("__getitem__", (draw(st.integers(0, current[0] - 1)),), ()))
            del current[0]
        elif kind == "unsqueeze":
            operations.append(("unsqueeze", (0,), ()))
            current.insert(0, 1)
        elif kind == "unbind":
            at = draw(st.integers(0, current[0] - 1))
            operations += [("unbind", (), ()), ("__getitem__", (at,), ())]
            del current[0]
        elif current[dim] % 2 == 0:
            operations += [
                ("chunk", (2,), (("dim", dim),)),
                ("__getitem__", (draw(st.integers(0, 1)),), ()),
            ]
            current[dim] //= 2
    return shape, operations


@given(st.lists(looked_at(), min_size=1, max_size=3))
def test_the_slice_of_a_rank_has_what_its_loaders_copy(looks):
    shape = looks[0][0]
    views = [operations for of, operations in looks if of == shape]
    full = torch.arange(prod(shape)).view(shape)
    boxes = [box_of(shape, operations) for operations in views]
    piece = slice_of(shape, boxes)
    _, dim, runs = piece
    held = (
        full
        if dim is None
        else torch.cat([full.narrow(dim, first, last - first) for first, last in runs], dim)
    )
    assert tuple(held.shape) == local_shape(piece)
    for operations, box in zip(views, boxes, strict=True):
        expected = view_of(full, operations)
        assert part(held, piece, box).reshape(expected.shape).equal(expected)


def test_a_slice_has_no_more_than_its_boxes_along_the_dimension_that_saves_most():
    column, rows = ((0, 8), (2, 4)), ((0, 2), (0, 4))
    assert slice_of((8, 4), [column]) == ((8, 4), 1, ((2, 4),))
    assert slice_of((8, 4), [rows, ((6, 8), (0, 4))]) == ((8, 4), 0, ((0, 2), (6, 8)))
    assert slice_of((8, 4), [((0, 2), (0, 1))]) == ((8, 4), 0, ((0, 2),))
    assert slice_of((8, 4), [rows, ((2, 8), (0, 4))]) == ((8, 4), None, ())


@pytest.mark.parametrize(
    "operations",
    [
        [("t", (), ()), ("reshape", (-1,), ())],
        [("view", (2, 2, 6), ()), ("narrow", (1, 1, 1), ())],
        [("__getitem__", (slice(None, None, 2),), ())],
    ],
)
def test_what_is_no_box_of_a_tensor_is_refused(operations):
    with pytest.raises(ModelError, match=r"no box of it.*engine=\"native\""):
        box_of((4, 6), operations)


def test_a_tensor_of_which_a_rank_takes_nothing_is_one_row():
    """Every rank of a reader names every tensor of its layout."""
    shapes = {"a": (4, 3), "b": (2,), "c": ()}
    assert slices_of(shapes, {"b": [((0, 2),)]}) == {
        "a": ((4, 3), 0, ((0, 1),)),
        "b": ((2,), None, ()),
        "c": ((), None, ()),
    }
