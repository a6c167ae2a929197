"""What an agent passes on for the workers of its host: all messages in order, of heartbeats the
last of each worker.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dataflow.agent.messages import FromWorkers
from dataflow.agent.relay import Relay, address
from dataflow.scheduler.agents import HostMessages
from dataflow.worker.messages import (
    TO_SCHEDULER,
    TO_WORKER,
    Bye,
    FromWorker,
    Heard,
    Heartbeat,
    Ready,
    Start,
)
from transport.life import Life


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    made = Relay(tmp_path)
    yield made
    made.close()


@pytest.fixture
def worker(tmp_path: Path, relay: Relay) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.IDENTITY, b"w-0")
        dealer.set(zmq.LINGER, 0)
        dealer.connect(address(str(tmp_path)))
        yield dealer


def beat(rss: int) -> Heartbeat:
    return Heartbeat(life=Life(), nodes={}, rss_bytes=rss)


def say(
    relay: Relay, worker: "zmq.Socket[bytes]", *messages: FromWorker, answers: bool = True
) -> None:
    for message in messages:
        worker.send(TO_SCHEDULER.encode(message))
        assert relay.socket.poll(5000)
        relay.hear(answers=answers)


def read(said: FromWorkers | None) -> list[FromWorker]:
    assert said is not None and set(said.names) == {"w-0"}
    return [TO_SCHEDULER.decode(message) for message in said.messages]


def test_words_are_passed_on_soon_and_in_order_and_of_heartbeats_the_last_at_each_beat(
    relay: Relay, worker: "zmq.Socket[bytes]"
) -> None:
    relay.beat_s = 1.0
    relay.due(100.0)
    say(relay, worker, beat(1), beat(2))
    assert relay.due(100.5) is None
    say(relay, worker, Ready(life=Life()), beat(3), beat(4))
    assert read(relay.due(100.6)) == [beat(2), Ready(life=Life())]
    assert read(relay.due(101.0)) == [beat(4)]
    assert relay.due(103.0) is None
    say(relay, worker, beat(5), Bye(life=Life()), beat(6))
    assert read(relay.due(103.1, last=True)) == [
        beat(5),
        Bye(life=Life()),
        beat(6),
    ], "as it has ended"


def test_a_heartbeat_is_answered_only_while_the_scheduler_is_there(
    relay: Relay, worker: "zmq.Socket[bytes]"
) -> None:
    say(relay, worker, beat(1), answers=False)
    assert not worker.poll(100)
    say(relay, worker, beat(2))
    assert worker.poll(5000) and TO_WORKER.decode(worker.recv()) == Heard()
    relay.say(["w-0", "nobody"], [TO_WORKER.encode(Start())] * 2)
    assert worker.poll(5000) and TO_WORKER.decode(worker.recv()) == Start()


def test_each_host_gets_one_message_and_very_many_workers_are_heard_less_often() -> None:
    messages = HostMessages(hang_s=15.0)
    changed = [number for number in range(4096) if messages.slows(number + 1)]
    assert 0 < len(changed) < 20 and 3.0 < messages.beat_s <= 4.0
    for name, host in (("w-0", "h0"), ("w-1", "h0"), ("w-8", "h1")):
        messages.say(name, host, name.encode())
    assert {host: list(tell.names) for host, tell in messages.tells()} == {
        "h0": ["w-0", "w-1"],
        "h1": ["w-8"],
    }
    assert not list(messages.tells())


def test_however_many_workers_there_are_none_is_silent_for_so_long_that_it_seems_to_hang() -> None:
    messages = HostMessages(hang_s=3.0)
    messages.slows(8192)
    assert 0.8 < messages.beat_s <= 1.0
