"""Junk at the sockets of the weight plane: dropped, told of once, and the next version goes
through.
"""

import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zmq
from opened import closed, opened

from transport.weights import FlatLayout, WeightReader, WeightWriter
from transport.weights.protocol.messages import CODEC, Join, Offer, Welcome

DEADLINE_S = 30.0


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{Path(folder) / 'w'}"


def junk(genuine: list[bytes], seed: int, count: int) -> Iterator[bytes]:
    """Noise, damaged messages, and messages whose fields are something else."""
    rng = np.random.default_rng(seed)
    values: tuple[Any, ...] = (None, -(2**40), 0.5, "x", b"x", [1], {"a": 1}, [[]], {})
    for number in range(count):
        message = genuine[number % len(genuine)]
        match number % 4:
            case 0:
                yield rng.bytes(int(rng.integers(200)))
            case 1:
                yield message[: int(rng.integers(len(message)))]
            case 2:
                tag, kind, fields = opened(message)
                name = list(fields)[int(rng.integers(len(fields)))]
                others = [value for value in values if type(value) is not type(fields[name])]
                yield closed([tag, kind, {**fields, name: others[int(rng.integers(len(others)))]}])
            case _:
                yield msgpack.packb(values[int(rng.integers(len(values)))])


def until(step: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not step():
        assert time.monotonic() < deadline, "waited in vain"


def test_a_writer_drops_junk_tells_of_it_once_and_serves_its_readers(address: str) -> None:
    tensors = {"w": torch.arange(64, dtype=torch.float32)}
    writer = WeightWriter(FlatLayout.of(tensors), address)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(address)
    for message in junk(
        [CODEC.encode(Join(group="r", attempt=1, version=-1, incarnation=1, writer=0))],
        seed=1,
        count=400,
    ):
        stranger.send_multipart([message] * (1 + len(message) % 3))
    reader, mine = WeightReader(address, "reader"), {"w": torch.zeros(64)}
    reader.attach(mine)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        writer.publish(0, tensors)
        until(lambda: (writer.poll(), reader.poll() is not None and reader.adopt() == 0)[1])
    assert len([one for one in said if "a message of weights/2" in str(one.message)]) == 1
    assert torch.equal(mine["w"], tensors["w"])
    for end in (reader, writer):
        end.close()
    stranger.close(linger=0)


def test_a_reader_drops_junk_of_whoever_holds_the_address(address: str) -> None:
    false = zmq.Context.instance().socket(zmq.ROUTER)
    false.bind(address)
    reader = WeightReader(address, "reader")
    reader.attach({"w": torch.zeros(4)})
    until(lambda: (reader.poll(), false.poll(0))[1])
    peer = false.recv_multipart()[0]
    genuine = [
        CODEC.encode(Welcome(attempt=1, epoch=1, writer=1, layout={})),
        CODEC.encode(Offer(epoch=1, version=3, segment="s", sums=b"")),
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for message in junk(genuine, seed=2, count=400):
            false.send_multipart([peer, message])
        heard = time.monotonic() + 0.5
        until(lambda: (reader.poll(), time.monotonic() > heard)[1])
    assert len(said) == 1
    assert reader.version == -1
    reader.close()
    false.close(linger=0)
