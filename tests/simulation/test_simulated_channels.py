"""Senders and receivers among crashes and broken connections: every batch in order, none lost, none
twice.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from transport.data import inbox, outbox
from transport.data.inbox import Inbox
from transport.data.messages import Hello, Welcome, encode_schema
from transport.data.outbox import Outbox, OutgoingBatch
from transport.life import Life

from .channels import SCHEMA, ChannelWorld, ReceivingProcess
from .running import hold, notice

JUDGE, HELLO, TURN = Inbox.judge, Inbox.hello, ReceivingProcess.turn


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_no_seed_of_the_first_100_loses_a_batch_or_delivers_one_twice(first: int) -> None:
    hold(ChannelWorld, range(first, first + 50))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 20_100, 2000))
def test_no_seed_of_20_000_more_does(first: int) -> None:
    hold(ChannelWorld, range(first, first + 2000))


def credit_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "may_send", lambda *_: True)


def what_came_before_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: Inbox, connection: Any, message: Any) -> Any:
        verdict, replies = JUDGE(self, connection, message)
        return ("new", []) if verdict == "duplicate" else (verdict, replies)

    monkeypatch.setattr(Inbox, "judge", judge)


def gaps_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: Inbox, connection: Any, message: Any) -> Any:
        verdict, replies = JUDGE(self, connection, message)
        if verdict == "ahead":
            self._peers[message.sender].expected = message.sequence
            return "new", []
        return verdict, replies

    monkeypatch.setattr(Inbox, "judge", judge)


def a_restarted_sender_is_taken_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def hello(self: Inbox, connection: Any, message: Hello) -> Any:
        known = self._peers.get(message.sender)
        if known is not None:
            known.life = message.life
        return HELLO(self, connection, message)

    monkeypatch.setattr(Inbox, "hello", hello)


def nothing_is_sent_again_to_a_restarted_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    def welcome(self: Outbox, message: Welcome) -> bool:
        known, unsent = self._receiver_life, list(self._unsent)
        shrank = before(self, message)
        if known not in (None, message.life):
            self._unsent.clear()
            self._unsent.extend(unsent)
        return shrank

    before = Outbox.welcome
    monkeypatch.setattr(Outbox, "welcome", welcome)


def batches_are_acknowledged_before_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: ReceivingProcess) -> bool:
        moved = TURN(self)
        for _, _, delivery in self.held:
            delivery.ack()
        return moved

    monkeypatch.setattr(ReceivingProcess, "turn", turn)


WITHOUT: list[tuple[Callable[[pytest.MonkeyPatch], None], range, str]] = [
    (credit_is_ignored, range(100), "without credit"),
    (
        what_came_before_is_new,
        range(300),
        "delivered twice|comes after|another item|without end|not done",
    ),
    (gaps_are_not_seen, range(2000), "left out"),
    (a_restarted_sender_is_taken_for_the_one_before, range(100), "."),
    (nothing_is_sent_again_to_a_restarted_receiver, range(200), "not done"),
    (batches_are_acknowledged_before_they_are_done, range(1000), "left out|not done"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "seeds", "found"), WITHOUT, ids=[broken.__name__ for broken, *_ in WITHOUT]
)
def test_some_seed_breaks_a_law_where(
    broken: Callable[[pytest.MonkeyPatch], None],
    seeds: range,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    notice(ChannelWorld, seeds, found)


def make_inbox(life: Life) -> Inbox:
    return Inbox(
        edge="edge",
        life=life,
        capacity=inbox.Credit(rows=8, bytes=1 << 20),
        max_message_bytes=1 << 20,
    )


def make_outbox() -> Outbox:
    return Outbox(
        edge="edge", sender="a", life=Life(attempt=1), schema=encode_schema(pa.schema(SCHEMA))
    )


def test_a_hello_that_is_read_late_from_a_broken_connection_does_not_take_the_stream_back() -> None:
    receiver, sender = make_inbox(Life(attempt=1)), make_outbox()
    late, new = sender.hello(), sender.hello()
    receiver.hello("new connection", new)
    assert receiver.hello("old connection", late) == []
    assert receiver._peers["a"].connection == "new connection"


@pytest.mark.parametrize("kind", ["ack", "welcome"])
def test_words_of_a_dead_receiver_count_no_more_once_its_successor_was_greeted(kind: str) -> None:
    sender, dead, successor = (
        make_outbox(),
        make_inbox(Life(attempt=1)),
        make_inbox(Life(attempt=2)),
    )
    [(_, welcome)] = dead.hello("connection", sender.hello())
    sender.welcome(welcome)
    sender.add(
        OutgoingBatch(
            rows=1, cost=inbox.cost(1, 8), payload=SimpleNamespace(size_bytes=8, checksum=0)
        )
    )
    for outgoing in sender.due():
        for header in sender.headers(outgoing):
            dead.take(header)
    dead.acknowledge("a", Life(attempt=1), 0)
    [(_, late)] = dead.flush() if kind == "ack" else dead.hello("connection", sender.hello())
    sender.lost()
    hello = sender.hello()
    sender.ack(late) if kind == "ack" else sender.welcome(late)
    [(_, answer)] = successor.hello("another connection", hello)
    sender.welcome(answer)
    assert [outgoing.sequence for outgoing in sender.due()] == [0], "its successor waits for it"
    [(_, again)] = dead.hello("connection", sender.hello())
    sender.welcome(again)
    assert not list(sender.due()), "it went on after its successor was greeted"
