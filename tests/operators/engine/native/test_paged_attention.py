"""Paged decode attention in C against float64: every layout, the same bits however rows are put
together.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from operators.engine.native.attention import decode_attention, kernel, serves
from operators.engine.pages import PAGE
from operators.models.folders import ModelError

pytestmark = pytest.mark.skipif(kernel() is None, reason="no C compiler at hand")


def case(sizes, prompts, lengths, *, heads, repeats, width, dtype=torch.float32, seed=0):
    """Runs of `sizes` rows whose prompts take so many tokens; a row is at prompt + its length -
    1.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    starts = torch.tensor(
        [prompt for size, prompt in zip(sizes, prompts, strict=True) for _ in range(size)]
    )
    positions = starts + torch.tensor(lengths) - 1
    most = int(positions.max()) // PAGE + 1
    order = torch.randperm(rows * most + 3, generator=generator)
    table = order[: rows * most].view(rows, most).clone()
    shared = torch.tensor([prompt // PAGE for prompt in prompts])
    runs = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    for i, pages in enumerate(shared):
        table[runs[i] : runs[i + 1], :pages] = table[runs[i], :pages].clone()

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    keys, values = (draw(len(order), heads, PAGE, width) for _ in range(2))
    packed = draw(rows, (repeats + 2) * heads, width).transpose(0, 1)
    query, key, value = packed.split([repeats * heads, heads, heads])
    layout = SimpleNamespace(
        positions=positions,
        longest=int(positions.max()) + 1,
        table=table.int(),
        runs=lambda: (runs.int(), shared.int()),
    )
    return SimpleNamespace(
        query=query, key=key, value=value, keys=keys, values=values, layout=layout
    )


def reference(made, scale, window, softcap):
    """The same in float64, a row at a time; fills the cache of `made` too."""
    out = []
    heads = made.keys.shape[1]
    for row, (position, pages) in enumerate(
        zip(made.layout.positions.tolist(), made.layout.table.tolist(), strict=True)
    ):
        made.keys[pages[position // PAGE], :, position % PAGE] = made.key[:, row]
        made.values[pages[position // PAGE], :, position % PAGE] = made.value[:, row]
        first = max(0, position + 1 - window) if window else 0
        k, v = (
            cache[pages].transpose(0, 1).flatten(1, 2)[:, first : position + 1].double()
            for cache in (made.keys, made.values)
        )
        q = made.query[:, row].double().view(heads, -1, made.query.shape[2])
        scores = q @ k.transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        out.append((torch.softmax(scores, -1) @ v).flatten(0, 1))
    return torch.stack(out)


def run(made, scale=0.3, window=None, softcap=None, **changes):
    layout = SimpleNamespace(**{**vars(made.layout), **changes})
    keys, values = made.keys.clone(), made.values.clone()
    out = decode_attention(
        kernel(), made.query, made.key, made.value, keys, values, layout, scale, window, softcap
    )
    return out, keys, values


def assert_right(made, tolerance=2e-6, **how):
    out, keys, values = run(made, **how)
    expected = reference(made, how.get("scale", 0.3), how.get("window"), how.get("softcap"))
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(keys, made.keys) and torch.equal(values, made.values)


@pytest.mark.parametrize("width", [4, 8, 16, 20, 32, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "repeats"), [(2, 1), (2, 2), (1, 4), (1, 8), (3, 7)])
def test_attention_equals_float64_for_every_width_and_ratio_of_heads(width, heads, repeats):
    made = case(
        [3, 1, 5],
        [37, 5, 16],
        [1, 2, 30, 11, 1, 16, 17, 4, 33],
        heads=heads,
        repeats=repeats,
        width=width,
    )
    assert_right(made, scale=width**-0.5)


@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 100, 1000])
def test_windows_may_begin_inside_shared_pages_and_scores_be_capped(window, softcap):
    made = case([4, 3], [70, 200], [1, 9, 40, 3, 1, 60, 20], heads=2, repeats=2, width=32)
    assert_right(made, window=window, softcap=softcap)


@pytest.mark.parametrize("prompt", [0, 1, 15, 16, 17, 31, 32, 33, 150, 500])
def test_positions_at_the_borders_of_pages(prompt):
    lengths = [1, 2, 15, 16, 17, 18, 31, 32, 33]
    assert_right(case([9], [prompt], lengths, heads=2, repeats=2, width=32))


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 70])
def test_any_number_of_siblings(rows):
    made = case([rows], [50], [1 + 7 * i % 40 for i in range(rows)], heads=2, repeats=4, width=16)
    assert_right(made)


@pytest.mark.parametrize("width", [8, 32, 80])
def test_bfloat16_is_summed_in_float32(width):
    made = case(
        [3, 2], [40, 20], [1, 20, 5, 3, 40], heads=2, repeats=2, width=width, dtype=torch.bfloat16
    )
    out, _, _ = run(made)
    assert out.dtype == torch.bfloat16
    assert_right(made, tolerance=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("repeats", [1, 2, 8])
def test_a_row_has_the_same_bits_alone_with_siblings_and_on_any_number_of_threads(
    repeats, window, dtype
):
    lengths = [1 + 7 * i % 60 for i in range(24)]
    made = case([8, 11, 5], [100, 40, 17], lengths, heads=2, repeats=repeats, width=64, dtype=dtype)
    together, _, _ = run(made, window=window)
    apart, _, _ = run(made, window=window, runs=None)
    assert torch.equal(together, apart)
    torch.set_num_threads(3)
    try:
        threaded, _, _ = run(made, window=window)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, threaded)
    for row in (0, 9, 23):
        alone = SimpleNamespace(
            **{
                **vars(made),
                **{k: getattr(made, k)[:, row : row + 1] for k in ("query", "key", "value")},
            }
        )
        layout = {
            "positions": made.layout.positions[row : row + 1],
            "table": made.layout.table[row : row + 1],
        }
        one, _, _ = run(alone, window=window, runs=None, **layout)
        assert torch.equal(one[0], together[row])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_numbers_stay_with_the_rows_that_attend_to_them(broken):
    made = case([3], [16], [5, 20, 9], heads=2, repeats=2, width=32)
    table = made.layout.table
    made.keys[table[1, 1], 0, 2] = broken
    made.values[table[0, 1], :, 5:] = broken
    made.keys[table[2, 1], :, 9:] = broken
    out, _, _ = run(made)
    assert out.isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_what_the_kernel_cannot_take_is_refused():
    made = case([2], [5], [3, 4], heads=2, repeats=2, width=8)
    made.value = made.value[:, :, :4]
    with pytest.raises(ModelError, match="one width and type"):
        run(made)
    made = case([2], [5], [3, 4], heads=2, repeats=2, width=8)
    made.query = made.query.double()
    with pytest.raises(ModelError, match="float64"):
        run(made)


def test_models_of_one_type_are_served():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert serves(model) and serves(model.to(torch.bfloat16))
    model[0].to(torch.float32)
    assert not serves(model) and not serves(model.to(torch.float16))
