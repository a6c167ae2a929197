"""What is cut, without a second process."""

from __future__ import annotations

import torch

from operators.engine.parallel.shards import TensorSlice


def test_a_piece_of_several_ranges_puts_them_end_to_end():
    full = torch.arange(12).view(2, 6)
    assert TensorSlice(1, ((0, 2), (4, 5))).of(full).tolist() == [[0, 1, 4], [6, 7, 10]]
    assert TensorSlice(None).of(full) is full


def test_a_piece_of_one_range_is_a_view():
    full = torch.arange(12).view(6, 2)
    assert TensorSlice(0, ((2, 4),)).of(full).data_ptr() == full[2].data_ptr()
