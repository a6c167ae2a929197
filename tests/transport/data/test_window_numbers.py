"""Statements that cross on the way: a receiver holds a sender to no window that it cannot have
heard of.
"""

from typing import Any

from msgspec.structs import replace

from transport.data.credit import Credit
from transport.data.inbox import Inbox
from transport.data.messages import Ack, Data, Hello, Message, Welcome, encode_schema
from transport.data.outbox import Outbox
from transport.data.receiver import Replies
from transport.life import Life

from .rig import SCHEMA

CAPACITY = Credit(rows=8, bytes=8000)


def make_inbox() -> Inbox:
    """Eight rows, one sender expected."""
    return Inbox(edge="edge", life=Life(attempt=1), capacity=CAPACITY, max_message_bytes=1000)


def make_hello(sender: str, number: int = 0, rows: int = 0, **fields: Any) -> Hello:
    """A sender that has eight batches to send and got none of them there."""
    known: dict[str, Any] = {"base": 0, "next": 8, "gone": (), "ended": False} | fields
    return Hello(
        edge="edge",
        sender=sender,
        life=Life(attempt=1),
        schema=b"",
        window_rows=rows,
        window_bytes=1000 * rows,
        window_number=number,
        **known,
    )


def window(replies: Replies, connection: str) -> tuple[int, int]:
    """Number and rows of the last window said over a connection."""
    said: list[Message] = [message for to, message in replies if to == connection]
    assert isinstance(said[-1], Ack | Welcome)
    return said[-1].window_number, said[-1].window_rows


def send(inbox: Inbox, connection: str, numbers: range) -> list[str]:
    """Batches of one row over a connection, and what became of each."""
    verdicts = []
    for number in numbers:
        data = Data(
            edge="edge",
            sender=connection,
            life=Life(attempt=1),
            sequence=number,
            rows=1,
            bytes=100,
            checksum=0,
        )
        verdicts.append(inbox.judge(connection, data)[0])
        if verdicts[-1] == "new":
            inbox.take(data)
    return verdicts


def test_a_greeting_that_crossed_a_larger_window_does_not_take_it_back() -> None:
    inbox = make_inbox()
    assert window(inbox.hello("a", make_hello("a")), "a")[1] == 8
    number, rows = window(inbox.expect(2), "a")
    inbox.hello("a", make_hello("a", number, rows))
    assert window(inbox.expect(1), "a")[1] == 8
    assert window(inbox.expect(2), "a")[1] == 4
    inbox.hello("a", make_hello("a", number, rows))
    assert send(inbox, "a", range(8)) == ["new"] * 8, "it may have heard of 8, and not yet of 4"


def test_a_greeting_repeated_before_the_first_was_answered_does_not_take_its_answer_back() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a"))
    inbox.expect(8)
    inbox.hello("a", make_hello("a"))
    assert send(inbox, "a", range(8)) == ["new"] * 8


def test_a_confirmed_window_holds_and_frees_the_rest_for_others() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a"))
    assert window(inbox.hello("b", make_hello("b")), "b")[1] == 0, "a may still use all"
    number, rows = window(inbox.expect(4), "a")
    assert window(inbox.hello("a", make_hello("a", number, rows)), "b")[1] == 2
    assert send(inbox, "a", range(3)) == ["new", "new", "overrun"]


def test_a_greeting_with_a_number_of_an_earlier_receiver_takes_nothing_back() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a", number=7, rows=3))
    inbox.expect(8)
    inbox.hello("a", make_hello("a", number=7, rows=3))
    assert send(inbox, "a", range(8)) == ["new"] * 8


def test_a_window_over_a_broken_line_is_forgotten() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a"))
    inbox.expect(4)
    inbox._peers["a"].connection = "an older connection"
    inbox.hello("a", make_hello("a"))
    assert send(inbox, "a", range(3)) == ["new", "new", "overrun"]


def test_batches_that_were_taken_back_are_not_waited_for_and_those_that_came_still_take_room() -> (
    None
):
    inbox = make_inbox()
    number, rows = window(inbox.hello("a", make_hello("a")), "a")
    assert send(inbox, "a", range(3)) == ["new"] * 3
    replies = inbox.hello("a", make_hello("a", number, rows, base=1, gone=(3, 5)))
    assert isinstance(replies[-1][1], Welcome) and replies[-1][1].held == (1, 2)
    assert window(replies, "a")[1] == 7, "one row lies here that the sender counts no more"
    assert inbox.depth.rows == 3
    assert send(inbox, "a", range(4, 5)) + send(inbox, "a", range(6, 8)) == ["new"] * 3
    inbox.acknowledge("a", Life(attempt=1), 0)
    assert inbox.depth.rows == 5
    assert not inbox.ended
    inbox.hello("a", make_hello("a", number, rows, base=1, gone=(3, 5), ended=True))
    assert inbox.ended


def test_a_stream_begins_again_only_after_its_end_was_confirmed_and_goes_by_no_older_answer() -> (
    None
):
    inbox = make_inbox()
    outbox = Outbox(edge="edge", sender="a", life=Life(attempt=1), schema=encode_schema(SCHEMA))
    outbox.end()
    assert not outbox.reopen()
    first, second = (inbox.hello("a", outbox.hello())[-1][1] for _ in range(2))
    assert isinstance(first, Welcome) and isinstance(second, Welcome)
    outbox.welcome(first)
    assert outbox.reopen() and not outbox.reopen()
    outbox.welcome(replace(second, window_rows=3, window_bytes=3000))
    assert outbox.room() == 0, "that answer was given before"
    third = inbox.hello("a", outbox.hello())[-1][1]
    assert isinstance(third, Welcome) and not inbox.ended
    outbox.welcome(third)
    assert outbox.room() == 8


def test_nothing_new_goes_over_a_link_that_ended_whatever_its_window() -> None:
    outbox = Outbox(edge="edge", sender="a", life=Life(attempt=1), schema=encode_schema(SCHEMA))
    answer = make_inbox().hello("a", outbox.hello())[-1][1]
    assert isinstance(answer, Welcome)
    outbox.welcome(answer)
    assert outbox.room() == outbox.room(Credit(rows=1, bytes=1)) == 8
    outbox.end()
    assert outbox.room() == outbox.room(Credit(rows=1, bytes=1)) == 0


def test_a_stream_that_begins_again_takes_no_share_before_the_others_gave_it_back() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a", next=0))
    number, rows = window(inbox.hello("a", make_hello("a", next=0, ended=True)), "a")
    assert rows == 0
    assert window(inbox.hello("b", make_hello("b")), "b")[1] == 8
    replies = inbox.hello("a", make_hello("a", number, rows))
    assert window(replies, "a")[1] == 0
    number, rows = window(replies, "b")
    assert rows == 4
    assert window(inbox.hello("b", make_hello("b", number, rows)), "a")[1] == 4


def test_a_sender_that_restarted_with_nothing_under_way_leaves_its_share_when_it_ends() -> None:
    inbox = make_inbox()
    inbox.hello("a", make_hello("a"))
    inbox.hello("a", replace(make_hello("a", next=0), life=Life(attempt=2)))
    inbox.hello("b", make_hello("b"))
    assert (
        window(
            inbox.hello("a", replace(make_hello("a", next=0, ended=True), life=Life(attempt=2))),
            "b",
        )[1]
        == 8
    )
