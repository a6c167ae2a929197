"""The Triton kernel attends as a float64 reference does, whatever the shapes, and writes where it
should.
"""

import math

import numpy as np
import pytest
import torch

from operators.engine.attention import AttentionLayout, KVCache, write_newest
from operators.engine.pages import PAGE
from operators.models.folders import ModelError

pytest.importorskip("triton")

from operators.engine.cuda import paged_attention as module
from operators.engine.cuda.paged_attention import Chip, Tiles, fitted, paged_attention, splits

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(
    device,
    *,
    heads,
    kv_heads,
    width,
    value_width=None,
    positions,
    dtype=torch.float32,
    slack=1,
    seed=0,
):
    """Query, new key and value, and a layout over a cache whose unused places hold nothing that may
    be read.
    """
    rows, value_width = len(positions), value_width or width
    wide = max(positions) // PAGE + 1 + slack
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows * wide)
    cache = KVCache(rows * wide)
    made = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=made).to(device, dtype)

    keys, values = cache.layer(
        0, numbers(1, kv_heads, 1, width), numbers(1, kv_heads, 1, value_width)
    )
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    table = torch.from_numpy(order.reshape(rows, wide).astype(np.int32)).to(device)
    for row, position in enumerate(positions):
        for at in range(position):
            page = int(table[row, at // PAGE])
            keys[page, :, at % PAGE] = numbers(kv_heads, width)
            values[page, :, at % PAGE] = numbers(kv_heads, value_width)
    at = torch.tensor(positions, device=device)
    layout = AttentionLayout(cache, at, max(positions) + 1, table)
    query = numbers(1, rows, heads, width).transpose(1, 2)[0]
    key, value = (numbers(rows, kv_heads, size).transpose(0, 1) for size in (width, value_width))
    return query, key, value, keys, values, layout


def reference(query, key, value, keys, values, layout, scale, window, softcap):
    """The same in float64, row by row, without writing: [n, H, E]."""
    heads, rows, _ = query.shape
    found = []
    for row in range(rows):
        position = int(layout.positions[row])
        begin = 0 if window is None else max(0, position - window + 1)
        at = torch.arange(begin, position, device=query.device)
        page = layout.table[row].long()[at // PAGE]
        k = torch.cat([keys[page, :, at % PAGE], key[None, :, row]]).double()
        v = torch.cat([values[page, :, at % PAGE], value[None, :, row]]).double()
        k, v = (side.repeat_interleave(heads // side.shape[1], 1) for side in (k, v))
        scores = torch.einsum("hd,thd->ht", query[:, row].double(), k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
    return torch.stack(found)


def check(
    device, dtype=torch.float32, *, scale=0.3, window=None, softcap=None, tiles=Tiles(), **shape
):
    given = case(device, dtype=dtype, **shape)
    expected = reference(*given, scale, window, softcap)
    found = paged_attention(*given, scale, window, softcap, tiles=tiles)
    assert found.shape == expected.shape and found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], error
    _, key, value, keys, values, layout = given
    for row, position in enumerate(layout.positions.tolist()):
        page = int(layout.table[row, position // PAGE])
        assert torch.equal(keys[page, :, position % PAGE], key[:, row])
        assert torch.equal(values[page, :, position % PAGE], value[:, row])
    written = (~keys.isnan()).all(-1).all(1).sum()
    assert written == sum(position + 1 for position in layout.positions.tolist())


LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 130, 200]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (14, 2), (16, 8), (32, 1)])
def test_groups_of_queries_attend_like_the_reference(device, heads, kv_heads):
    check(device, heads=heads, kv_heads=kv_heads, width=32, positions=LENGTHS)


@pytest.mark.parametrize(
    ("width", "value_width"), [(4, 4), (16, 16), (64, 64), (80, 80), (128, 128), (24, 40)]
)
def test_heads_of_any_width_attend_like_the_reference(device, width, value_width):
    check(
        device,
        heads=4,
        kv_heads=2,
        width=width,
        value_width=value_width,
        positions=[0, 33, 100, 16],
    )


@pytest.mark.parametrize("window", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
def test_windows_and_caps_are_those_of_the_reference(device, window, softcap):
    check(device, heads=4, kv_heads=2, width=16, positions=LENGTHS, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_attends_within_its_rounding(device, dtype):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no bfloat16, and there is no GPU")
    check(device, dtype, heads=8, kv_heads=2, width=64, positions=LENGTHS, scale=0.125)


@pytest.mark.parametrize("processors", [1, 4, 1000])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_the_split_of_a_row_does_not_change_its_result(device, monkeypatch, processors, block):
    monkeypatch.setattr(module, "chip", lambda _: Chip(processors))
    check(
        device, heads=4, kv_heads=2, width=16, positions=[*LENGTHS, 300], tiles=Tiles(block=block)
    )
    check(
        device,
        heads=4,
        kv_heads=2,
        width=16,
        positions=[*LENGTHS, 300],
        tiles=Tiles(block=block),
        window=70,
    )


def test_a_table_wider_than_any_row_changes_nothing(device):
    check(device, heads=4, kv_heads=2, width=16, positions=[3, 40], slack=300)


def test_rows_that_are_tokens_of_one_sequence_attend_to_those_before_them(device):
    query, key, value, keys, values, layout = case(
        device, heads=4, kv_heads=2, width=16, positions=[14, 15, 16, 17, 40]
    )
    layout.table[1:4] = layout.table[0]
    write_newest(layout, keys, values, key, value)
    expected = reference(query, key, value, keys, values, layout, 0.3, None, None)
    found = paged_attention(query, key, value, keys, values, layout, 0.3, None, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_rows_that_only_fill_up_the_batch_leave_the_others_as_they_are(device):
    query, key, value, keys, values, layout = case(
        device, heads=4, kv_heads=2, width=16, positions=[20, 50, 0, 0]
    )
    expected = reference(query, key, value, keys, values, layout, 0.3, None, None)
    layout.table[2:] = layout.cache.scratch
    found = paged_attention(query, key, value, keys, values, layout, 0.3, None, None)
    torch.testing.assert_close(found[:2].double(), expected[:2], atol=1e-6, rtol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_numbers_show_in_the_output_of_the_row_that_has_them(device, monkeypatch, bad):
    monkeypatch.setattr(module, "chip", lambda _: Chip(4))
    given = case(device, heads=2, kv_heads=2, width=16, positions=[100, 100, 100])
    layout, keys = given[5], given[3]
    keys[int(layout.table[1, 4]), :, 2] = bad
    found = paged_attention(*given, 0.3, None, None)
    assert found.isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_numbers_of_unlike_types_are_refused(device):
    query, key, value, keys, values, layout = case(
        device, heads=2, kv_heads=2, width=16, positions=[3]
    )
    with pytest.raises(ModelError, match=r"all alike.*torch's operators"):
        paged_attention(query.bfloat16(), key, value, keys, values, layout, 0.3, None, None)


def test_few_or_long_rows_are_split_and_many_short_ones_are_not():
    assert splits(1, 2, 16, 132) == 1
    assert splits(1, 2, 4096, 132) == 64
    assert splits(256, 8, 1224, 132) == 2
    assert splits(2000, 8, 1024, 132) == 1
    assert splits(2000, 8, 32768, 132) == 32


@pytest.mark.parametrize("width", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kib", [227, 163, 99, 48])
def test_trips_are_as_short_as_wide_heads_and_small_chips_need(width, size, kib):
    tiles = fitted(Tiles(), 2 * width * size, kib * 1024)
    assert tiles.block >= 16 and tiles.stages >= 1
    assert tiles.stages * tiles.block * 2 * width * size <= kib * 1024 or (
        tiles.block,
        tiles.stages,
    ) == (16, 1)
    assert tiles == Tiles() or 3 * 128 * 2 * width * size > (kib - 16) * 1024
