"""The thread in which a rank keeps its deadlines and speaks with the coordinator; on source rank 0 it coordinates."""

from __future__ import annotations

import contextlib
import shutil
import socket as sockets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from transport.errors import MessageError
from transport.weights.executors.address import Address, Socket, arrived, sent
from transport.weights.protocol.messages import CODEC, FormGroup, MemberMessage, WriterMessage
from transport.weights.protocol.ranks import Abort, Action, Connect, ReaderRank, SourceRank, Transfer, TransferOutcome
from transport.weights.protocol.roster import Outgoing
from transport.weights.protocol.rounds import Coordinator
from transport.weights.sharded.epoch_thread import EpochThread, EpochTransfers

SELF = b"0"
"""The coordinator's own rank among its peers."""
ENDING_S = 4.0
"""For transfers that were given up to end, when all is closed."""


class Listener:
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

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        """False when the peer is known to be gone."""
        return sent(self.socket, peer, CODEC.encode(message))

    def close(self) -> None:
        """Leave the address."""
        self.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._place.release(self._lock)


class ControlThread(threading.Thread):
    """Consumes: messages, ends of work. Produces: messages, work. Waits for: sockets, at most a part of a heartbeat.

    Unblocked by: messages, `act` of another thread, the time. Every use of `member` holds `changed`."""

    def __init__(
        self,
        member: SourceRank | ReaderRank,
        connect: Callable[[FormGroup, threading.Event], EpochTransfers],
        *,
        socket: Socket | None,
        heartbeat_s: float,
        transfer_s: float,
        clock: Callable[[], float],
        coordinator: Coordinator | None = None,
        listener: Listener | None = None,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect`: makes the end of an epoch, in a thread of its own. `socket`: None beside the coordinator.

        `heard`: called, with `changed` held, after the member has heard a message."""
        super().__init__(name="weights-control", daemon=True)
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        """What ended the thread."""
        self.member, self.coordinator = member, coordinator
        self._connect, self._socket, self._listener, self._clock = connect, socket, listener, clock
        self._heard = heard
        self._heartbeat_s, self._transfer_s = heartbeat_s, transfer_s
        self._threads: dict[int, EpochThread] = {}
        self._ending: list[EpochThread] = []
        self._outbox: deque[MemberMessage | tuple[bytes, WriterMessage]] = deque()
        self._inbox: deque[WriterMessage] = deque()
        self._woken, self._waker = sockets.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._closing = False

    def act(self, actions: Sequence[Action]) -> None:
        """Send the messages and begin the work; the caller holds `changed`."""
        for action in actions:
            match action:
                case Connect():
                    if not self._closing:  # then nobody would end it
                        self._open(action.form)
                case Transfer():
                    if thread := self._threads.get(action.epoch):
                        thread.transfer(action, self._clock() + self._transfer_s)
                case Abort():
                    if thread := self._threads.pop(action.epoch, None):
                        self._end(thread)
                case _ if self.coordinator:
                    self.route(self.coordinator.receive(SELF, action, self._clock()))
                case _:
                    self._outbox.append(action)
        self.wake()
        self.changed.notify_all()

    def prepare(self, epoch: int) -> None:
        """A buffer is free for the epoch's next transfer; the caller holds `changed`."""
        if thread := self._threads.get(epoch):
            thread.prepare()

    def route(self, out: Outgoing) -> None:
        """Send the coordinator's messages; the caller holds `changed`."""
        for peer, message in out:
            if peer == SELF:
                self._inbox.append(message)
            else:
                self._outbox.append((peer, message))

    def wake(self) -> None:
        """Wake the thread, if it is not the caller."""
        if threading.get_ident() == self.ident:
            return
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def close(self, last: Sequence[Action]) -> None:
        """Send the last messages, end all work, and the thread."""
        with self.changed:
            self.act(last)
            self._closing = True
            for thread in self._threads.values():
                self._end(thread)
            self._threads.clear()
        self.wake()
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
        for end in (self._socket, self._listener, self._woken, self._waker):
            if end is not None:
                end.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._woken, self._socket, self._listener.socket if self._listener else None):
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
                closing = self._closing
            self._flush()  # others first: this rank's own work may keep their messages from a processor
            with self.changed:
                self._deliver()
            self._flush()
            if closing:
                return
            if not self._inbox:
                poller.poll(max(1, int(self._heartbeat_s * 250)))

    def _end(self, thread: EpochThread) -> None:
        thread.abort()
        self._ending = [each for each in self._ending if not each.ended(0.0)] + [thread]

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        now = self._clock()
        if self._listener and self.coordinator:
            while frames := arrived(self._listener.socket):
                with contextlib.suppress(MessageError):
                    if isinstance(message := CODEC.decode(frames[-1]), MemberMessage):
                        self.route(self.coordinator.receive(frames[0], message, now))
        if self._socket:
            while frames := arrived(self._socket):
                with contextlib.suppress(MessageError):
                    if isinstance(message := CODEC.decode(frames[-1]), WriterMessage):
                        self._inbox.append(message)

    def _deliver(self) -> None:
        """Hand the coordinator's messages to the member, until none is left."""
        while self._inbox:
            self.act(self.member.receive(self._inbox.popleft(), self._clock()))
            self._heard()

    def _flush(self) -> None:
        """Send what is to be sent; a peer that is gone may lead to more."""
        while self._outbox:
            entry = self._outbox.popleft()
            if isinstance(entry, tuple):
                if self._listener and self.coordinator and not self._listener.send(*entry):
                    with self.changed:
                        # What it said last may not have been read yet.
                        self._hear()
                        self.route(self.coordinator.lost(entry[0]))
            elif self._socket:
                sent(self._socket, CODEC.encode(entry))

    def _open(self, form: FormGroup) -> None:
        def formed(fault: str, mismatch: bool) -> None:
            with self.changed:
                self.act(self.member.formed(form.epoch, fault, mismatch))

        def transferred(transfer: Transfer, outcome: TransferOutcome) -> None:
            with self.changed:
                self.act(self.member.transferred(transfer.epoch, transfer.round, outcome))

        self._threads[form.epoch] = EpochThread(lambda stop: self._connect(form, stop), formed, transferred)
