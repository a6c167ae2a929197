"""A consumer that stands still: nothing piles up anywhere, and it goes on as if nothing had
been.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from transport.data import Receiver, Sender
from transport.life import Life

from .rig import Rig, connect, drain, firsts, make_batch, take, until
from .siege import HONEST, SCHEMA, digest_of, rows_of
from .test_mutated_frames import FLAT_BYTES, Child

BOUND = 50


PAUSE_S, TURN_S = 120.0, 0.05


def turns_to_move(count: int, sender: Sender, receiver: Receiver, first: int) -> int:
    """Rounds of both sides until so many batches more were sent, delivered and acknowledged."""
    taken, turns, number = 0, 0, first
    while taken < count:
        turns += 1
        sender.poll()
        number += number < first + count and sender.send(make_batch(number))
        delivery = receiver.receive()
        if delivery is not None:
            assert firsts([delivery]) == [first + taken]
            delivery.ack()
            taken += 1
    return turns


def test_a_pause_of_two_minutes_costs_no_turn_and_no_memory_afterwards(folder: Path) -> None:
    rig, now = Rig("local", folder), [0.0]
    receiver = rig.receiver(capacity_rows=BOUND)
    sender = rig.sender(receiver, clock=lambda: now[0])
    connect(sender, to=receiver)
    before = turns_to_move(200, sender, receiver, first=0)
    number = 200
    while now[0] < PAUSE_S:
        number += sender.send(make_batch(number))
        sender.poll()
        receiver.poll()
        now[0] += TURN_S
        assert sender.unacknowledged <= BOUND
        assert receiver.depth[0] <= BOUND
    assert (sender.unacknowledged, receiver.depth[0], number) == (BOUND, BOUND, 200 + BOUND)
    assert firsts(take(receiver, BOUND, sender)) == list(range(200, number))
    assert turns_to_move(200, sender, receiver, first=number) == before
    rig.close()


@pytest.mark.parametrize("polled", [True, False])
def test_what_waits_for_a_consumer_that_does_not_acknowledge_stays_within_the_bound(
    rig: Rig, polled: bool
) -> None:
    receiver = rig.receiver(capacity_rows=BOUND)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    number = 0
    for _ in range(3000):
        number += sender.send(make_batch(number))
        sender.poll()
        if polled:
            receiver.poll()
    assert number == sender.unacknowledged == BOUND
    until(lambda: (receiver.poll(), receiver.depth[0] == BOUND)[1])
    assert firsts(take(receiver, BOUND, sender)) == list(range(BOUND))
    sender.finish()
    drain(sender, receiver)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_stopped_process_costs_its_sender_no_memory_and_gets_everything_once_it_goes_on(
    folder: Path, kind: str
) -> None:
    child = Child(f"ipc://{folder}/edge" if kind == "ipc" else "tcp://127.0.0.1:*")
    sender = Sender(
        edge="edge",
        sender_id=HONEST,
        life=Life(attempt=1),
        schema=SCHEMA,
        receivers=[child.address],
    )
    rng, sent, resident = np.random.default_rng(5), [], []
    until(lambda: (sender.poll(), sender.room() > 0)[1])
    _, before = child.ask()
    os.kill(child.pid, signal.SIGSTOP)
    try:
        # beyond ZeroMQ's heartbeats: the connection is lost meanwhile
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if sender.room():
                batch = rows_of(rng)
                if sender.send(batch):
                    sent.append(digest_of(batch))
            else:
                time.sleep(0.01)
                resident.append(psutil.Process().memory_info().rss)
            sender.poll()
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert max(resident) - resident[0] < FLAT_BYTES
    until(lambda: (sender.poll(), sender.unacknowledged == 0)[1])
    for _ in range(500):
        batch = rows_of(rng)
        until(lambda batch=batch: (sender.poll(), sender.send(batch))[1])  # type: ignore[misc]
        sent.append(digest_of(batch))
    sender.finish()
    until(lambda: (sender.poll(), sender.drained)[1])
    _, after = child.ask()
    assert child.end() == (0, "")
    assert [digest for _, digest in child.tally.by_sender[HONEST]] == sent
    assert after - before < 4 * FLAT_BYTES
    sender.close()
    child.kill()
