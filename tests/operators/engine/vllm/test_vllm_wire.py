"""Frames, shared tensors and handles: what goes in comes out."""

from __future__ import annotations

import os
import socket
import threading

import msgpack
import pytest
import torch

from operators.engine.vllm.process import environment_of
from operators.engine.vllm.shared_tensors import (
    ALIGNED,
    attach,
    lay_out,
    pack_handle,
    reserve,
    unpack_handle,
)
from operators.engine.vllm.wire import LENGTH, MOST_BYTES, ServerStream


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair):
    left, right = (ServerStream(end) for end in pair)
    messages = [
        {"op": "step", "starts": [], "n": i, "bytes": bytes(range(256)) * i}
        for i in range(0, 3000, 700)
    ]
    sender = threading.Thread(target=lambda: [left.send(message, 30) for message in messages])
    sender.start()
    assert [right.receive(30) for _ in messages] == messages
    sender.join(30)


def test_what_came_before_a_timeout_is_kept(pair):
    body = msgpack.packb({"op": "updated", "version": 7})
    whole = LENGTH.pack(len(body)) + body
    right = ServerStream(pair[1])
    for cut in (2, 9):
        pair[0].sendall(whole[:cut])
        with pytest.raises(TimeoutError):
            right.receive(0.05)
        pair[0].sendall(whole[cut:])
        assert right.receive(10) == {"op": "updated", "version": 7}


def test_the_end_of_the_stream_is_a_connection_error(pair):
    pair[0].close()
    with pytest.raises(ConnectionError, match="ended the stream"):
        ServerStream(pair[1]).receive(1)


def test_a_length_that_cannot_be_ours_is_refused(pair):
    pair[0].sendall(LENGTH.pack(MOST_BYTES + 1))
    with pytest.raises(ConnectionError, match="this is another stream"):
        ServerStream(pair[1]).receive(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_written_through_one_mapping_are_read_through_another(dtype):
    layout, size = lay_out({"a": (3, 5), "b": (), "c": (7,)}, dtype)
    assert all(at % ALIGNED == 0 for _, _, at in layout.values())
    file = reserve(size)
    ours, theirs = attach(file, layout), attach(file, layout)
    os.close(file)
    for i, tensor in enumerate(ours.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * i)
    assert {name: list(t.shape) for name, t in theirs.items()} == {"a": [3, 5], "b": [], "c": [7]}
    assert all(
        str(theirs[name].dtype) == f"torch.{dtype}" and theirs[name].equal(ours[name])
        for name in ours
    )


def test_the_handle_of_a_gpu_tensor_survives_the_wire(pair):
    rest = (0, b"handle", 4096, 512, False, b"counter", 3, b"event", True)
    handle = (
        torch.Tensor,
        torch.Size([2, 3]),
        (3, 1),
        5,
        torch.storage.TypedStorage,
        torch.bfloat16,
        *rest,
    )
    left, right = (ServerStream(end) for end in pair)
    left.send({"handle": pack_handle(handle)}, 5)
    assert unpack_handle(right.receive(5)["handle"]) == handle


def test_the_process_gets_one_device_and_none_of_our_module_path():
    found = environment_of(
        "/e/bin/python", 3, "cuda:1", {"PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "4,6", "A": "b"}
    )
    assert (
        found["CUDA_VISIBLE_DEVICES"] == "6"
        and found["OMP_NUM_THREADS"] == "3"
        and found["A"] == "b"
    )
    assert "PYTHONPATH" not in found
    assert environment_of("/e/bin/python", 1, "cuda", {})["CUDA_VISIBLE_DEVICES"] == "0"
