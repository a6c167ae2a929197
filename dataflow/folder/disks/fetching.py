"""Fetches files of a run from a peer: the agent of a host, or the ledger's service on the
scheduler's host.
"""

import itertools
import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash
import zmq

from dataflow.folder.disks.messages import (
    FROM_FILES,
    TO_FILES,
    Answer,
    CannotRead,
    FileChunk,
    Listed,
    ListFiles,
    Question,
    ReadFile,
)
from dataflow.system.files import RunFolderError, disk, write_atomically
from dataflow.system.messages import MessageError
from dataflow.system.security import RunKeys, give_up_soon, present

ANSWER_S = 20.0
"""Seconds for a host to answer a question."""
_AGAIN_S = 2.0
_TRIES = 5
"""Tries for a file that changes meanwhile."""


class Peer(Protocol):
    """A host that serves files."""

    def ask(self, what: ListFiles | ReadFile) -> Answer:
        """Its answer. Errors: RunFolderError where there is none in time."""


class HostPeer:
    """The agent of a host.

    consumes: its answers
    produces: questions
    waits for: each answer, up to a deadline
    unblocked by: it
    """

    def __init__(self, host: str, address: str, keys: RunKeys, answer_s: float = ANSWER_S) -> None:
        """address: of its files."""
        self._host, self._address, self._answer_s = host, address, answer_s
        self._tickets = itertools.count(1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, FROM_FILES.max_bytes),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.set(option, value)
        present(self._socket, keys.senders)
        give_up_soon(self._socket, address)
        self._socket.connect(address)

    def ask(self, what: ListFiles | ReadFile) -> Answer:
        question = TO_FILES.encode(Question(ticket := next(self._tickets), what))
        deadline, said_at = time.monotonic() + self._answer_s, float("-inf")
        while (now := time.monotonic()) < deadline:
            if now - said_at > _AGAIN_S and self._socket.poll(0, zmq.POLLOUT):
                said_at = now
                self._socket.send(question)
            if not self._socket.poll(100):
                continue
            try:
                answered = FROM_FILES.decode(self._socket.recv())
            except MessageError as error:
                raise RunFolderError(f"host '{self._host}' gives no files: {error}") from None
            if answered.ticket == ticket:
                return answered.what
        raise RunFolderError(
            f"host '{self._host}' has not answered within {self._answer_s:.0f} s at"
            f" {self._address}, where it gives '{what.path}'; see that it lives and is reached from"
            " here"
        )

    def close(self) -> None:
        """Let go of it."""
        self._socket.close(0)
        self._context.term()


def listed(peer: Peer, path: str) -> dict[str, int]:
    """Bytes of the files that it has at or below a path. Errors: RunFolderError."""
    reply = peer.ask(ListFiles(path))
    if isinstance(reply, CannotRead):
        raise RunFolderError(reply.why)
    assert isinstance(reply, Listed), "the answer to that"
    return dict(reply.files)


def fetch(peer: Peer, path: str, into: Path) -> int:
    """Bring a file here, whole or not at all; its bytes. Errors: RunFolderError."""

    def write(file: BinaryIO) -> None:
        stamp, size, tries = "", 1, _TRIES
        while file.tell() < size:
            chunk = _chunk(peer, path, file.tell())
            if stamp in ("", chunk.stamp):
                stamp, size = chunk.stamp, chunk.size
                file.write(chunk.data)
            elif tries := tries - 1:
                file.seek(0)  # it was written anew meanwhile
                file.truncate()
                stamp = ""
            else:
                raise RunFolderError(
                    f"'{path}' is written again and again where it lies; ask for it later"
                )
            if not chunk.data and not size:
                return

    with disk("writing", into):
        into.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(into, write, flush=False)
    return into.stat().st_size


def _chunk(peer: Peer, path: str, offset: int) -> FileChunk:
    reply = peer.ask(ReadFile(path, offset))
    if isinstance(reply, CannotRead):
        raise RunFolderError(reply.why)
    assert isinstance(reply, FileChunk), "the answer to that"
    if xxhash.xxh3_64_hexdigest(reply.data) != reply.checksum:
        raise RunFolderError(
            f"'{path}' was damaged on its way from another host; look at its memory and network"
        )
    return reply
