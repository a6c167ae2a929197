"""A connection between a coordinator and a member that swallows messages, and is then replaced:
nothing is lost.
"""

import time

import pytest
from rigs.machine import wait_until

from transport.security import RunKeys
from transport.weights.protocol.messages import CODEC, StoredValue
from transport.weights.sharded.control import CoordinatorSocket, MemberSocket


@pytest.mark.parametrize("years", [0, -30], ids=["", "the clock is set back"])
def test_a_coordinator_that_follows_another_at_its_address_is_heard_whatever_clocks_say(
    monkeypatch, years
):
    keys = RunKeys.make()
    first = CoordinatorSocket("tcp://127.0.0.1:*", keys, attempt=1)
    address, line, heard = first.address, MemberSocket(first.address, keys), []

    def is_heard(listener, key):
        line.say(b"beat")
        for peer, _ in listener.heard():
            listener.send(peer, StoredValue(epoch=1, key=key, value=b""))
        heard.extend(CODEC.decode(message).key for message in line.heard())
        return key in heard

    try:
        wait_until(lambda: is_heard(first, "first"), 10.0, "the first")
        first.close()
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + years * 3.2e7)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(years * 3.2e16))
        second = CoordinatorSocket(address, keys, attempt=2)
        try:
            wait_until(lambda: is_heard(second, "second"), 10.0, "the second")
        finally:
            second.close()
    finally:
        line.close()
