"""The thread in which a rank keeps its deadlines and speaks with the coordinator; on source rank 0 it coordinates."""

from __future__ import annotations

import contextlib
import shutil
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from transport.weights.errors import MessageError
from transport.weights.executors.address import Address, Socket, arrived, sent
from transport.weights.sharded.epoch_thread import EpochThread, Party
from transport.weights.sharded.member import Abort, Actions, Connect, Destination, Move, Source
from transport.weights.sharded.rounds import Coordinator, Outgoing
from transport.weights.sharded.transfer import Outcome
from transport.weights.sharded.words import CoordinatorWord, Form, MemberWord, decode, encode

SELF = b"0"
"""The coordinator's own rank among its peers."""
ENDING_S = 4.0
"""For transfers that were given up to end, when all is closed."""


class Hall:
    """The address, claimed for a coordinator: a socket, and a folder where process groups meet."""

    def __init__(self, address: str) -> None:
        """AddressTaken when another live writer has it."""
        self._place = Address(address)
        self._lock = self._place.claim()
        self.folder = Path(f"{self._place.lock_path}.groups")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(mode=0o700)
            self.socket = self._place.bound()
        except BaseException:
            self._place.release(self._lock)
            raise

    def send(self, peer: bytes, word: CoordinatorWord) -> bool:
        """False when the peer is known to be gone."""
        return sent(self.socket, peer, encode(word))

    def close(self) -> None:
        """Leave the address."""
        self.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._place.release(self._lock)


class Control(threading.Thread):
    """Consumes: words, ends of work. Produces: words, work. Waits for: sockets, at most a fraction of a beat.

    Unblocked by: words, `act` of another thread, the time. Every use of `member` holds `changed`."""

    def __init__(
        self,
        member: Source | Destination,
        connect: Callable[[Form, threading.Event], Party],
        *,
        socket: Socket | None,
        beat_s: float,
        transfer_s: float,
        clock: Callable[[], float],
        coordinator: Coordinator | None = None,
        hall: Hall | None = None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect`: makes the party of an epoch, in a thread of its own. `socket`: None beside the coordinator.

        `heard`: called, with `changed` held, after the member has heard a word."""
        super().__init__(name="weights-control", daemon=True)
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        """What ended the thread."""
        self.member, self.coordinator = member, coordinator
        self._connect, self._socket, self._hall, self._clock = connect, socket, hall, clock
        self._heard = heard
        self._beat_s, self._transfer_s = beat_s, transfer_s
        self._threads: dict[int, EpochThread] = {}
        self._ending: list[EpochThread] = []
        self._outbox: deque[MemberWord | tuple[bytes, CoordinatorWord]] = deque()
        self._inbox: deque[CoordinatorWord] = deque()
        self._ear, self._bell = sockets.socketpair()
        for end in (self._ear, self._bell):
            end.setblocking(False)
        self._closing = False

    def act(self, actions: Actions) -> None:
        """Send the words and begin the work; the caller holds `changed`."""
        for action in actions:
            match action:
                case Connect():
                    if not self._closing:  # then nobody would end it
                        self._open(action.form)
                case Move():
                    if thread := self._threads.get(action.epoch):
                        thread.move(action, self._clock() + self._transfer_s)
                case Abort():
                    if thread := self._threads.pop(action.epoch, None):
                        self._end(thread)
                case _ if self.coordinator:
                    self.route(self.coordinator.receive(SELF, action, self._clock()))
                case _:
                    self._outbox.append(action)
        self.ring()
        self.changed.notify_all()

    def route(self, out: Outgoing) -> None:
        """Send the coordinator's words; the caller holds `changed`."""
        for peer, word in out:
            if peer == SELF:
                self._inbox.append(word)
            else:
                self._outbox.append((peer, word))

    def ring(self) -> None:
        """Wake the thread, if it is not the caller."""
        if threading.get_ident() == self.ident:
            return
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell.send(b"\0")

    def close(self, last: Actions) -> None:
        """Say the last words, end all work, and the thread."""
        with self.changed:
            self.act(last)
            self._closing = True
            for thread in self._threads.values():
                self._end(thread)
            self._threads.clear()
        self.ring()
        if self.ident is None:
            self._release()
        else:
            self.join(10)
        # A thread that came back from C++ while the interpreter winds down would take the process with it.
        deadline = self._clock() + ENDING_S
        for thread in self._ending:
            thread.ended(max(0.0, deadline - self._clock()))

    def run(self) -> None:
        """Serve until closed."""
        try:
            self._serve()
        except BaseException as error:
            self.error = error
        finally:
            with self.changed:
                self.changed.notify_all()
            self._release()

    def _release(self) -> None:
        for end in (self._socket, self._hall, self._ear, self._bell):
            if end is not None:
                end.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._ear, self._socket, self._hall.socket if self._hall else None):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            with self.changed:
                self._hear()
                now = self._clock()
                if due := self.member.tick(now):
                    self.act(due)
                for thread in self._threads.values():
                    thread.look(now)
                if self.coordinator:
                    self.route(self.coordinator.tick(now))
                self._deliver()
                closing = self._closing
            self._flush()
            if closing:
                return
            if not self._inbox:
                poller.poll(max(1, int(self._beat_s * 250)))

    def _end(self, thread: EpochThread) -> None:
        thread.abort()
        self._ending = [each for each in self._ending if not each.ended(0.0)] + [thread]

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        now = self._clock()
        if self._hall and self.coordinator:
            while frames := arrived(self._hall.socket):
                with contextlib.suppress(MessageError):
                    self.route(self.coordinator.receive(frames[0], _member(decode(frames[-1])), now))
        if self._socket:
            while frames := arrived(self._socket):
                with contextlib.suppress(MessageError):
                    self._inbox.append(_coordinator(decode(frames[-1])))

    def _deliver(self) -> None:
        """Hand the coordinator's words to the member, until none is left."""
        while self._inbox:
            self.act(self.member.receive(self._inbox.popleft(), self._clock()))
            self._heard()

    def _flush(self) -> None:
        """Send what is to be sent; a peer that is gone may lead to more."""
        while self._outbox:
            entry = self._outbox.popleft()
            if isinstance(entry, tuple):
                if self._hall and self.coordinator and not self._hall.send(*entry):
                    with self.changed:
                        # What it said last may not have been read yet.
                        self._hear()
                        self.route(self.coordinator.lost(entry[0], self._clock()))
            elif self._socket:
                sent(self._socket, encode(entry))

    def _open(self, form: Form) -> None:
        def formed(fault: str, mismatch: bool) -> None:
            with self.changed:
                self.act(self.member.formed(form.epoch, fault, mismatch))

        def moved(move: Move, outcome: Outcome) -> None:
            with self.changed:
                self.act(self.member.moved(move.epoch, move.round, outcome.state, outcome.fault))

        self._threads[form.epoch] = EpochThread(lambda stop: self._connect(form, stop), formed, moved)


def _member(word: Any) -> MemberWord:
    if not isinstance(word, MemberWord):
        raise MessageError(f"a rank spoke as the coordinator; found {type(word).__name__}; check the address")
    return word


def _coordinator(word: Any) -> CoordinatorWord:
    if not isinstance(word, CoordinatorWord):
        raise MessageError(f"the coordinator spoke as a rank; found {type(word).__name__}; check the address")
    return word
