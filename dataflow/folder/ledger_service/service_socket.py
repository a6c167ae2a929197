"""One socket from a client to the ledger's service: finds it again where another one has taken its
place."""

import contextlib
from collections.abc import Callable
from typing import Any

import zmq

from dataflow.folder.ledger_service.messages import FROM_LEDGER, TO_LEDGER, Answer, ToLedger
from dataflow.system.messages import MessageError
from dataflow.system.security import RunKeys, give_up_soon, present


class ServiceSocket:
    """Sends, and receives what comes; neither ever waits but `heard`, for as long as it is told."""

    def __init__(self, address: str, keys: RunKeys | None, seek: Callable[[], str]) -> None:
        """seek: where the service is now; empty where nobody knows."""
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._keys, self._seek = keys, seek
        self.address = address
        self._dealer = self._connected()

    def say(self, message: ToLedger) -> None:
        """Send; lost where nobody takes it."""
        with contextlib.suppress(zmq.Again):  # it is said again
            self._dealer.send(TO_LEDGER.encode(message), zmq.NOBLOCK)

    def heard(self, wait_s: float) -> list[Answer]:
        """What has come, within so many seconds."""
        found: list[Answer] = []
        if not self._dealer.poll(int(wait_s * 1000)):
            return found
        while self._dealer.poll(0):
            try:
                found.append(FROM_LEDGER.decode(b"".join(self._dealer.recv_multipart())))
            except MessageError:  # of whoever listens there now
                continue
        return found

    def look(self) -> None:
        """Connect anew, to another service where there is one: what was on its way is forgotten."""
        self.address = self._seek() or self.address
        self._dealer.close()
        self._dealer = self._connected()

    def close(self, linger_ms: int = 0) -> None:
        """Let go of it."""
        self._dealer.close(linger_ms)
        self._zmq.term()

    def _connected(self) -> "zmq.Socket[bytes]":
        dealer: zmq.Socket[bytes] = self._zmq.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.MAXMSGSIZE, FROM_LEDGER.max_bytes)
        if self._keys is not None:
            present(dealer, self._keys.senders)
        give_up_soon(dealer, self.address)
        dealer.connect(self.address)
        return dealer
