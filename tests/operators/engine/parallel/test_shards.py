"""What is cut, and what is refused, without a second process."""

from __future__ import annotations

import pytest
import torch
import transformers

from operators.engine.parallel.shards import TensorSlice, check_divides
from operators.models.errors import ModelError


def test_a_piece_of_several_ranges_puts_them_end_to_end():
    full = torch.arange(12).view(2, 6)
    assert TensorSlice(1, ((0, 2), (4, 5))).of(full).tolist() == [[0, 1, 4], [6, 7, 10]]
    assert TensorSlice(None).of(full) is full


def test_a_piece_of_one_range_is_a_view():
    full = torch.arange(12).view(6, 2)
    assert TensorSlice(0, ((2, 4),)).of(full).data_ptr() == full[2].data_ptr()


def test_ranks_that_do_not_divide_the_heads_are_refused(make_model):
    model = make_model("llama", num_attention_heads=4, num_key_value_heads=2)
    check_divides(model, 2, "tiny")
    with pytest.raises(ModelError, match=r"4 attention heads and 2 key/value heads.*tensor_parallel=1 or 2"):
        check_divides(model, 4, "tiny")


def test_a_family_without_a_plan_is_refused():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    with pytest.raises(ModelError, match=r"no tensor-parallel plan for GPT2LMHeadModel.*tensor_parallel=1"):
        check_divides(transformers.GPT2LMHeadModel(config), 2, "tiny")
