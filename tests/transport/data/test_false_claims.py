"""A peer that claims what it was never told gets nothing by it, and takes nothing from the
others.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from transport.data.credit import Credit
from transport.data.inbox import Inbox
from transport.data.messages import Data, Hello, Welcome
from transport.life import Life

CAPACITY = Credit(rows=100, bytes=1_000_000)
_AMOUNT = st.integers(0, 2**64 - 1)


def hello(sender: str, **fields: Any) -> Hello:
    known = {
        "edge": "e",
        "sender": sender,
        "life": Life(attempt=1),
        "schema": b"",
        "base": 0,
        "next": 0,
        "gone": (),
    }
    known |= {"window_rows": 0, "window_bytes": 0, "window_number": 0, "ended": False}
    return Hello(**(known | fields))


@given(rows=_AMOUNT, size=_AMOUNT, number=_AMOUNT, repeats=st.integers(1, 3))
def test_a_claimed_window_gives_no_credit_and_takes_none_from_others(
    rows: int, size: int, number: int, repeats: int
) -> None:
    inbox = Inbox(
        edge="e", life=Life(attempt=1), capacity=CAPACITY, senders=2, max_message_bytes=100_000
    )
    for _ in range(repeats):
        inbox.hello(
            "liar", hello("liar", window_rows=rows, window_bytes=size, window_number=number)
        )
    ((_, welcome),) = [one for one in inbox.hello("honest", hello("honest")) if one[0] == "honest"]
    assert isinstance(welcome, Welcome)
    assert (welcome.window_rows, welcome.window_bytes) == (50, 500_000)
    for sequence in range(20):
        data = Data(
            edge="e",
            sender="liar",
            life=Life(attempt=1),
            sequence=sequence,
            rows=40,
            bytes=1000,
            checksum=0,
        )
        if inbox.judge("liar", data)[0] == "new":
            inbox.take(data)
    assert inbox.depth.within(CAPACITY)
