"""A layout puts every tensor in its own aligned place, and two layouts are compared by name."""

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transport.weights import FlatLayout, LayoutMismatch, MessageError, TensorSpec
from transport.weights.layout.flat import ALIGNMENT, ITEM_BYTES

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


entries = st.lists(
    st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), min_size=1, max_size=12
).map(lambda found: [(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(found)])


@given(entries)
def test_tensors_are_aligned_and_never_overlap(found):
    layout = FlatLayout.build(found)
    end = 0
    for spec, (name, shape, dtype) in zip(layout.tensors, found, strict=True):
        assert (spec.name, spec.shape, spec.dtype) == (name, shape, dtype)
        assert spec.offset >= end
        assert spec.offset % ALIGNMENT == 0
        end = spec.offset + spec.nbytes
    assert end <= layout.nbytes < end + 2 * ALIGNMENT
    assert layout.nbytes % ALIGNMENT == 0


@given(entries)
def test_a_layout_survives_the_wire(found):
    layout = FlatLayout.build(found, aliases={"tied": "t0"})
    assert FlatLayout.from_plain(msgpack.unpackb(msgpack.packb(layout.to_plain()))) == layout


@given(entries, st.data())
def test_a_damaged_layout_is_refused(found, data):
    plain = FlatLayout.build(found).to_plain()
    victim = data.draw(st.sampled_from(plain["tensors"]))
    victim[3] = data.draw(st.sampled_from([-ALIGNMENT, 1, "x", None]))
    with pytest.raises((LayoutMismatch, MessageError)):
        FlatLayout.from_plain(plain)


@pytest.mark.parametrize(
    "plain", [None, 3, [], {}, {"tensors": [[1]]}, {"tensors": []}, {"tensors": 1}]
)
def test_what_is_no_layout_is_refused(plain):
    with pytest.raises((MessageError, LayoutMismatch)):
        FlatLayout.from_plain(plain)


def test_only_floating_tensors_are_cast():
    layout = FlatLayout.of(
        {"w": torch.zeros(3), "n": torch.zeros(3, dtype=torch.int64)}, dtype="bfloat16"
    )
    assert [spec.dtype for spec in layout.tensors] == ["bfloat16", "int64"]


def test_a_dtype_that_cannot_travel_is_refused():
    with pytest.raises(LayoutMismatch, match=r"'w' has a dtype.*found complex64; cast it"):
        FlatLayout.of({"w": torch.zeros(3, dtype=torch.complex64)})


def test_tensors_that_share_memory_only_in_part_are_not_tied():
    base = torch.zeros(8)
    assert (
        len(FlatLayout.of({"all": base, "half": base[:4], "turned": base.view(2, 4).t()}).tensors)
        == 3
    )


def test_empty_tensors_are_never_tied():
    assert FlatLayout.of({"a": torch.zeros(0), "b": torch.zeros(0)}).aliases == {}


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(LayoutMismatch, match="'a' twice"):
        FlatLayout.build([("a", (2,), "float32"), ("a", (2,), "float32")])


def test_overlapping_tensors_are_refused():
    specs = tuple(
        TensorSpec(name=n, shape=(40,), dtype="float32", offset=o) for n, o in [("a", 0), ("b", 64)]
    )
    with pytest.raises(LayoutMismatch, match="'b' does not fit"):
        FlatLayout(tensors=specs)


def test_an_alias_must_name_a_tensor():
    with pytest.raises(LayoutMismatch, match="alias 'x'"):
        FlatLayout.build([("a", (2,), "float32")], aliases={"x": "nowhere"})


def test_a_layout_of_a_hundred_thousand_tensors_takes_no_torch():
    layout = FlatLayout.build((f"t{n}", (4096, 4096), "bfloat16") for n in range(100_000))
    assert layout.nbytes == 100_000 * 4096 * 4096 * 2
