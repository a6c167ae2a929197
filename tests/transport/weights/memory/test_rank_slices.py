"""A rank takes its slices of a version straight from the segment, and its companions take theirs of
the same one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport.weights import (
    FlatLayout,
    Hub,
    LayoutMismatch,
    SharedMemory,
    WeightError,
    WeightReader,
    WeightWriter,
    memory,
)
from transport.weights.reader import RankReader

from ..conftest import values

pytestmark = pytest.mark.usefixtures("forked")


SHAPES = {"rows": (8, 6), "columns": (8, 6), "fused": (8, 6), "whole": (6,)}


PIECES = {
    "rows": ((8, 6), 0, ((4, 8),)),
    "columns": ((8, 6), 1, ((3, 6),)),
    "fused": ((8, 6), 0, ((2, 4), (6, 8))),
    "whole": ((6,), None, ()),
}


"""What rank 1 of 2 holds."""


def full(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every element different."""
    return {
        name: (
            torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * at + 1000 * version
        ).to(dtype)
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The piece, written out."""
    _, dim, runs = PIECES[name]
    index = [at for first, last in runs for at in range(first, last)]
    return tensor if dim is None else tensor.index_select(dim, torch.tensor(index))


def empty(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.zeros_like(cut(name, tensor)), requires_grad=False)
        for name, tensor in full(0, dtype).items()
    }


def assert_holds(
    own: dict[str, torch.nn.Parameter], version: int, dtype: torch.dtype = torch.float32
) -> None:
    for name, tensor in full(version, dtype).items():
        assert torch.equal(own[name].data, cut(name, tensor)), name


LAYOUT = FlatLayout.of(full(0))


@pytest.fixture
def companion(place):
    """Another rank at the same place."""
    made: list[RankReader] = []

    def make(attach=None, slices=PIECES, **knobs) -> RankReader:
        made.append(RankReader(place.address, "generator-0.1", **knobs))
        if attach is not None:
            made[-1].attach(attach, slices)
        return made[-1]

    yield make
    for each in made:
        each.close()


def inside(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    begin = buffer.data_ptr()
    return (
        begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= begin + buffer.numel()
    )


def test_a_reader_with_pieces_holds_exactly_its_slices_of_every_version(place):
    own = empty()
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(own, PIECES)
    for version in range(1, 6):
        assert writer.publish(version, full(version))
        place.settle(writer, reader)
        assert reader.version == version
        assert_holds(own, version)


def test_slices_by_rows_are_views_of_the_segment_and_all_others_are_copies(place, companion):
    own, other = empty(), empty()
    writer, reader, rank = place.writer(LAYOUT), place.reader(), companion(other)
    reader.attach(own, PIECES)
    writer.publish(1, full(1))
    place.settle(writer, reader, adopt=False)
    offer = reader.verify()
    assert rank.enter(offer.segment, offer.version, reader._layout.to_plain())
    rank.adopt()
    reader.adopt()
    for held, end in ((own, reader), (other, rank)):
        mapped = end._attached._inside
        viewed = {name for name, tensor in held.items() if inside(tensor, mapped.segment.buffer)}
        assert viewed == {"rows", "whole"}
        assert (
            sum(target.nbytes for target, _ in mapped.copies)
            == held["columns"].nbytes + held["fused"].nbytes
        )


def test_a_version_that_ranks_take_together_is_summed_once(place, monkeypatch):
    monkeypatch.setattr("transport.weights.memory.library", lambda: None)
    summed, calls = memory.summed, []
    monkeypatch.setattr(memory, "summed", lambda *of: (calls.append(1), summed(*of))[1])
    own = empty()
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(own, PIECES)
    writer.publish(1, full(1))
    place.settle(writer, reader, adopt=False)
    assert reader.verify() is not None and reader.adopt() == 1
    assert calls == [1]
    assert_holds(own, 1)


def test_with_adopt_copy_no_slice_moves(place):
    own = empty()
    where = {name: tensor.data_ptr() for name, tensor in own.items()}
    writer, reader = place.writer(LAYOUT), place.reader(adopt="copy")
    reader.attach(own, PIECES)
    writer.publish(1, full(1))
    place.settle(writer, reader)
    assert_holds(own, 1)
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == where


def test_slices_of_another_dtype_are_cast(place):
    own = empty(torch.bfloat16)
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(own, PIECES)
    writer.publish(1, full(1))
    place.settle(writer, reader)
    assert_holds(own, 1, torch.bfloat16)


def test_after_close_a_rank_keeps_its_version_in_memory_of_its_own(place, companion):
    own = empty()
    writer, reader, rank = place.writer(LAYOUT), place.reader(attach=full(0)), companion(own)
    writer.publish(1, full(1))
    place.settle(writer, reader, adopt=False)
    offer = reader.verify()
    assert rank.enter(offer.segment, offer.version, reader._layout.to_plain())
    assert rank.adopt() == rank.version == 1
    buffer = rank._attached._inside.segment.buffer
    rank.close()
    assert_holds(own, 1)
    assert not any(inside(tensor, buffer) for tensor in own.values())


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        (
            ((8, 6), 0, ((4, 9),)),
            r"does not lie in it; found \[\[4, 9\]\] along dimension 0 of \[8, 6\]",
        ),
        (((8, 6), 2, ((0, 4),)), "does not lie in it"),
        (((8, 6), 0, ((5, 4),)), "does not lie in it"),
        (
            ((8, 6), 0, ((4, 7),)),
            r"found \[4, 6\], but ranges \[\[4, 7\]\] along dimension 0 .* make \[3, 6\]",
        ),
        (((8, 6), None, ()), r"found \[4, 6\], but .* make \[8, 6\]"),
    ],
)
def test_a_piece_that_does_not_fit_its_tensor_is_refused_at_once(piece, says, place):
    with pytest.raises(LayoutMismatch, match=says):
        place.reader().attach(empty(), {**PIECES, "rows": piece})


def test_a_piece_of_no_tensor_is_refused(place):
    with pytest.raises(LayoutMismatch, match="found 'none'"):
        place.reader().attach(empty(), {**PIECES, "none": ((1,), None, ())})


def test_a_piece_of_another_full_shape_is_refused_even_where_its_ranges_would_fit(place):
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(empty(), {**PIECES, "rows": ((9, 6), 0, ((4, 8),))})
    with pytest.raises(
        LayoutMismatch, match=r"another shape for 'rows'; found \[9, 6\], the layout says \[8, 6\]"
    ):
        place.settle(writer, reader)


def test_a_companion_needs_a_layout_tensors_and_a_version_that_was_entered(place, companion):
    writer = place.writer(LAYOUT)
    writer.publish(1, full(1))
    (segment,) = writer._segments
    with pytest.raises(WeightError, match="nothing attached"):
        companion().enter(segment, 1, LAYOUT.to_plain())
    rank = companion(empty())
    with pytest.raises(WeightError, match="no layout"):
        rank.enter(segment, 1)
    assert not rank.enter(segment, 2, LAYOUT.to_plain())
    assert not rank.enter("another", 1)
    with pytest.raises(WeightError, match="none entered"):
        rank.adopt()
    assert rank.enter(segment, 1)
    assert rank.adopt() == 1


def test_what_a_companion_has_entered_is_not_written_over_until_it_leaves(place, companion):
    own = empty()
    writer, rank = place.writer(LAYOUT), companion(own)
    writer.publish(1, full(1))
    (first,) = writer._segments
    assert rank.enter(first, 1, LAYOUT.to_plain())
    writer.publish(2, full(2))
    assert writer.publish(3, full(3)) and writer.version == 3
    assert rank.adopt() == 1
    writer.publish(4, full(4))
    assert_holds(own, 1)
    newest = next(key for key, version in writer._offers.segments.items() if version == 4)
    assert rank.enter(newest, 4)
    rank.decline()
    assert_holds(own, 1)
    assert writer.publish(5, full(5)) and not rank.enter(newest, 4)


def test_a_proved_version_that_is_declined_is_offered_again(place):
    own = empty()
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(own, PIECES)
    writer.publish(1, full(1))
    place.settle(writer, reader, adopt=False)
    assert reader.verify().version == 1
    reader.decline()
    assert reader.adopt() == -1
    assert values({"rows": own["rows"]}) == {0.0}
    place.clock.now += 1
    place.settle(writer, reader)
    assert reader.version == 1
    assert_holds(own, 1)


def test_a_declined_version_holds_no_segment(place):
    writer, reader = place.writer(LAYOUT), place.reader()
    reader.attach(empty(), PIECES)
    for version in range(1, 6):
        assert writer.publish(version, full(version))
        place.settle(writer, reader, adopt=False)
        assert reader.verify().version == version
        reader.decline()


def _enter_and_stay(address: str, segment: str, told) -> None:
    rank = RankReader(address, "generator-0.1")
    rank.attach(empty(), PIECES)
    assert rank.enter(segment, 1, LAYOUT.to_plain())
    told.send(rank.adopt())
    signal.pause()


def test_a_killed_companion_holds_nothing_up(tmp_path):
    address = f"ipc://{tmp_path}/w.sock"
    writer = WeightWriter(LAYOUT, address)
    writer.publish(1, full(1))
    (segment,) = writer._segments
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_enter_and_stay, args=(address, segment, theirs)
    )
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == 1
        assert not writer._segments[segment].seal()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
    assert writer._segments[segment].seal()
    writer.close()


@st.composite
def pieces(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    bounds = draw(st.lists(st.integers(0, shape[dim]), min_size=0, max_size=6))
    bounds = bounds[: len(bounds) // 2 * 2]
    return shape, dim, tuple(tuple(sorted(bounds[at : at + 2])) for at in range(0, len(bounds), 2))


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(piece=pieces(), adopt=st.sampled_from(["view", "copy"]), shared=st.booleans())
def test_any_piece_is_its_ranges_end_to_end(tmp_path_factory, piece, adopt, shared):
    shape, dim, runs = piece
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = torch.cat(
        [tensor.narrow(dim, 0, 0), *(tensor.narrow(dim, a, b - a) for a, b in runs)], dim
    )
    local = torch.nn.Parameter(torch.full_like(expected, -1.0), requires_grad=False)
    address = SharedMemory(f"ipc://{tmp_path_factory.mktemp('w')}/w") if shared else Hub()
    writer = WeightWriter(FlatLayout.of({"t": tensor}), address)
    rank = RankReader(address, "rank", adopt=adopt)
    try:
        rank.attach({"t": local}, {"t": piece})
        writer.publish(1, {"t": tensor})
        (segment,) = writer._segments
        assert rank.enter(segment, 1, writer.layout.to_plain())
        rank.adopt()
        assert torch.equal(local.data, expected)
    finally:
        rank.close()
        writer.close()
    assert torch.equal(local.data, expected)


def test_a_reader_leads_companions_through_versions_that_come_while_they_enter(place, companion):
    own, other = empty(), empty()
    writer, reader, rank = place.writer(LAYOUT), place.reader(), companion(other)
    reader.attach(own, PIECES)
    layout = LAYOUT.to_plain()
    for version in (1, 3, 5):
        writer.publish(version, full(version))
        place.settle(writer, reader, adopt=False)
        offer = reader.verify()
        writer.publish(version + 1, full(version + 1))
        assert rank.enter(offer.segment, offer.version, layout)
        assert reader.adopt() == rank.adopt() == offer.version
        assert_holds(own, offer.version)
        assert_holds(other, offer.version)
    assert offer.version >= 5 and isinstance(reader, WeightReader)
