"""A delta turns its base into the newer buffer bit for bit, stands on nothing else, and is sent
only where it pays.
"""

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transport.native.differences as native
from transport.errors import MessageError
from transport.native import wordsum
from transport.weights.errors import ChecksumMismatch, WeightError
from transport.weights.sharded.delta import (
    BLOCK,
    PROVED,
    RUN,
    WORD,
    Delta,
    apply_delta,
    diff,
    most_bytes,
)


@pytest.fixture(autouse=True, scope="module", params=["compiled", "torch"])
def kernels(request):
    """Both implementations of the comparison."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "built", lambda source: None)
        elif native.built("delta.c") is None:
            pytest.skip("no C compiler")
        yield


FULL = 200_000
"""Bytes of a buffer of more than one page that ends within a block, though not within a word."""


def buffer(nbytes, seed=0):
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def changed(old, places):
    new = old.clone()
    new[places] ^= 0x81
    return new


def applied(delta, old):
    result = old.clone()
    apply_delta(result, Delta.from_bytes(delta.to_bytes()))
    return result


edits = st.tuples(
    st.integers(0, 3000), st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 700)), max_size=6)
)


@given(edits)
def test_any_edit_arrives_bit_for_bit(edit):
    nbytes, ranges = edit
    old = buffer(nbytes)
    new = old.clone()
    for start, length in ranges:
        new[start : start + length] ^= 0x42
    delta = diff(old, new, base=7)
    assert torch.equal(applied(delta, old), new)
    assert delta.size == len(delta.to_bytes()) <= nbytes + nbytes // 64 + 64


@given(st.lists(st.integers(0, FULL - 1), max_size=40), st.integers(0, 9))
def test_scattered_bytes_of_a_large_buffer_arrive_bit_for_bit(places, less):
    old = buffer(FULL - less)
    new = changed(old, [place for place in places if place < len(old)])
    delta = diff(old, new, base=7)
    assert torch.equal(applied(delta, old), new)
    assert delta.size <= 56 + 8 + 4 * len(places) + (FULL - less) % 2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8], ids=str
)
def test_tensors_of_every_width_arrive_with_their_zeros_infinities_and_nans(dtype):
    old = torch.tensor([0.0, 1.0, 2.0, 3.0] * 300).to(dtype)
    odd = [-0.0, 7.0, 9.0] if dtype is torch.int8 else [-0.0, float("nan"), float("inf")]
    new = old.clone()
    new[[3, 500, 1000]] = torch.tensor(odd).to(dtype)
    delta = diff(old.view(torch.uint8), new.view(torch.uint8), base=1)
    assert torch.equal(applied(delta, old.view(torch.uint8)), new.view(torch.uint8))


def test_nothing_changed_is_a_delta_of_a_few_bytes():
    old = buffer(FULL)
    delta = diff(old, old.clone(), base=1)
    assert delta.size < 100
    assert torch.equal(applied(delta, old), old)


def test_everything_changed_is_no_larger_than_the_buffer_and_a_bit_per_run():
    old = buffer(FULL)
    delta = diff(old, old ^ 0xFF, base=1)
    assert delta.size <= FULL + FULL // RUN // 8 + 64
    assert torch.equal(applied(delta, old), old ^ 0xFF)


@pytest.mark.parametrize(
    ("unit", "places"),
    [
        (WORD, range(0, FULL, 5000)),
        (
            BLOCK,
            [n for block in range(0, FULL, 1024) for n in range(block, min(block + BLOCK, FULL))],
        ),
        (RUN, range(RUN * 20, RUN * 200)),
    ],
    ids=["words", "blocks", "runs"],
)
def test_the_unit_is_the_one_that_makes_the_delta_smallest(unit, places):
    old = buffer(FULL)
    new = changed(old, list(places))
    delta = diff(old, new, base=1)
    assert delta.unit == unit
    assert torch.equal(applied(delta, old), new)


def test_a_delta_names_its_base_and_proves_its_result():
    old = buffer(FULL)
    new = changed(old, [4, 5])
    delta = Delta.from_bytes(diff(old, new, base=41).to_bytes())
    assert (delta.base, delta.base_sum, delta.result) == (41, wordsum(old), wordsum(new))


def test_a_wrong_base_is_refused_and_stays_as_it_was():
    old = buffer(FULL)
    delta = diff(old, changed(old, [9]), base=3)
    for wrong in (changed(old, [100_000]), changed(old, [9]), old[:-8].clone()):
        before = wrong.clone()
        with pytest.raises(WeightError, match="not version 3 of 200000 bytes; ask the writer"):
            apply_delta(wrong, delta)
        assert torch.equal(wrong, before)


def test_a_result_that_is_not_what_was_sent_is_found():
    old = buffer(FULL)
    delta = diff(old, changed(old, [9]), base=3)
    with pytest.raises(ChecksumMismatch, match="after a delta on version 3"):
        apply_delta(old, replace(delta, values=delta.values ^ 1))


@given(st.data())
def test_a_flipped_bit_or_a_lost_end_is_refused(data):
    old = buffer(2000)
    message = diff(old, changed(old, [3, 700, 701]), base=3).to_bytes()
    flipped = message.clone()
    flipped[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    for damaged in (flipped, cut, torch.cat([message, message[:8]])):
        with pytest.raises(MessageError, match="a delta cannot be read"):
            Delta.from_bytes(damaged)


@given(st.data())
def test_a_message_that_contradicts_itself_is_refused_before_it_is_applied(data):
    old = buffer(2000)
    message = diff(old, changed(old, [3, 700, 701]), base=3).to_bytes()
    field = data.draw(st.sampled_from(["unit", "nbytes", "count", "order", "place"]))
    at, kind, value = {
        "unit": (16, "<Q", data.draw(st.integers(0, 1 << 63).filter(lambda unit: unit != WORD))),
        "nbytes": (48, "<Q", data.draw(st.integers(0, 701) | st.integers(1 << 18, 1 << 63))),
        "count": (
            56,
            "<i",
            data.draw(st.integers(-(1 << 31), (1 << 31) - 1).filter(lambda count: count != 2)),
        ),
        "order": (60, "<2H", (350, 1)),
        "place": (62, "<H", data.draw(st.integers(1000, 65535))),
    }[field]
    packed = struct.pack(kind, *(value if isinstance(value, tuple) else (value,)))
    message[at : at + len(packed)] = torch.tensor(list(packed), dtype=torch.uint8)
    message[8:PROVED] = torch.tensor(
        list(struct.pack("<Q", wordsum(message[PROVED:]))), dtype=torch.uint8
    )
    with pytest.raises(MessageError, match="a delta cannot be read"):
        Delta.from_bytes(message)


@pytest.mark.parametrize(
    "message", [torch.zeros(0, dtype=torch.uint8), torch.zeros(100), torch.zeros(9, 9).byte()]
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(MessageError):
        Delta.from_bytes(message)


@given(st.integers(0, 300_000), st.lists(st.integers(0, 299_999), max_size=30), st.integers(0, 40))
def test_both_implementations_find_the_same_differences(nbytes, places, most):
    old = buffer(nbytes)
    new = changed(old, [place for place in places if place < nbytes])
    found, expected = native.differences(old, new, most), native._by_torch(old, new, most)
    for part in ("blocks", "counts", "lows", "values"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_versions_of_two_layouts_have_no_delta():
    with pytest.raises(WeightError, match="buffers of 64 and 128 bytes"):
        diff(buffer(64), buffer(128), base=1)


def test_a_message_may_lie_anywhere_in_memory():
    old = buffer(FULL)
    new = changed(old, [9, 70_001])
    message = diff(old, new, base=3).to_bytes()
    for shift in range(1, 9):
        shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), message])[shift:]
        result = old.clone()
        apply_delta(result, Delta.from_bytes(shifted))
        assert torch.equal(result, new)


@given(st.integers(1, 1 << 40), st.floats(1e6, 1e12), st.floats(1e6, 1e12))
def test_a_delta_below_the_limit_is_cheaper_and_one_above_is_not(nbytes, link, scan):
    limit, full = most_bytes(nbytes, link, scan), nbytes / link
    assert nbytes / scan + (limit + 2) / link > full * (1 - 1e-9)
    if limit:
        assert nbytes / scan + (limit - 1) / link < full * (1 + 1e-9)


def test_few_changes_are_a_delta_on_a_slow_link_and_full_on_a_fast_one():
    old = buffer(FULL)
    new = changed(old, list(range(0, FULL, 200)))
    delta = diff(old, new, base=1, limit=most_bytes(FULL, 1e8, 1e9))
    assert delta.size < FULL / 40
    assert torch.equal(applied(delta, old), new)
    assert diff(old, new, base=1, limit=most_bytes(FULL, 2e9, 1e9)) is None


def test_many_changes_are_sent_in_full_over_any_link():
    old = buffer(FULL)
    assert diff(old, old ^ 0xFF, base=1, limit=most_bytes(FULL, 1.0, 1e9)) is None


def test_a_delta_is_sent_up_to_the_size_at_which_it_pays_and_no_further():
    old = buffer(FULL)
    new = changed(old, list(range(0, FULL, 200)))
    size = diff(old, new, base=1).size
    assert diff(old, new, base=1, limit=size) is None
    assert diff(old, new, base=1, limit=size + 1).size == size
