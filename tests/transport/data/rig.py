"""Channels of every kind for the contract suite: makes them, drives them, closes them."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from transport.data import Delivery, Receiver, Sender, SocketNetwork
from transport.data.messages import Hello, Message, encode_schema
from transport.data.sockets import Connection, ConnectionEvent, Network
from transport.life import Life

from .local_network import LocalNetwork

SCHEMA = pa.schema([("value", pa.int64()), ("tokens", pa.list_(pa.int32()))])
PATIENCE_S = 20.0
"""A deadline for what happens at once; reached only by a failure."""
_LIVES = itertools.count(1)
"""Of receivers: each that is made is a later one."""


def make_batch(first: int, rows: int = 1, tokens: int = 4) -> pa.RecordBatch:
    """Rows whose values count up from `first`, built from flat arrays."""
    offsets_R = pa.array(np.arange(rows + 1, dtype=np.int32) * tokens)
    tokens_T = pa.array(np.arange(rows * tokens, dtype=np.int32))
    values_R = pa.array(np.arange(first, first + rows))
    tokens_RT = pa.ListArray.from_arrays(offsets_R, tokens_T)
    return pa.RecordBatch.from_arrays([values_R, tokens_RT], schema=SCHEMA)


def firsts(deliveries: list[Delivery]) -> list[int]:
    """The first value of each batch."""
    return [delivery.batch["value"][0].as_py() for delivery in deliveries]


class Rig:
    """One edge over one kind of channel."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.network: Network = LocalNetwork() if kind == "local" else SocketNetwork()
        self._folder = folder
        self._made: list[Any] = []
        self._names = 0

    def new_address(self) -> str:
        """An address where nobody listens yet."""
        self._names += 1
        names = {"local": "inbox", "ipc": f"ipc://{self._folder}/inbox", "tcp": "tcp://127.0.0.1:*"}
        return names[self.kind] + ("" if self.kind == "tcp" else str(self._names))

    def receiver(self, address: str | None = None, **knobs: Any) -> Receiver:
        """A receiver; roomy unless said otherwise."""
        known = {
            "edge": "edge",
            "schema": SCHEMA,
            "life": Life(attempt=next(_LIVES)),
            "capacity_rows": 1000,
            "on_refused": lambda *_: None,
        }
        made = Receiver(
            address=address or self.new_address(), network=self.network, **(known | knobs)
        )
        self._made.append(made)
        return made

    def sender(self, *receivers: Receiver | str, **knobs: Any) -> Sender:
        """A sender to those receivers."""
        addresses = [one if isinstance(one, str) else one.address for one in receivers]
        knobs = {
            "edge": "edge",
            "sender_id": "sender",
            "life": Life(attempt=1),
            "schema": SCHEMA,
        } | knobs
        made = Sender(receivers=addresses, network=self.network, **knobs)
        self._made.append(made)
        return made

    def raw(self, receiver: Receiver) -> "RawConnection":
        """A connection that says what the test makes it say."""
        made = RawConnection(self.network.connect(receiver.address), receiver)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close all that was made."""
        for one in self._made:
            one.close()


class RawConnection:
    """A peer that speaks the protocol by hand."""

    def __init__(self, connection: Connection, receiver: Receiver) -> None:
        self.connection = connection
        self._receiver = receiver

    def up(self) -> None:
        """Wait for the connection."""
        until(lambda: self.connection.get() is ConnectionEvent.UP)

    def ask(self, message: Message, payload: Any = None) -> Message:
        """Say something and wait for an answer."""
        assert self.connection.put(message, payload)
        return self.hear()

    def hear(self) -> Message:
        """The next answer."""
        heard: list[Any] = []

        def step() -> bool:
            self._receiver.poll()
            heard.append(self.connection.get())
            return heard[-1] is not None

        until(step)
        return heard[-1]

    def hello(self, **fields: Any) -> Message:
        """Greet, as a new sender unless said otherwise."""
        known = {
            "edge": "edge",
            "sender": "raw",
            "life": Life(attempt=1),
            "schema": encode_schema(SCHEMA),
            "base": 0,
        }
        known |= {
            "next": 0,
            "gone": (),
            "window_rows": 0,
            "window_bytes": 0,
            "window_number": 0,
            "ended": False,
        }
        return self.ask(Hello(**(known | fields)))

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


def until(step: Callable[[], bool]) -> None:
    """Repeat `step` until it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not step():
        assert time.monotonic() < deadline, "waited in vain"


def connect(*senders: Sender, to: list[Receiver] | Receiver) -> None:
    """Drive both sides until every sender has room."""
    receivers = to if isinstance(to, list) else [to]

    def step() -> bool:
        for receiver in receivers:
            receiver.poll()
        for sender in senders:
            sender.poll()
        return all(sender.room() for sender in senders)

    until(step)


def settle(step: Callable[[], object], times: int = 50) -> None:
    """Give things that must not happen ample opportunity."""
    for _ in range(times):
        step()


def take(receiver: Receiver, count: int, *senders: Sender, ack: bool = True) -> list[Delivery]:
    """The next `count` deliveries, while the senders are polled."""
    taken: list[Delivery] = []

    def step() -> bool:
        for sender in senders:
            sender.poll()
        delivery = receiver.receive(0.01)
        if delivery is not None:
            taken.append(delivery)
            if ack:
                delivery.ack()
        return len(taken) >= count

    until(step)
    return taken


def drain(sender: Sender, *receivers: Receiver) -> None:
    """Drive both sides until the sender has nothing to worry about."""

    def step() -> bool:
        for receiver in receivers:
            receiver.poll()
        sender.poll()
        return sender.drained

    until(step)
