"""The process that has a run's ledger open: a socket, and the handler behind it."""

import logging
import signal
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from dataflow.errors import RunError
from dataflow.folder.ledger.methods import method_of
from dataflow.folder.ledger_service.handler import Deferred, RequestHandler
from dataflow.folder.ledger_service.messages import (
    FROM_LEDGER,
    TO_LEDGER,
    Answer,
    Join,
    Record,
    ToLedger,
)
from dataflow.system.messages import MessageError
from dataflow.system.security import Guard, RunKeys, reachable

STOP = signal.SIGUSR1
"""The signal that ends its process."""

log = logging.getLogger(__name__)

_REFUSALS = 20
"""The most invalid messages that are reported."""
_AT_ONCE = 256
"""The most messages for one flush."""
_WAKES = 4096


class LedgerService:
    """One socket at which all workers ask.

    consumes: messages of clients, wherever they are; flushes that are done
    produces: answers
    waits for: either
    unblocked by: either; `stop`, from a signal handler
    """

    def __init__(
        self, handler: Callable[[], RequestHandler], address: str, keys: RunKeys | None
    ) -> None:
        """handler: opened when somebody asks for the first time. address: tcp://HOST:PORT, with the
        run's keys, or ipc://PATH. Errors: RunError when it cannot be had.
        """
        self._open = handler
        self._opened: RequestHandler | None = None
        self._aside = ThreadPoolExecutor(1, "flush")
        self._done: deque[tuple[bytes, Answer]] = deque()
        self._woken, self._wake = socket.socketpair()
        self._refused, self._stops = 0, False
        self._guard = None if keys is None else Guard(keys.receivers)
        self._zmq: zmq.Context[Any] = zmq.Context() if self._guard is None else self._guard.context
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 200)
        self._router.set(zmq.MAXMSGSIZE, TO_LEDGER.max_bytes)
        if self._guard is not None:
            self._guard.protect(self._router)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise RunError(
                f"the ledger's service cannot listen at {address}: {error.strerror}; give an"
                " address of this machine, with a port that is free"
            ) from None
        self.address = reachable(self._router.get_string(zmq.LAST_ENDPOINT))
        """The address at which it listens."""

    def stop(self) -> None:
        """End soon."""
        self._stops = True
        self._wake.send(b"\0")

    def run(self) -> None:
        """Answer until it is stopped. Errors: Replaced, once another scheduler holds the run."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._stops:
            self.turn(dict(poller.poll()))

    def turn(self, ready: "dict[Any, int]") -> None:
        """Take in what has come. What is waited for is on the disk itself before it is answered:
        this host may end, and with it what the disk has not, while those go on who were told that
        it is done.
        """
        if self._woken.fileno() in ready:
            self._woken.recv(_WAKES)
            while self._done:
                self._say(*self._done.popleft())
        answers: list[tuple[bytes, Answer]] = []
        is_to_flush = False
        while self._router in ready and len(answers) < _AT_ONCE and self._router.poll(0):
            client, *frames = self._router.recv_multipart()
            try:
                message = TO_LEDGER.decode(b"".join(frames))
            except MessageError as error:
                self._refuse(error)
                continue
            answer = self._handler.hear(message)
            is_to_flush |= _must_last(message)
            if isinstance(answer, Deferred):
                self._aside.submit(self._finish, client, answer.answer)
            else:
                answers.append((client, answer))
        if is_to_flush:
            self._handler.flush()
        for client, answer in answers:
            self._say(client, answer)

    def close(self) -> None:
        """Close the socket; clients repeat what is unanswered."""
        self._router.close()
        self._aside.shutdown()
        self._wake.close()
        self._woken.close()
        if self._guard is not None:
            self._guard.close()
        else:
            self._zmq.term()

    def _refuse(self, error: MessageError) -> None:
        self._refused += 1
        if self._refused <= _REFUSALS:
            log.warning("refused a message at the ledger's socket: %s", error)

    @property
    def _handler(self) -> RequestHandler:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _finish(self, client: bytes, answer: Callable[[], Answer]) -> None:
        self._done.append((client, answer()))
        self._wake.send(b"\0")

    def _say(self, client: bytes, answer: Answer) -> None:
        self._router.send_multipart([client, FROM_LEDGER.encode(answer)])


def _must_last(message: ToLedger) -> bool:
    """Whether the requester relies on the result being on the disk: for all but marks of groups
    under way.
    """
    if isinstance(message, Record):
        return not method_of(message.call).is_posted
    return isinstance(message, Join)
