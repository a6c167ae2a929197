"""The threads of one rank. In one it keeps its deadlines and speaks with the coordinator; on source
rank 0 it coordinates. In one for each epoch it connects, then transfers versions, one after the
other.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from transport.errors import MessageError
from transport.life import Life
from transport.numbered import Numbered
from transport.security import RunKeys
from transport.weights.errors import ReaderMismatch
from transport.weights.executors.address import HostAddress, LocalAddress, arrived, sent
from transport.weights.protocol.membership import Deadlines
from transport.weights.protocol.messages import (
    BROKEN,
    CODEC,
    FormGroup,
    GetValue,
    MemberMessage,
    Put,
    StartTransfer,
    StoredValue,
    WriterMessage,
)
from transport.weights.protocol.ranks import (
    Action,
    EndEpoch,
    ReaderRank,
    SourceRank,
    TransferOutcome,
)
from transport.weights.protocol.roster import Outgoing
from transport.weights.protocol.rounds import Coordinator
from transport.weights.sharded.process_group import CoordinatorStore, Meeting


class EpochTransfers(Protocol):
    """One rank's end of an epoch's process group."""

    def prepare(self) -> None:
        """What can be done for the next transfer before it begins; it may be done already. Never
        waits for peers.
        """

    def transfer(self, transfer: StartTransfer, deadline: float) -> TransferOutcome:
        """Send or receive a version; ends by the deadline."""

    def abort(self) -> None:
        """End what runs, from another thread; never waits long."""

    def close(self) -> None:
        """Release its resources, in its own thread: nothing runs any more."""


class EpochThread(threading.Thread):
    """Consumes: transfers. Produces: outcomes. Waits for: its peers. Unblocked by: them, `abort`,
    `look`.
    """

    def __init__(
        self,
        connect: Callable[[threading.Event], EpochTransfers],
        formed: Callable[[str, str], None],
        transferred: Callable[[StartTransfer, TransferOutcome], None],
    ) -> None:
        """`connect` is given what `abort` sets, and gives up when it is.

        `formed` is told what is wrong, and which reader's layout does not fit, if it is that.
        """
        super().__init__(name="weights", daemon=True)
        self._connect, self._formed, self._transferred = connect, formed, transferred
        self._jobs: queue.SimpleQueue[Callable[[EpochTransfers], None] | None] = queue.SimpleQueue()
        self._end: EpochTransfers | None = None
        self._over = threading.Event()
        self._aborting: threading.Thread | None = None
        self._deadline = math.inf
        """Of the transfer under way."""
        self._is_late = False
        self.start()

    def transfer(self, transfer: StartTransfer, deadline: float) -> None:
        """Begin a transfer; its outcome comes later."""
        self._jobs.put(
            lambda end: self._transferred(transfer, self._transfer(end, transfer, deadline))
        )

    def prepare(self) -> None:
        """A buffer is free."""
        self._jobs.put(_prepare)

    def look(self, now: float) -> None:
        """Break off a transfer whose deadline has passed."""
        if now >= self._deadline:
            self._deadline, self._is_late = math.inf, True
            self._break_off()

    def abort(self) -> None:
        """End everything; returns at once, whatever the thread is doing."""
        self._over.set()
        self._jobs.put(None)
        self._break_off()

    def _break_off(self) -> None:
        if end := self._end:
            self._aborting = threading.Thread(target=end.abort, name="weights-abort", daemon=True)
            self._aborting.start()

    def ended(self, timeout_s: float) -> bool:
        """Whether its threads end within that time, after `abort`."""
        deadline = time.monotonic() + timeout_s
        threads = [self, self._aborting] if self._aborting else [self]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def run(self) -> None:
        """Work until the epoch is over."""
        try:
            end = self._connect(self._over)
        except ReaderMismatch as error:
            return self._formed(str(error), error.reader)
        except Exception as error:
            return self._formed(_in_words(error), "")
        self._end = end
        if self._over.is_set():
            end.abort()
        else:
            self._formed("", "")
            _prepare(end)
            while (job := self._jobs.get()) is not None:
                job(end)
        end.close()
        return None

    def _transfer(
        self, end: EpochTransfers, transfer: StartTransfer, deadline: float
    ) -> TransferOutcome:
        self._deadline = deadline
        try:
            outcome = end.transfer(transfer, deadline)
        except Exception as error:
            outcome = TransferOutcome(BROKEN, _in_words(error))
        finally:
            self._deadline = math.inf
        if outcome.state == BROKEN and self._is_late:
            return TransferOutcome(
                BROKEN, f"it was not over at its deadline: {outcome.fault}"[:300]
            )
        return outcome


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _prepare(end: EpochTransfers) -> None:
    # the group is broken: the next transfer, or its end, will show it
    with contextlib.suppress(RuntimeError):
        end.prepare()


SELF = b"0"
"""The coordinator's own rank among its peers."""
ENDING_S = 4.0
"""For transfers that were given up to end, when all is closed."""


@dataclass(frozen=True)
class NetworkEnd:
    """Of one end, where others are on other hosts."""

    address: str
    """By which they find it; gloo and NCCL listen there."""
    keys: RunKeys = field(repr=False)
    """Of the run."""


class CoordinatorSocket:
    """The address, claimed for a coordinator: a socket, and within a machine a folder where process
    groups meet.
    """

    def __init__(self, address: str, keys: RunKeys | None = None, attempt: int = 0) -> None:
        """`keys`: the run's; then other hosts reach the address, and process groups meet over the
        line. `attempt`: the scheduler's, at this process; higher than that of any that listened
        there before.

        AddressTaken when another live writer has it.
        """
        self._members: dict[bytes, Numbered] = {}
        self._session = Life(attempt=attempt).first_number
        self.store = ""
        """Prefix of the files in which process groups meet; empty: there are none."""
        with contextlib.ExitStack() as undo:
            if keys is not None:
                place = HostAddress(address, keys)
                self.socket = place.bound()
                self.address = place.url
                """Where it is heard."""
                undo.callback(place.release)
            else:
                local = LocalAddress(address)
                undo.callback(local.release, local.claim())
                folder, self.address = Path(f"{local.lock_path}.groups"), local.url
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                self.store, self.socket = f"{folder}/", local.bound()
            self._release = undo.pop_all()

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        """False when the peer is known to be gone: earlier messages may then be lost, too."""
        frames = self._member(peer).frames(CODEC.encode(message), time.monotonic(), is_kept=True)
        is_there = sent(self.socket, peer, *frames)
        if not is_there:
            self._member(peer).begin_anew()
        return is_there

    def heard(self) -> Iterator[tuple[bytes, bytes]]:
        """Messages with their senders; lost ones are sent and requested again."""
        while frames := arrived(self.socket):
            peer, now = frames[0], time.monotonic()
            with contextlib.suppress(MessageError):
                message = self._member(peer).take(frames[1:], now)
                for missed in self._member(peer).missing(now):
                    sent(self.socket, peer, *missed)
                if message is not None:
                    yield peer, message

    def _member(self, peer: bytes) -> Numbered:
        return self._members.setdefault(peer, Numbered(self._session))

    def close(self) -> None:
        """Leave the address."""
        self.socket.close()
        self._release.close()


class MemberSocket:
    """A member's socket to the coordinator, which may be started again elsewhere."""

    def __init__(
        self, address: str, keys: RunKeys | None = None, seek: Callable[[], str] = lambda: ""
    ) -> None:
        """`seek`: returns the coordinator's address; empty while unknown."""
        self._address, self._seek, self._numbered = address, seek, Numbered()
        self.socket = (
            LocalAddress(address) if keys is None else HostAddress(address, keys)
        ).connected()

    def follow(self) -> None:
        """Turn to where the coordinator is, if that is elsewhere."""
        if (address := self._seek()) and address != self._address:
            self.socket.disconnect(self._address)
            self.socket.connect(address)
            self._address = address
            self._numbered.begin_anew(with_another=True)

    def say(self, message: bytes) -> None:
        """Hand over a message."""
        sent(self.socket, *self._numbered.frames(message, time.monotonic(), is_kept=True))

    def heard(self) -> Iterator[bytes]:
        """The coordinator's messages; lost ones are sent and requested again."""
        while frames := arrived(self.socket):
            now = time.monotonic()
            with contextlib.suppress(MessageError):
                message = self._numbered.take(frames, now)
                for missed in self._numbered.missing(now):
                    sent(self.socket, *missed)
                if message is not None:
                    yield message

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class ControlThread(threading.Thread):
    """Consumes: messages, ends of work. Produces: messages, work. Waits for: sockets, at most a
    part of a heartbeat.

    Unblocked by: messages, `act` of another thread, the time. Every use of `member` holds
    `changed`.
    """

    def __init__(
        self,
        member: SourceRank | ReaderRank,
        connect: Callable[[FormGroup, Meeting], EpochTransfers],
        *,
        line: MemberSocket | None,
        deadlines: Deadlines,
        clock: Callable[[], float],
        coordinator: Coordinator | None = None,
        listener: CoordinatorSocket | None = None,
        heard: Callable[[], None] = lambda: None,
        host: str = "",
    ) -> None:
        """`connect`: makes the end of an epoch, in a thread of its own. `line`: None beside the
        coordinator.

        `heard`: called, with `changed` held, after the member has heard a message. `host`: the
        address of this host for the others; empty: all are on one.
        """
        super().__init__(name="weights-control", daemon=True)
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        """What ended the thread."""
        self.member, self.coordinator = member, coordinator
        self._connect, self._line, self._listener, self._clock = connect, line, listener, clock
        self._heard, self._host = heard, host
        self._followed = clock()
        self._deadlines = deadlines
        self._threads: dict[int, EpochThread] = {}
        self._stores: dict[int, CoordinatorStore] = {}
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
                case FormGroup():
                    if not self._closing:  # then nobody would end it
                        self._open(action)
                case StartTransfer():
                    if thread := self._threads.get(action.epoch):
                        thread.transfer(action, self._clock() + self._deadlines.transfer_s)
                case EndEpoch():
                    self._stores.pop(action.epoch, None)
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
        # A thread that came back from C++ while the interpreter winds down would take the process
        # with it.
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
        for end in (self._line, self._listener, self._woken, self._waker):
            if end is not None:
                end.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for end in (self._line, self._listener):
            if end is not None:
                poller.register(end.socket, zmq.POLLIN)
        while True:
            with self.changed:
                self._hear()
                now = self._clock()
                if due := self.member.tick(now):
                    self.act(due)
                self._follow(now)
                for thread in self._threads.values():
                    thread.look(now)
                if self.coordinator:
                    self.route(self.coordinator.tick(now))
                closing = self._closing
            # others first: this rank's own work may keep their messages from a processor
            self._flush()
            with self.changed:
                self._deliver()
            self._flush()
            if closing:
                return
            if not self._inbox:
                poller.poll(max(1, int(self._deadlines.heartbeat_s * 250)))

    def _follow(self, now: float) -> None:
        """Look for a silent coordinator elsewhere: it may have been restarted."""
        if (
            self._line
            and now - max(self.member.heard, self._followed) >= 2 * self._deadlines.heartbeat_s
        ):
            self._followed = now
            self._line.follow()

    def _end(self, thread: EpochThread) -> None:
        thread.abort()
        self._ending = [older for older in self._ending if not older.ended(0.0)] + [thread]

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        now = self._clock()
        if self._listener and self.coordinator:
            for peer, encoded in self._listener.heard():
                with contextlib.suppress(MessageError):
                    if isinstance(message := CODEC.decode(encoded), MemberMessage):
                        self.route(self.coordinator.receive(peer, message, now))
        if self._line:
            for encoded in self._line.heard():
                with contextlib.suppress(MessageError):
                    if isinstance(message := CODEC.decode(encoded), WriterMessage):
                        self._inbox.append(message)

    def _deliver(self) -> None:
        """Hand the coordinator's messages to the member, until none is left."""
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, StoredValue) and (store := self._stores.get(message.epoch)):
                store.told(message)
            self.act(self.member.receive(message, self._clock()))
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
            elif self._line:
                self._line.say(CODEC.encode(entry))

    def _open(self, form: FormGroup) -> None:
        def formed(fault: str, misfit: str) -> None:
            with self.changed:
                self.act(self.member.formed(form.epoch, fault, misfit))

        def transferred(transfer: StartTransfer, outcome: TransferOutcome) -> None:
            with self.changed:
                self.act(self.member.transferred(transfer.epoch, transfer.round, outcome))

        def put(message: Put | GetValue) -> None:
            with self.changed:
                self.act([message])

        store = None if form.store else CoordinatorStore(form.epoch, put)
        if store is not None:
            self._stores[form.epoch] = store

        def connect(over: threading.Event) -> EpochTransfers:
            return self._connect(
                form, Meeting(store=form.store, host=self._host, line=store, over=over)
            )

        self._threads[form.epoch] = EpochThread(connect, formed, transferred)
