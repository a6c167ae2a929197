"""The process that has a run's ledger open: a socket, the handler behind it, and the life of that
process as a child of the scheduler: forked before there are threads, started again when it falls.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import zmq
from msgspec.structs import replace

from dataflow.errors import Replaced, RunError
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.ledger.methods import describe, method_of, run
from dataflow.folder.ledger.schema import WRITERS
from dataflow.folder.ledger_service.files import RunFiles
from dataflow.folder.ledger_service.messages import (
    FROM_LEDGER,
    TO_LEDGER,
    Answer,
    Behind,
    Join,
    Query,
    QueryResult,
    Record,
    Recorded,
    Refused,
    Token,
    ToLedger,
)
from dataflow.system.child import Child, fork
from dataflow.system.files import RunFolderError
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.log import log_to
from dataflow.system.messages import (
    Channel,
    Codec,
    Life,
    Message,
    MessageError,
    Secret,
    field,
    replaced,
)
from dataflow.system.security import Listener, RunKeys

ANY = ""
"""Stands for a worker's name: earlier lives than its own may not write, whatever their worker."""
_ADMIT = "INSERT OR REPLACE INTO writers VALUES (?, ?, ?, ?, 0, NULL)"
_ANSWERED = "UPDATE writers SET number = ?, refusal = ? WHERE worker = ?"
_LIST = "SELECT worker, holder, attempt, session, number, refusal FROM writers"


@dataclass(frozen=True)
class Writer:
    """The newest process of a worker, and its progress."""

    token: Token
    number: int = 0
    """Number of its last write that has an answer: 1, 2, ..."""
    refusal: str | None = None
    """Why that write was not made."""


@dataclass(frozen=True)
class Deferred:
    """An answer that waits for the disk: another thread makes it."""

    answer: Callable[[], Answer]


class RequestHandler:
    """The ledger of a run in the hands of one process.

    consumes: what clients ask and have recorded
    produces: an answer to each
    waits for: the disk; a program that has the database locked, as any ledger
    unblocked by: -

    Of each worker the newest process that has joined may write, and no other one from then on: its
    number is the scheduler's, so the service need not be told of attempts, and who replaces a
    scheduler neither. A process joins before it reads anything: what the one before it wrote, it
    finds; nothing of that one comes later.
    """

    def __init__(
        self, ledger: Ledger, *, first: Life | None = None, holds: Callable[[], None] = lambda: None
    ) -> None:
        """first: earlier lives write no more, whatever their worker; None: as it was, for workers
        that were taken over. holds: raises Replaced once somebody else holds the run. Errors:
        LedgerError.
        """
        self._ledger, self._files, self._holds = ledger, RunFiles(ledger), holds
        with ledger.transaction("prepare for several hosts") as db:
            db.execute(WRITERS)
            if first is not None:
                db.execute(_ADMIT, (ANY, *first, 0))
        ledger.flush()
        with ledger.transaction("list who writes", writes=False) as db:
            self._writers = {
                worker: Writer(Token(worker, Life(scheduler, attempt), session), *written)
                for worker, scheduler, attempt, session, *written in db.execute(_LIST)
            }
        self._first = self._writers[ANY].token.life if ANY in self._writers else Life()

    def hear(self, message: ToLedger) -> Answer | Deferred:
        """Make a request, or answer why not. Errors: Replaced, once another scheduler holds the
        run: nothing was done.
        """
        try:
            self._holds()
        except RunFolderError as error:  # the disk does not say
            return _refused(message, error)
        try:
            match message:
                case Join():
                    self._admit(message.token)
                    return QueryResult(message.ticket)
                case Query():
                    return self._answered(message)
                case Record():
                    return self._recorded(message)
        except (Replaced, LedgerError, RunFolderError) as error:
            return _refused(message, error)

    def close(self) -> None:
        """Drop copies that nobody has fetched."""
        self._files.close()

    def flush(self) -> None:
        """Bring all that was made to the disk itself. Errors: RunFolderError when the disk
        refuses.
        """
        self._ledger.flush_log()

    def _recorded(self, message: Record) -> Answer:
        writer, number = self._admitted(message.token), message.number
        if number - 1 > max(writer.number, message.after):
            return Behind(writer.number + 1)
        if number > writer.number:
            writer = self._made(message)
        if writer.refusal is None:
            return Recorded(writer.number)
        return (
            Refused(0, number, "LedgerError", writer.refusal)
            if number == writer.number
            else Recorded(number)
        )

    def _made(self, message: Record) -> Writer:
        """Make a write, or note why it is not made. Errors: LedgerError when the disk takes
        neither.

        That it was made stands in its own transaction, so that one who did not hear of it can ask
        for it again; a refused write is refused again, whatever has happened since.
        """
        worker, refusal = message.token.worker, None
        try:
            with self._ledger.transaction(describe(message.call)) as db:
                run(self._ledger, message.call)
                db.execute(_ANSWERED, (message.number, None, worker))
        except LedgerError as error:
            refusal = str(error)
            with self._ledger.transaction("note a refusal") as db:
                db.execute(_ANSWERED, (message.number, refusal, worker))
        self._writers[worker] = writer = Writer(message.token, message.number, refusal)
        return writer

    def _answered(self, message: Query) -> Answer | Deferred:
        writer = self._admitted(message.token)
        if writer.number < message.after:
            return Behind(writer.number + 1)
        method, name = method_of(message.call), type(message.call).__name__
        owner = self._files if hasattr(RunFiles, name) else self._ledger
        answer = partial(self._run, owner, message)
        return Deferred(answer) if method.waits_for_disk else answer()

    def _run(self, owner: object, message: Query) -> Answer:
        try:
            return QueryResult(message.ticket, run(owner, message.call))
        except (LedgerError, RunFolderError) as error:
            return _refused(message, error)

    def _admit(self, token: Token) -> None:
        writer = self._writers.get(token.worker)
        if token.life < self._first or (writer is not None and token.life < writer.token.life):
            raise self._replaced(token, writer)
        if writer is not None and writer.token == token:
            return
        with self._ledger.transaction("let a worker write") as db:
            db.execute(_ADMIT, (token.worker, *token.life, token.session))
        self._writers[token.worker] = Writer(token)

    def _admitted(self, token: Token) -> Writer:
        """The writer of a process that may write. Errors: Replaced."""
        writer = self._writers.get(token.worker)
        if writer is None or writer.token != token or token.life < self._first:
            raise self._replaced(token, writer)
        return writer

    def _replaced(self, token: Token, writer: Writer | None) -> Replaced:
        present = self._first if writer is None else max(self._first, writer.token.life)
        return Replaced(replaced(token.worker, token.life, present))


def _refused(message: ToLedger, error: RunError) -> Refused:
    ticket, number = (0, message.number) if isinstance(message, Record) else (message.ticket, 0)
    kind: Literal["LedgerError", "RunFolderError", "Replaced"] = "RunFolderError"
    if isinstance(error, Replaced):
        kind = "Replaced"
    elif isinstance(error, LedgerError):
        kind = "LedgerError"
    return Refused(ticket, number, kind, str(error))


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
        self._listener = Listener("the ledger's service", address, keys, {zmq.LINGER: 200})
        self._router, self.address = self._listener.socket, self._listener.address
        self._open = handler
        self._opened: RequestHandler | None = None
        self._aside = ThreadPoolExecutor(1, "flush")
        self._done: deque[tuple[bytes, Answer]] = deque()
        self._woken, self._wake = socket.socketpair()
        self._refused, self._stops = 0, False

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
        self._listener.close()
        self._aside.shutdown()
        self._wake.close()
        self._woken.close()

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


# The service as a child of the scheduler.


START_S = 30.0
"""Seconds for the service to listen."""
STOP_S = 5.0
_TURN_S = 0.05
_AGAIN_S = 0.25
"""Seconds before it is started again."""
_REPLACED = 3
"""Exit status of a service that finds another holder of the run."""

Holds: TypeAlias = Callable[[], None]
"""As `RunHold.check`."""


class Serve(Secret, kw_only=True):
    """Have the ledger open for all, at an address; replaces what was served before."""

    ledger: str
    address: str
    """tcp://HOST:* or with a port; ipc://PATH."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    first: Life | None = None
    """As `RequestHandler` has it."""


class Listening(Message):
    """It takes calls at this address."""

    address: str


class CannotStart(Message):
    """The service does not listen, for this reason."""

    why: str


_Said: TypeAlias = Serve | Listening | CannotStart
_CODEC: Codec[_Said] = Codec("dataflow.ledger-process", 1, Serve, Listening, CannotStart)


class LedgerProcess:
    """The service in the hands of the scheduler, with which it ends, however that ends.

    A process between the two, without threads, raises the counter of who holds the run, also while
    the scheduler waits for hosts or is stopped by Ctrl-Z, and starts the service again at the same
    address when it falls: the scheduler itself cannot fork any more by then.
    """

    def __init__(self, holds: Holds = lambda: None, log: Path | None = None) -> None:
        """Fork it; call this before the process has threads. log: where it writes what it would
        print.
        """
        self._channel, theirs = Channel.pair(_CODEC, START_S)
        self._process = fork(
            partial(_Supervisor(holds, log).run, theirs),
            keep=[theirs.fileno()],
            ends_with_parent=signal.SIGKILL,
        )
        theirs.close()
        self.address = ""
        """Where clients ask; empty before it serves."""

    def serve(
        self, ledger: Path, address: str, keys: RunKeys | None = None, first: Life | None = None
    ) -> str:
        """Serve a ledger, which need not exist before the first request; the address, once it
        listens. Errors: RunError when it does not listen in time; Replaced.
        """
        plain = {} if keys is None else keys.to_plain()
        try:
            self._channel.send(Serve(ledger=str(ledger), address=address, keys=plain, first=first))
            reply = self._channel.receive(START_S)
        except (EOFError, OSError) as error:
            self.check()
            raise RunError(
                f"the ledger's service did not start: {error}; see logs/ledger.log"
            ) from error
        if isinstance(reply, Listening):
            self.address = reply.address
            return reply.address
        assert isinstance(reply, CannotStart), "what it says"
        raise RunError(reply.why)

    def check(self) -> None:
        """Errors: Replaced once the service has found another holder of the run; RunError when it
        has ended.
        """
        status = self._process.poll()
        if status == _REPLACED:
            raise Replaced(
                f"this scheduler (process {os.getpid()}) was not heard for too long, so another one"
                " holds its run, and it ends without touching it; `dataflow doctor` tells how that"
                " goes on"
            )
        if status is not None:
            raise RunError(
                f"the ledger's service has ended with status {status}; see logs/ledger.log, then"
                " resume"
            )

    def close(self) -> None:
        """End it; what was committed stays."""
        self._channel.close()
        self._process.end(2 * STOP_S)

    def __enter__(self) -> "LedgerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Supervisor:
    """The process between scheduler and service.

    consumes: what is to be served; the end of the service
    produces: the service, started again when it falls; a counter that is raised
    waits for: either, for a moment
    unblocked by: the scheduler, which closes the channel; its end, with which the kernel ends this
        process

    Signals to all processes of a job, a terminal or a run are for the scheduler, which still needs
    the ledger then.
    """

    def __init__(self, holds: Holds, log: Path | None) -> None:
        self._holds, self._log = holds, log
        self._child: Child | None = None
        self._wanted: Serve | None = None

    def run(self, theirs: socket.socket) -> int:
        """The exit status."""
        leave_to_leader()
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        if self._log is not None:
            log_to(self._log)
        channel = Channel(theirs, _CODEC, START_S)
        try:
            while True:
                self._turn(channel)
        except Replaced as error:
            print(error, flush=True)
            return _REPLACED
        except EOFError:
            return 0
        finally:
            self._stop()

    def _turn(self, channel: Channel[_Said]) -> None:
        # the disk does not say; the service asks before it does anything
        with contextlib.suppress(RunFolderError):
            self._holds()
        if channel.readable(_TURN_S):
            for message in channel.arrived():
                assert isinstance(message, Serve), "what is said to it"
                self._stop()
                reply = self._start(message)
                if isinstance(reply, Listening):
                    self._wanted = replace(message, address=reply.address)
                channel.send(reply)
        if (
            self._child is not None
            and self._wanted is not None
            and (status := self._child.poll()) is not None
        ):
            if status == _REPLACED:
                raise Replaced("the service has found that somebody else holds the run")
            print(
                f"the ledger's service has ended with status {status}: starting it again",
                flush=True,
            )
            time.sleep(_AGAIN_S)
            self._start(self._wanted)

    def _start(self, request: Serve) -> Listening | CannotStart:
        channel, ends = Channel.pair(_CODEC, START_S)
        self._child = fork(
            partial(_serve, request, self._holds, ends), ends_with_parent=signal.SIGKILL
        )
        ends.close()
        try:
            reply = channel.receive(START_S)
        except (EOFError, OSError, MessageError) as error:
            self._child.kill()
            return CannotStart(f"the ledger's service did not start: {error}; see logs/ledger.log")
        finally:
            channel.close()
        assert not isinstance(reply, Serve), "what it says"
        return reply

    def _stop(self) -> None:
        if self._child is not None:
            self._child.signal(STOP)
            self._child.end(STOP_S)
        self._child = self._wanted = None


def _serve(request: Serve, holds: Holds, ends: socket.socket) -> int:
    """The service's process."""
    channel = Channel(ends, _CODEC, START_S)
    with contextlib.ExitStack() as open_:

        def handler() -> RequestHandler:
            ledger = open_.enter_context(Ledger.open(request.ledger))
            request_handler = RequestHandler(ledger, first=request.first, holds=holds)
            open_.callback(request_handler.close)
            return request_handler

        try:
            service = LedgerService(handler, request.address, RunKeys.from_plain(request.keys))
        except RunError as error:
            channel.send(CannotStart(str(error)))
            return 1
        open_.callback(service.close)
        signal.signal(STOP, lambda number, frame: service.stop())
        channel.send(Listening(service.address))
        channel.close()
        try:
            service.run()
        except Replaced as error:
            print(error, flush=True)
            os._exit(_REPLACED)
    return 0
