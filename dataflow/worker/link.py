"""A worker's line to the scheduler: a small thread that beats, passes words on, and notices that nobody is there."""

import collections
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import zmq

from dataflow.system import stacks
from dataflow.system.clocks import AwakeClock
from dataflow.system.security import MESSAGE_BYTES, RunKeys, present, word

ALONE = os.EX_TEMPFAIL
"""Exit status of a worker that had no scheduler any more."""
BEAT_S = 0.2
SEEK_S = 2.0
"""Without a word for so long it looks where the scheduler is, and again after as much."""
_UNSENT = 100
"""Messages that wait for a scheduler that is not there; the beats after them are left out."""


class Link:
    """Owns the control socket so that the worker's loop never waits for it.

    consumes: words from the scheduler (msgpack maps with "kind")
    produces: hello, beats (the newest snapshot), events; the stacks of all threads, also while the others are stuck
    waits for: the scheduler; after `patience_s` without a word from it, `orphaned` is called, and `found` with the next
    unblocked by: its answers to the beats; those of another one, which `seek` finds
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        orphaned: Callable[[], None],
        patience_s: float = 30.0,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        keys: RunKeys | None = None,
        clock: Callable[[], float] | None = None,
        found: Callable[[], None] = lambda: None,
        seek: Callable[[], str] = lambda: "",
    ) -> None:
        """address: the scheduler's; name: this worker's; orphaned, found: called in the thread, once each time; keys:
        the run's; clock: of this process, which stands still while it is stopped; seek: where the scheduler is now,
        empty where nobody knows."""
        self._clock = clock or AwakeClock()
        self._keys = keys
        self._own, self._zmq = context is None, context or zmq.Context()
        self._name, self._address = name, address
        self._orphaned, self._found, self._patience_s = orphaned, found, patience_s
        self._seek = seek
        self._words: collections.deque[dict[str, Any]] = collections.deque()
        self._events: collections.deque[dict[str, Any]] = collections.deque()
        self._beat: Callable[[], Mapping[str, Any]] = dict
        self._stop = threading.Event()
        self._wake_in = self._zmq.socket(zmq.PAIR)
        self._wake_in.bind(f"inproc://wake-{os.getpid()}-{name}")
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)

    def start(self, beat: Callable[[], Mapping[str, Any]]) -> None:
        """Begin; `beat` is called in the thread and must only read."""
        self._beat = beat
        self._thread.start()

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Readable when a word has come."""
        return self._wake_in

    def words(self) -> list[dict[str, Any]]:
        """The words that have come since the last call."""
        while self._wake_in.poll(0):
            self._wake_in.recv()
        found = []
        while self._words:
            found.append(self._words.popleft())
        return found

    def send(self, kind: str, **values: Any) -> None:
        """Tell the scheduler something; it leaves with the next beat, at most 50 ms from now."""
        self._events.append({"kind": kind, **values})

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._wake_in.close(0)
        if self._own and not self._thread.is_alive():
            self._zmq.term()  # returns when the last words have left, or after their socket's linger

    def _serve(self) -> None:
        wake = self._zmq.socket(zmq.PAIR)
        wake.connect(f"inproc://wake-{os.getpid()}-{self._name}")
        dealer = self._zmq.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, self._name.encode())
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.setsockopt(zmq.SNDHWM, _UNSENT)
        dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        if self._keys is not None:
            present(dealer, self._keys.senders)
        dealer.connect(self._address)
        heard = beaten = sought = self._clock()
        alone = False
        try:
            while True:
                stopping = self._stop.is_set()
                now = self._clock()
                while self._events and dealer.poll(0, zmq.POLLOUT):
                    dealer.send(msgpack.packb(self._events.popleft()))
                if now - beaten >= BEAT_S and dealer.poll(0, zmq.POLLOUT):
                    beaten = now
                    dealer.send(msgpack.packb({"kind": "beat", **self._beat()}))
                if stopping:
                    return
                if dealer.poll(50):
                    heard = now
                    if alone:
                        alone = False
                        self._found()
                    said = word(dealer.recv_multipart()[0])
                    if said is None:
                        continue
                    if said["kind"] == "ask_stacks":
                        self.send("stacks", threads=stacks.take())
                    elif said["kind"] != "heard":
                        self._words.append(said)
                        wake.send(b"")
                    continue
                if now - max(heard, sought) > SEEK_S:
                    sought = now
                    self._follow(dealer)
                if not alone and now - heard > self._patience_s:
                    alone = True
                    self._orphaned()
        finally:
            dealer.close()
            wake.close(0)

    def _follow(self, dealer: "zmq.Socket[bytes]") -> None:
        """Turn to another scheduler where there is one; the one before may live, and not speak."""
        address = self._seek()
        if address and address != self._address:
            dealer.disconnect(self._address)
            dealer.connect(address)
            self._address = address
