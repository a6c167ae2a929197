"""The C kernel and torch's operators attend alike; what does not fit is refused."""

import math

import numpy as np
import pytest
import torch

from dataflow.errors import RunError
from operators.engine import native
from operators.engine.attention import Layout, attend
from operators.engine.decode import Engine, Start
from operators.engine.kv_cache import KVCache
from operators.engine.proof import adapt
from operators.engine.sampler import Sampling
from operators.models import ModelError

needs_compiler = pytest.mark.skipif(native.kernel() is None, reason="no C compiler at hand")


class Layer(torch.nn.Module):
    layer_idx = 0


def filled(slots, heads, tokens, width, order):
    cache = KVCache(slots, tokens, tokens)
    torch.manual_seed(1)
    keys, values = cache.layer(0, torch.zeros(1, heads, 1, width), torch.zeros(1, heads, 1, width))
    keys[order] = torch.randn(keys.shape)
    values[order] = torch.randn(values.shape)
    return cache


@needs_compiler
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("width", [4, 32, 80])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (3, 30.0)])
def test_both_ways_of_attention_agree(heads, width, window, softcap):
    rows, tokens = 9, 21
    torch.manual_seed(0)
    query = torch.randn(1, rows, 8, width).transpose(1, 2)
    key, value = (torch.randn(1, rows, heads, width).transpose(1, 2) for _ in range(2))
    positions = torch.tensor([0, 20, 3, 7, 7, 19, 1, 11, 5])
    found = []
    for kernel, order in ((None, torch.arange(rows)), (native.kernel(), torch.randperm(rows))):
        cache = filled(rows, heads, tokens, width, order)
        layout = Layout(cache, positions, 21, None, kernel, order)
        out, _ = attend(
            Layer(), query, key, value, None, 0.3, sliding_window=window, softcap=softcap, slot_layout=layout
        )
        keys, values = cache.layer(0, key, value)
        found.append((out, keys[order], values[order]))
    for by_torch, by_c in zip(*found, strict=True):
        torch.testing.assert_close(by_c, by_torch, atol=2e-6, rtol=1e-5)


@needs_compiler
def test_broken_numbers_show_in_the_output_of_the_row_that_has_them():
    order = torch.arange(3)
    for value in (math.nan, math.inf):
        cache = filled(3, 2, 8, 4, order)
        keys, _ = cache.layer(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
        keys[1, 0, 2] = value
        layout = Layout(cache, torch.tensor([5, 5, 5]), 6, None, native.kernel(), order)
        new = torch.ones(1, 2, 3, 4)
        out, _ = attend(Layer(), new, new, new, None, slot_layout=layout)
        assert out[0].isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_attention_of_a_kind_that_is_not_known_is_refused():
    new = torch.ones(1, 2, 1, 4)
    layout = Layout(filled(1, 2, 8, 4, torch.arange(1)), torch.tensor([0]), 1)
    with pytest.raises(ModelError, match="s_aux"):
        attend(Layer(), new, new, new, None, slot_layout=layout, s_aux=torch.ones(2))
    with pytest.raises(ModelError, match="no slots"):
        attend(Layer(), new, new, new, None)


def test_a_cache_that_does_not_fit_names_the_knobs_that_make_it_smaller():
    cache = KVCache(2**20, 2**18, 2**18)
    with pytest.raises(RunError, match=r"does not fit.*slots.*max_tokens"):
        cache.layer(0, torch.zeros(1, 64, 1, 64), torch.zeros(1, 64, 1, 64))


def test_weights_in_bfloat16_decode_with_torch_and_keep_float32_logprobs(make_model):
    model = make_model().to(torch.bfloat16)
    assert adapt(model, "small") is None
    engine = Engine(model, slots=4, context_tokens=32, sampling=Sampling(), end_tokens=[])
    start = Start(prompt=np.array([4, 5, 6]), limit=20, tickets=range(4), seeds=range(4))
    finished = engine.step([start])
    while finished is None:
        finished = engine.step()
    assert finished.logprobs.dtype == np.float32 and np.isfinite(finished.logprobs).all()
    with torch.no_grad():
        ids = torch.tensor(finished.tokens.astype(np.int64))
        logprobs = make_model()(ids).logits[:, 2:-1].log_softmax(-1).gather(2, ids[:, 3:, None])[..., 0]
    assert np.abs(finished.logprobs[:, 3:] - logprobs.numpy()).max() < 0.5
