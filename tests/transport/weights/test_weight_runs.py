"""Copies become runs of bytes between two flat buffers, and what touches on both sides is one run."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.weights import FlatLayout, LayoutMismatch
from transport.weights.layout import Layout
from transport.weights.reshard import reshard
from transport.weights.runs import Runs, runs
from transport.weights.shards import Mesh

from .sides import empty, gather_then_shard, models, sides, whole

pairs = models().flatmap(lambda tensors: st.tuples(st.just(tensors), sides(tensors, True), sides(tensors, False)))


def flat(layout: FlatLayout, local: dict[str, torch.Tensor]) -> np.ndarray:
    """A rank's buffer."""
    buffer = np.zeros(layout.nbytes, np.uint8)
    for spec in layout.tensors:
        buffer[spec.offset : spec.offset + spec.nbytes] = local[spec.name].reshape(-1).view(torch.uint8).numpy()
    return buffer


def between(source: Layout, destination: Layout, sender: int = 0, receiver: int = 0) -> Runs:
    copies = reshard(source, destination).copies(source_rank=sender, destination_rank=receiver)
    return runs(copies, source.flat(sender), destination.flat(receiver))


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_moving_the_runs_is_executing_the_plan(found):
    tensors, source, destination = found
    full = whole(tensors)
    senders = [rank for rank in range(source.ranks) if source.local(rank)]
    held = {rank: flat(source.flat(rank), gather_then_shard(source, full)[rank]) for rank in senders}
    blank, want = empty(destination), gather_then_shard(destination, full)
    for receiver in (rank for rank in range(destination.ranks) if destination.local(rank)):
        buffer = flat(destination.flat(receiver), blank[receiver])
        written = np.zeros(len(buffer), np.int64)
        for sender in senders:
            made = between(source, destination, sender, receiver)
            ends = made.source + made.nbytes, made.destination + made.nbytes
            touching = (ends[0][:-1] == made.source[1:]) & (ends[1][:-1] == made.destination[1:])
            assert not touching.any()
            assert made.nbytes.sum() == reshard(source, destination).pair_bytes[sender, receiver]
            for at, to, nbytes in zip(made.source, made.destination, made.nbytes, strict=True):
                buffer[to : to + nbytes] = held[sender][at : at + nbytes]
                written[to : to + nbytes] += 1
        assert written.max(initial=0) <= 1
        assert np.array_equal(buffer, flat(destination.flat(receiver), want[receiver]))


def test_a_whole_model_without_padding_is_one_run():
    model = Layout.whole({f"t{n}": ((16, 4), "float32") for n in range(5)})
    made = between(model, model)
    assert (made.source.tolist(), made.destination.tolist(), made.nbytes.tolist()) == ([0], [0], [5 * 256])


def test_rows_touch_and_columns_do_not():
    tensors = {"w": ((8, 8), "float32")}
    rows, columns = Layout.fsdp(tensors, 2), Layout.cut(tensors, Mesh.of(2), lambda name: (1,))
    assert between(rows, Layout.whole(tensors)).nbytes.tolist() == [4 * 8 * 4]
    assert between(rows, columns).nbytes.tolist() == [4 * 4] * 4


def test_parts_that_lie_fused_on_both_sides_are_one_run():
    tensors = dict.fromkeys(("gate", "up"), ((4, 4), "float32"))
    fused = Layout.whole(tensors).fused("gate_up", ("gate", "up"))
    assert between(fused, fused).nbytes.tolist() == [2 * 64]
    swapped = Layout.whole(tensors).fused("up_gate", ("up", "gate"))
    assert between(fused, swapped).nbytes.tolist() == [64, 64]


def test_experts_of_a_stack_are_one_run_with_the_full_stack():
    names = [f"e{n}" for n in range(3)]
    stack = Layout.whole(dict.fromkeys(names, ((2, 8), "float32"))).stacked("experts", names)
    assert between(stack, stack).nbytes.tolist() == [3 * 64]


def test_a_rank_that_sends_nothing_has_no_runs():
    tensors = {"w": ((8,), "float32")}
    assert len(between(Layout.fsdp(tensors, 2), Layout.fsdp(tensors, 2), 0, 1).nbytes) == 0


def test_a_cast_is_no_run_of_bytes():
    model = Layout.whole({"w": ((8,), "float32")})
    with pytest.raises(LayoutMismatch, match=r"cannot cast; found 'w' as float32 .* bfloat16 .*; cast the source's"):
        between(model, model.cast("bfloat16"))
    assert between(model.cast("bfloat16"), model.cast("bfloat16")).nbytes.tolist() == [16]
