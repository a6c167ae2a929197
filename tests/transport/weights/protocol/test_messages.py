"""Messages of the weight handshake survive the wire, and nothing else is taken for one."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opened import closed

from transport.weights import MessageError
from transport.weights.protocol.messages import CODEC, Offer, ReaderHeartbeat, Upcoming, Welcome


def test_messages_survive_the_wire():
    note = {"a": 1, "b": 0.5, "c": "x"}
    offer = Offer(
        epoch=7, version=3, segment="s", sums=bytes(range(16)), digests=b"\xff" * 16, note=note
    )
    layout = {"tensors": [["a", [1], "int8", 0]], "aliases": {}}
    welcome = Welcome(attempt=1, epoch=2, writer=3, layout=layout)
    upcoming = Upcoming(epoch=7, version=4, segment="s")
    for message in (offer, upcoming, welcome, ReaderHeartbeat(epoch=1, version=-1)):
        assert CODEC.decode(CODEC.encode(message)) == message


@given(st.binary(max_size=60))
def test_random_bytes_are_no_message(payload):
    with pytest.raises(MessageError, match="a message of weights/2 .*; .*"):
        CODEC.decode(payload)


@pytest.mark.parametrize(
    "plain",
    [
        3,
        [],
        {},
        ["weights/2", "ReaderHeartbeat"],
        ["weights/2", "ReaderHeartbeat", {}],
        ["weights/2", "Steal", {"epoch": 1}],
        ["data/1", "ReaderHeartbeat", {"epoch": 1, "version": 2, "verified": 2}],
        ["weights/2", "ReaderHeartbeat", {"epoch": "1", "version": 2, "verified": 2}],
        ["weights/2", "ReaderHeartbeat", {"epoch": True, "version": 2, "verified": 2}],
        ["weights/2", "ReaderHeartbeat", {"epoch": 1, "version": 2, "verified": 2, "more": 3}],
        ["weights/2", ["ReaderHeartbeat"], {"epoch": 1, "version": 2, "verified": 2}],
    ],
)
def test_malformed_messages_are_refused(plain):
    with pytest.raises(MessageError, match="a message of weights/2 .*; .*"):
        CODEC.decode(closed(plain))


def test_layouts_and_the_handshake_import_no_torch():
    rooms = (
        "transport.weights",
        *(f"transport.weights.protocol.{each}" for each in ("rounds", "ranks", "segments")),
    )
    code = f"import sys, {', '.join(rooms)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
