"""How copies become messages: both ends cut alike, nothing is lost, and memory is sent as it lies
where that can be.
"""

import numpy as np
import pytest
import torch

from transport.weights import Layout, Mesh
from transport.weights import memory as buffers
from transport.weights.executors.device import TransferDevice
from transport.weights.layout.reshard import reshard
from transport.weights.sharded.chunks import chunks_between, split_shape
from transport.weights.sharded.steps import compiled

MODEL = {
    "a": ((40, 16), "float32"),
    "b": ((40, 24), "float32"),
    "c": ((7,), "float32"),
    "d": ((), "float32"),
}
CPU = TransferDevice()


def layouts():
    rows = Layout.fsdp(MODEL, 3)
    columns = Layout.cut(MODEL, Mesh.of(2), lambda name: (1,) if name in "ab" else (None,))
    return [
        (Layout.whole(MODEL), Layout.whole(MODEL)),
        (rows, columns),
        (columns, rows.cast("bfloat16")),
    ]


@pytest.mark.parametrize("bucket", [64, 200, 1000, 1 << 20])
@pytest.mark.parametrize(("source", "destination"), layouts())
def test_the_fragments_of_all_messages_fill_every_destination_element_once(
    source, destination, bucket
):
    plan = reshard(source, destination)
    for to in range(destination.ranks):
        filled = {name: np.zeros(shape, int) for name, (shape, _) in destination.local(to).items()}
        for of in range(source.ranks):
            for chunk in chunks_between(plan, of, to, bucket):
                end = 0
                for fragment in chunk.fragments:
                    filled[fragment.copy.destination_name][fragment.destination] += 1
                    assert fragment.offset >= end and fragment.offset % 64 == 0
                    end = fragment.offset + fragment.nbytes
                assert end == chunk.nbytes
        assert all((count == 1).all() for count in filled.values())


@pytest.mark.parametrize(("source", "destination"), layouts())
def test_a_message_is_no_larger_than_asked_unless_one_row_is(source, destination):
    plan = reshard(source, destination)
    for of in range(source.ranks):
        for to in range(destination.ranks):
            for chunk in chunks_between(plan, of, to, 200):
                assert chunk.nbytes <= 200 or len(chunk.fragments) == 1


def test_parts_make_up_the_tensor_and_follow_its_memory():
    tensor = torch.arange(3 * 5 * 4).view(1, 3, 5, 4)
    found = [tensor[part].flatten() for part in split_shape((1, 3, 5, 4), 8, 200)]
    assert len(found) == 3
    assert torch.equal(torch.cat(found), tensor.flatten())


def flat(layout: Layout) -> dict[str, torch.Tensor]:
    spec = layout.flat(0)
    buffer = torch.zeros(spec.nbytes, dtype=torch.uint8)
    return {
        each.name: view
        for each, view in zip(spec.tensors, buffers.views(spec, buffer), strict=True)
    }


@pytest.mark.parametrize("sending", [True, False])
def test_flat_buffers_alike_at_both_ends_are_sent_from_where_they_lie_in_one_message(sending):
    whole = Layout.whole(MODEL)
    tensors = flat(whole)
    cut = {1: chunks_between(reshard(whole, whole), 0, 0, 1 << 20)}
    (step,) = compiled(cut, tensors, sending=sending, depth=4, device=CPU)
    assert step.data.data_ptr() == tensors["a"].data_ptr()
    assert step.names == list(MODEL)


def test_what_lies_between_two_boxes_of_one_tensor_is_not_overwritten():
    whole = {"a": ((4, 3), "float32"), "b": ((4, 3), "float32")}
    source = Layout.whole(whole)
    parts_of = Layout.cut(whole, Mesh.of(2), lambda name: (1,)).fused("ab", ["a", "b"], dim=1)
    tensors = flat(parts_of)
    cut = {0: chunks_between(reshard(source, parts_of), 0, 0, 1 << 20)}
    steps = compiled(cut, tensors, sending=False, depth=4, device=CPU)
    storage = tensors["ab"].untyped_storage()
    inside = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    assert not any(step.data.data_ptr() in inside for step in steps)
