"""A live receiver under siege: an honest sender over a connection that adds damaged copies, a
stranger, and a liar.
"""

import sys
from collections import defaultdict
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import xxhash
import zmq

from transport.data import Receiver, Sender, SocketNetwork, messages
from transport.data.messages import Data, Hello, encode_message
from transport.data.sockets import Connection
from transport.life import Life

from .mutations import Mutator, Parts, fields_of, header

SCHEMA = pa.schema(
    [
        ("value", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("text", pa.string()),
        ("label", pa.dictionary(pa.int32(), pa.string())),
        ("groups", pa.list_(pa.list_(pa.int8()))),
    ]
)
OTHER = pa.schema(
    [("value", pa.int64()), ("tokens", pa.list_(pa.int64())), ("reward", pa.float64())]
)
MAX_MESSAGE_BYTES = 1 << 16
HONEST, LIAR = "honest", "liar"
PER_VOLLEY = 10
"""Mutated messages beside each genuine batch."""
_LIAR_LIVES = 40
"""Volleys; then it takes another name, for it may have lied itself out of its own."""
_OVERSIZED = bytes(3 << 20)


def rows_of(rng: np.random.Generator, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Random rows of a schema."""
    rows = int(rng.integers(1, 9))

    def value(kind: pa.DataType) -> Any:
        if pa.types.is_list(kind):
            return [value(kind.value_type) for _ in range(int(rng.integers(0, 12)))]
        if pa.types.is_floating(kind):
            return float(np.float32(rng.normal()))
        if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
            return "".join(chr(int(c)) for c in rng.integers(32, 1000, int(rng.integers(0, 20))))
        return int(rng.integers(-100, 100))

    columns = [pa.array([value(field.type) for _ in range(rows)], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def body_of(batch: pa.RecordBatch) -> bytes:
    """A batch as it travels; equal bodies are equal batches, byte for byte."""
    encoder = messages.BatchEncoder(batch.schema)
    return bytes(encoder.encode(batch, encoder.size_bytes(batch)))


def digest_of(batch: pa.RecordBatch) -> str:
    """Of every byte of a batch."""
    return xxhash.xxh3_64_hexdigest(body_of(batch))


class ShakenConnection:
    """The honest sender's connection: beside what it puts there travel damaged copies, and Data
    that came before.
    """

    def __init__(self, connection: Connection, mutator: Mutator, genuine: list[Parts]) -> None:
        self._connection, self._mutator, self._genuine = connection, mutator, genuine
        self.address, self.sockets = connection.address, connection.sockets
        self.get, self.wait, self.close, self.pack = (
            connection.get,
            connection.wait,
            connection.close,
            connection.pack,
        )
        self.damaged = 0

    def put(self, message: Any, payload: Any = None) -> bool:
        """As `Connection.put`, after a damaged copy."""
        parts = [encode_message(message), *([] if payload is None else [payload.bytes])]
        if self._genuine and isinstance(message, Data):
            extra = self._mutator.damaged(parts, self._genuine)
            if self._mutator.chance(0.1):
                extra = self._mutator.pick(self._genuine)
            self.sockets[0].send_multipart(extra)
            self.damaged += 1
        if isinstance(message, Data) and len(self._genuine) < 200:
            self._genuine.append(parts)
        return self._connection.put(message, payload)


class Siege:
    """Everybody who speaks to the receiver."""

    def __init__(self, address: str, seed: int) -> None:
        self.mutator = Mutator(seed)
        self.rng = self.mutator.rng
        self.genuine: list[Parts] = []
        self.sent: list[str] = []
        """Digests of what the honest sender sent, in order."""
        self.lies: dict[tuple[str, int], set[str]] = defaultdict(set)
        """By the liar's name and sequence number, digests of what can be read of bodies that it
        sealed."""
        self.fired = 0
        """Messages that nobody should take."""
        self.lives = 0
        self._address = address
        self._bodies = [body_of(rows_of(self.rng)) for _ in range(20)]
        self._others = [body_of(rows_of(self.rng, OTHER)) for _ in range(5)]
        self.sender = Sender(
            edge="edge",
            sender_id=HONEST,
            life=Life(attempt=1),
            schema=SCHEMA,
            receivers=[address],
            network=self,
            peer_timeout_s=60.0,
        )
        self._stranger, self._liar = self._raw(), self._raw()

    def connect(self, address: str) -> Any:
        """The honest sender's connection (as a Network)."""
        self.shaken = ShakenConnection(SocketNetwork().connect(address), self.mutator, self.genuine)
        return self.shaken

    def listen(self, address: str, *, max_message_bytes: int, queue_messages: int) -> Any:
        """Nobody listens here."""
        raise NotImplementedError

    def _raw(self) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.SNDTIMEO, 20_000)
        socket.set(zmq.RCVHWM, 10)
        socket.connect(self._address)
        return socket

    @property
    def liar(self) -> str:
        """Its present name."""
        return f"{LIAR}-{self.lives}"

    def volley(self, heard_of_liar: int) -> None:
        """One genuine batch, when there is credit, and `PER_VOLLEY` messages that are none."""
        number = self.fired // PER_VOLLEY
        if number % _LIAR_LIVES == 0:
            self.lives += 1
            self._liar.send(self._hello())
        batch = rows_of(self.rng)
        if self.sender.send(batch):
            self.sent.append(digest_of(batch))
        before = self.shaken.damaged
        self.sender.poll()
        self.fired += self.shaken.damaged - before
        for _ in range(PER_VOLLEY // 2):
            self._stranger.send_multipart(self._strange())
            self._liar.send_multipart(self._lie(heard_of_liar if number % _LIAR_LIVES else 0))
        self.fired = (number + 1) * PER_VOLLEY

    def _strange(self) -> Parts:
        """Of somebody who has not said who he is: damaged genuine messages, and genuine ones of
        another.
        """
        if self.mutator.chance(0.002):
            return [_OVERSIZED]
        known = self.genuine or [[self._hello(), self._bodies[0]]]
        if self.mutator.chance(0.1):
            return self.mutator.pick(known)
        return self.mutator.damaged(self.mutator.pick(known), known)

    def _lie(self, sequence: int) -> Parts:
        """Of one who is welcome, seals what he says, and sums it right."""
        if self.mutator.chance(0.25):
            hello = fields_of(self._hello())
            if self.mutator.chance(0.2):
                hello |= {"edge": "other", "schema": messages.encode_schema(OTHER)}
            return [self.mutator.forged_header(hello, keep=("sender",))]
        body = self.mutator.forged_body(
            self.mutator.pick(self._bodies), self._bodies + self._others
        )
        if self.mutator.chance(0.1):
            body = self.mutator.pick(self._others)
        batch = _read(body)
        rows = self.mutator.pick((1, 2, 3, 4, 5, 6, 7, 8)) if batch is None else batch.num_rows
        data = {
            "kind": "Data",
            "edge": "edge",
            "sender": self.liar,
            "life": Life(attempt=1),
            "sequence": sequence,
            "rows": rows,
        }
        data |= {"bytes": len(body), "checksum": xxhash.xxh3_64_intdigest(body)}
        if batch is not None:
            self.lies[self.liar, sequence].add(digest_of(batch))
        if self.mutator.chance(0.3):
            return [self.mutator.forged_header(data, keep=("kind", "sender", "sequence")), body]
        return [header(**data), body]

    def _hello(self) -> bytes:
        return encode_message(
            Hello(
                edge="edge",
                sender=self.liar,
                life=Life(attempt=1),
                schema=messages.encode_schema(SCHEMA),
                base=0,
                next=0,
                gone=(),
                window_rows=0,
                window_bytes=0,
                window_number=0,
                ended=False,
            )
        )

    def close(self) -> None:
        """Go home."""
        for socket in (self._stranger, self._liar):
            socket.close(linger=0)
        self.sender.close()


def _read(body: bytes) -> pa.RecordBatch | None:
    """The batch of a body, where there is a sound one of this schema."""
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(body))
        batch = reader.read_next_batch() if reader.schema.equals(SCHEMA) else None
        if batch is not None:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, StopIteration, MemoryError):
        return None
    return batch


def receiver_at(address: str) -> Receiver:
    """What is besieged."""
    return Receiver(
        edge="edge",
        schema=SCHEMA,
        address=address,
        life=Life(),
        capacity_rows=4000,
        max_message_bytes=MAX_MESSAGE_BYTES,
        on_refused=lambda edge, peer, reason: None,
    )


def main(address: str) -> None:
    """A receiver in a process of its own, until standard input ends.

    A line for each delivery: sender, sequence, digest. A line for each line read: `?`, refused,
    resident bytes.
    """
    receiver = receiver_at(address)
    print(receiver.address, flush=True)
    process = psutil.Process()
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    for socket in receiver.sockets:
        poller.register(socket, zmq.POLLIN)
    while True:
        while (delivery := receiver.receive()) is not None:
            print(delivery.sender, delivery.sequence, digest_of(delivery.batch), flush=True)
            delivery.ack()
        if sys.stdin.fileno() in dict(poller.poll(1000)):
            if not sys.stdin.readline():
                break
            print("?", receiver.refused, process.memory_info().rss, flush=True)
    receiver.close()


if __name__ == "__main__":
    main(sys.argv[1])
