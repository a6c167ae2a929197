"""A worker's line to the scheduler: a thread that sends heartbeats, passes messages on, and notices
when the scheduler is gone.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Callable

import zmq

from dataflow.system import stacks
from dataflow.system.clocks import AwakeClock
from dataflow.system.messages import Life, MessageError
from dataflow.system.security import RunKeys, dealer_to
from dataflow.worker.messages import (
    TO_SCHEDULER,
    TO_WORKER,
    AskStacks,
    FromWorker,
    Heard,
    Heartbeat,
    Stacks,
    ToWorker,
)

HEARTBEAT_S = 0.2
SEEK_S = 2.0
"""After so many seconds without a message it looks where the scheduler is, and again after as
many."""
_UNSENT = 100
"""The most messages that wait for an absent scheduler; later heartbeats are left out."""


class SchedulerLink:
    """Owns the control socket so that the worker's loop never waits for it.

    consumes: messages of the scheduler
    produces: heartbeats, and what the worker sends; the stacks of all threads, also while the
        others are stuck
    waits for: the scheduler; after `patience_s` without a message, `orphaned` is called, and
        `found` with the next
    unblocked by: its answers to the heartbeats; those of another one, which `seek` finds
    """

    def __init__(
        self,
        address: str,
        name: str,
        life: Life = Life(),
        *,
        orphaned: Callable[[], None],
        patience_s: float = 30.0,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        keys: RunKeys | None = None,
        clock: Callable[[], float] | None = None,
        found: Callable[[], None] = lambda: None,
        seek: Callable[[], str] = lambda: "",
    ) -> None:
        """address: the scheduler's; name, life: this worker's; orphaned, found: called in the
        thread, once each time; keys: the run's; clock: of this process, which stands still while it
        is stopped; seek: where the scheduler is now, empty where nobody knows.
        """
        self._clock = clock or AwakeClock()
        self._keys = keys
        self._own, self._zmq = context is None, context or zmq.Context()
        self._name, self._life, self._address = name, life, address
        self._orphaned, self._found, self._patience_s = orphaned, found, patience_s
        self._seek = seek
        self._messages: collections.deque[ToWorker] = collections.deque()
        self._outgoing: collections.deque[FromWorker] = collections.deque()
        self._heartbeat: Callable[[], Heartbeat] = lambda: Heartbeat(life=life, nodes={})
        self._stop = threading.Event()
        self._wake_in = self._zmq.socket(zmq.PAIR)
        self._wake_in.bind(f"inproc://wake-{os.getpid()}-{name}")
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)

    def start(self, heartbeat: Callable[[], Heartbeat] | None = None) -> None:
        """Begin, if it has not; `heartbeat` is called in the thread and must only read; None: it
        tells of nothing.
        """
        self._heartbeat = heartbeat or self._heartbeat
        if self._thread.ident is None:
            self._thread.start()

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Readable when a message has come."""
        return self._wake_in

    def messages(self) -> list[ToWorker]:
        """The messages since the last call."""
        while self._wake_in.poll(0):
            self._wake_in.recv()
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def send(self, message: FromWorker) -> None:
        """Send a message to the scheduler; it leaves at most 50 ms from now."""
        self._outgoing.append(message)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._wake_in.close(0)
        if self._own and not self._thread.is_alive():
            # returns when the last messages have left, or after their socket's linger
            self._zmq.term()

    def _serve(self) -> None:
        wake = self._zmq.socket(zmq.PAIR)
        wake.connect(f"inproc://wake-{os.getpid()}-{self._name}")
        dealer = dealer_to(
            self._zmq,
            self._address,
            self._keys if self._address.startswith("tcp://") else None,
            {zmq.LINGER: 1000, zmq.SNDHWM: _UNSENT, zmq.IDENTITY: self._name.encode()},
        )
        dealer.connect(self._address)
        heard_at = sent = sought = self._clock()
        alone = False
        try:
            while True:
                stopping = self._stop.is_set()
                now = self._clock()
                while self._outgoing and dealer.poll(0, zmq.POLLOUT):
                    dealer.send(TO_SCHEDULER.encode(self._outgoing.popleft()))
                if now - sent >= HEARTBEAT_S and dealer.poll(0, zmq.POLLOUT):
                    sent = now
                    dealer.send(TO_SCHEDULER.encode(self._heartbeat()))
                if stopping:
                    return
                if dealer.poll(50):
                    heard_at = now
                    if alone:
                        alone = False
                        self._found()
                    with contextlib.suppress(MessageError):
                        if self._take(TO_WORKER.decode(b"".join(dealer.recv_multipart()))):
                            wake.send(b"")
                    continue
                if now - max(heard_at, sought) > SEEK_S:
                    sought = now
                    self._follow(dealer)
                if not alone and now - heard_at > self._patience_s:
                    alone = True
                    self._orphaned()
        finally:
            dealer.close()
            wake.close(0)

    def _take(self, message: ToWorker) -> bool:
        """Take in a message; whether the worker needs it."""
        if isinstance(message, AskStacks):
            self.send(Stacks(life=self._life, threads=stacks.take()))
        elif not isinstance(message, Heard):
            self._messages.append(message)
            return True
        return False

    def _follow(self, dealer: "zmq.Socket[bytes]") -> None:
        """Turn to another scheduler where there is one; the one before may live, and not speak."""
        address = self._seek()
        if address and address != self._address:
            dealer.disconnect(self._address)
            dealer.connect(address)
            self._address = address
