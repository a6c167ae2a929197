"""The thread in which a rank speaks with the coordinator, by itself."""

import threading
import time

from transport.weights.protocol.membership import Deadlines
from transport.weights.protocol.messages import FormGroup
from transport.weights.sharded.control import ControlThread

FORM = FormGroup(
    epoch=7, sources=1, readers=[], layouts=[], store="", backend="gloo", bucket_bytes=1
)


class Late:
    """A member that is told of one more epoch while its control closes."""

    def __init__(self) -> None:
        self.control: ControlThread
        self.told = 0

    def tick(self, now):
        if self.told or not self.control._closing:
            return []
        self.told += 1
        return [FORM]


def test_no_epoch_begins_while_a_rank_closes():
    member, begun = Late(), threading.Event()

    def connect(form, stop):
        begun.set()
        raise AssertionError("an epoch began that nobody ends")

    control = member.control = ControlThread(
        member, connect, line=None, deadlines=Deadlines(heartbeat_s=0.01), clock=time.monotonic
    )
    control.start()
    control.close([])
    assert control.error is None
    assert member.told == 1
    assert not begun.wait(0.2)
