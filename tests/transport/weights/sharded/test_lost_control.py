"""A connection between a coordinator and a member that swallows messages, and is then replaced:
nothing is lost.
"""

import time

import pytest
from rigs.cable import Cable
from rigs.machine import wait_until

from transport import numbered
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


def test_nothing_that_a_coordinator_and_a_member_say_is_lost_with_a_connection(monkeypatch):
    monkeypatch.setattr(numbered, "AGAIN_S", 0.1)
    keys = RunKeys.make()
    listener = CoordinatorSocket("tcp://127.0.0.1:*", keys)
    cable = Cable(listener.address)
    line = MemberSocket(cable.address, keys)
    by_member, by_coordinator, peers, beats = [], [], set(), []

    def turn():
        line.say(b"beat")
        for peer, message in listener.heard():
            peers.add(peer)
            (beats if message == b"beat" else by_member).append(message)
        for message in line.heard():
            by_coordinator.append(CODEC.decode(message).key)
        for peer in peers:
            listener.send(peer, StoredValue(epoch=1, key="beat", value=b""))
        return peers

    def exchange(numbers):
        for number in numbers:
            line.say(b"%d" % number)
            for peer in peers:
                listener.send(peer, StoredValue(epoch=1, key=str(number), value=b""))

    def told():
        return [key for key in by_coordinator if key != "beat"]

    def have(count):
        turn()
        return len(by_member) >= count and len(told()) >= count

    try:
        wait_until(turn, 10.0, "the connection")
        exchange(range(3))
        wait_until(lambda: have(3), 10.0, "what was said before the cut")
        cable.is_cut = True
        exchange(range(3, 6))
        for _ in range(20):
            turn()
            line.socket.poll(10)
        assert len(by_member) == len(told()) == 3
        cable.replace()
        wait_until(lambda: have(6), 10.0, "what was said during the cut")
        assert by_member == [b"%d" % number for number in range(6)] and told() == list("012345")
    finally:
        line.close()
        cable.close()
        listener.close()
