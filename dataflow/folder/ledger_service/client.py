"""A ledger that another process has open: the same calls, sent to its service, each made once."""

import contextlib
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import structlog
import zmq

from dataflow.errors import DeadlineError, GraphError, Replaced, RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.copies.process import bring_checkpoint
from dataflow.folder.copies.store import Copies
from dataflow.folder.ledger import HOME, BaseLedger, LedgerError
from dataflow.folder.ledger.methods import METHODS, Call, Method, describe, method_of
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
from dataflow.folder.placing import Placing, put
from dataflow.system.clocks import AwakeClock
from dataflow.system.files import RunFolderError, disk, write_atomically
from dataflow.system.messages import Life, MessageError
from dataflow.system.security import RunKeys, dealer_to, give_up_soon

METRICS = "metrics.jsonl"
"""All lines of it are in the scheduler's folder."""


class OwnFiles:
    """The files of a run, from one of its hosts."""

    def __init__(
        self,
        ledger: BaseLedger,
        host: str,
        read_metrics: Callable[[int], bytes],
        copies: Copies | None,
    ) -> None:
        """ledger: of the run; its folder is that of this host. host: whose folder no other sees, or
        `HOME`. read_metrics: some bytes of the scheduler's metrics.jsonl from an offset on.
        """
        self._ledger, self._host, self._root = ledger, host, ledger.path.parent
        self._read_metrics, self._copies = read_metrics, copies
        self._log = structlog.get_logger(disk=host)

    def see(self, path: Path) -> None:
        """Before a file is read: have the lines of metrics here, and see that rollouts are those
        that count. Errors: RunFolderError where these are on another host.
        """
        name = self._name(path)
        if name == METRICS:
            if self._host != HOME:
                self._bring_metrics(path)
            return
        host = self._ledger.places(name).get(name, HOME)
        if host != self._host:
            raise RunFolderError(
                f"'{name}' is not on this host, but {_where(host)}, and hosts with a folder each"
                " give each other no rollouts; to keep the steps from there on, place the worker"
                " where it was (--place)"
            )

    def see_newest(self, path: Path, at_most: int | None) -> None:
        """Have the newest checkpoint here, from the address of the copies where another host has
        made it, and let none count that stands here and is another's.

        path: of the folder with checkpoints. Errors: RunError where none is to be had that was
        made; GraphError where the address does not answer and there is nothing else.
        """
        checkpoints, below = Checkpoints(path), self._name(path)
        rows = _steps(self._ledger.places(f"{below}/"))
        if self._host == HOME and not rows:
            return
        for step in checkpoints.steps():
            if rows.get(step, HOME) != self._host:
                _set_aside(checkpoints.folder(step))
        local_step = checkpoints.latest(at_most) or 0
        steps = [step for step in rows if at_most is None or step <= at_most]
        newest = max(steps, default=0)
        if newest <= local_step and (local_step or not at_most or self._host == HOME):
            return
        trainer, reason = "" if path.parent == self._root else path.name, "there is no address"
        if self._copies is not None:
            upto = newest if at_most is None else at_most
            try:
                copied = bring_checkpoint(
                    self._copies, trainer, self._root, local_step, upto, self._log.info
                )
                if copied is not None:
                    name = f"{below}/{checkpoints.folder(copied).name}"
                    self._ledger.set_place(name, self._host)
                    return
                reason = f"'{self._copies.place}' has no newer one"
            except RunError as error:
                reason = str(error)
            except GraphError as error:  # it does not answer: what it has is not known
                if not local_step:
                    raise
                reason = str(error)
        if newest > local_step:
            lost = f"the checkpoint of step {newest} is {_where(rows[newest])}"
            if not local_step:
                raise RunError(
                    f"'{self._root.name}' cannot go on: {lost}, and no copy is to be had"
                    f" ({reason}); place the trainer there (--place), or start a new run"
                )
            self._log.warning(f"{lost}: the run goes on from step {local_step}", reason=reason)

    def _bring_metrics(self, path: Path) -> None:
        with disk("writing", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lines = b""
        while some := self._read_metrics(len(lines)):
            lines += some
        write_atomically(path, lambda file: file.write(lines), flush=False)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _steps(rows: Mapping[str, str]) -> dict[int, str]:
    """By step, the host that has its checkpoint."""
    steps = {path.rpartition("step-")[2]: host for path, host in rows.items()}
    return {int(step): host for step, host in steps.items() if step.isdecimal()}


def _where(host: str) -> str:
    return f"on host '{host}'" if host else "in the scheduler's folder"


def _set_aside(folder: Path) -> None:
    """A checkpoint that another host has made anew, or that none has any more."""
    names = (folder.with_name(f"not-counted-{at}-{folder.name}") for at in range(1, 1_000_000))
    with disk("renaming", folder):
        folder.rename(next(place for place in names if not place.exists()))


# One socket from a client to the ledger's service: finds it again where another one has taken its
# place.


class ServiceSocket:
    """Sends and receives; only `heard` waits, as long as it is told."""

    def __init__(self, address: str, keys: RunKeys | None, seek: Callable[[], str]) -> None:
        """seek: where the service is now; empty where nobody knows."""
        self._zmq: zmq.Context[Any] = zmq.Context()
        self._keys, self._seek = keys, seek
        self.address = address
        self._dealer = self._connected()

    def say(self, message: ToLedger) -> None:
        """Send; the message is lost where nobody receives it."""
        with contextlib.suppress(zmq.Again):  # it is said again
            self._dealer.send(TO_LEDGER.encode(message), zmq.NOBLOCK)

    def heard(self, wait_s: float) -> list[Answer]:
        """What has come, within so many seconds."""
        answers: list[Answer] = []
        if not self._dealer.poll(int(wait_s * 1000)):
            return answers
        while self._dealer.poll(0):
            try:
                answers.append(FROM_LEDGER.decode(b"".join(self._dealer.recv_multipart())))
            except MessageError:  # of whoever listens there now
                continue
        return answers

    def look(self) -> None:
        """Connect anew, to another service where there is one; messages on their way are
        dropped.
        """
        self.address = self._seek() or self.address
        self._dealer.close()
        self._dealer = self._connected()

    def close(self, linger_ms: int = 0) -> None:
        """Let go of it."""
        self._dealer.close(linger_ms)
        self._zmq.term()

    def _connected(self) -> "zmq.Socket[bytes]":
        socket = dealer_to(self._zmq, self.address, self._keys)
        give_up_soon(socket, self.address)
        socket.connect(self.address)
        return socket


P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 30.0
"""Seconds to wait for a service that is away."""
AGAIN_S = 1.0
"""After so many seconds without an answer a client asks again, and looks where the service is; then
after twice as many."""
MOST_AGAIN_S = 8.0
UNHEARD = 64
"""The most unanswered writes under way; the next one waits."""
CLOSE_S = 5.0
_POLL_S = 0.05

_ERRORS: dict[str, type[RunError]] = {
    "LedgerError": LedgerError,
    "RunFolderError": RunFolderError,
    "Replaced": Replaced,
}


class LedgerClient(BaseLedger):
    """The ledger of a run, from a worker on any host.

    consumes: answers of the service
    produces: questions and writes, in the order of the calls; a write that is posted is not waited
        for
    waits for: the answer, up to `patience_s` without one
    unblocked by: it; a service that was started in the place of one that has ended, which `seek`
        finds

    A write has a number, and is sent again until it is known to be made; so is a question.
    `Replaced` is raised by every call once another process writes for this worker: this one is to
    end.
    """

    def __init__(
        self,
        path: Path,
        address: str,
        *,
        worker: str,
        life: Life = Life(),
        keys: RunKeys | None = None,
        seek: Callable[[], str] = lambda: "",
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] | None = None,
        disk: str = HOME,
        copies: Copies | None = None,
    ) -> None:
        """Join the service at `address`. path: where the ledger's file is, as this host has it.
        worker, life: who writes. seek: as `ServiceSocket` has it.
        clock: of this process, which stands still while it is stopped. disk: the host whose own
        this folder is, or `HOME`. copies: where those of its checkpoints are. Errors: Replaced;
        DeadlineError when nobody answers.
        """
        super().__init__(path)
        self._disk = disk
        self._files = OwnFiles(
            self,
            disk,
            lambda offset: self._ask_files(RunFiles.read_metrics, offset),
            copies,
        )
        self._token = Token(worker, life, secrets.randbits(62))
        self._patience_s, self._clock = patience_s, clock or AwakeClock()
        self._open_line: Callable[[], ServiceSocket] = partial(ServiceSocket, address, keys, seek)
        self._line, self._thread = self._open_line(), threading.get_ident()
        self._tickets = itertools.count(1)
        self._unheard: deque[Record] = deque()
        """Writes without an answer."""
        self._number = 0
        """Number of the last write."""
        self._errors: dict[int, RunError] = {}
        """Refused writes."""
        self._broken: RunError | None = None
        """The error that every call raises from now on."""
        self._asked = 0
        """The ticket of the awaited answer."""
        self._answer: QueryResult | Refused | None = None
        self._said_at = self._clock()
        self._aside: ServiceSocket | None = None
        """Lines of other threads."""
        self._aside_lock, self._packing = threading.Lock(), threading.Lock()
        try:
            self._ask(Join(self._token, next(self._tickets)))
        except BaseException:
            self._line.close()
            raise

    @property
    def placing(self) -> Placing:
        """How what this process wrote in the run folder gets its name: the service gives it, in its
        turn.
        """
        return Placing(
            f"{'-'.join(map(str, self._token.life))}-{self._token.session:x}",
            self._place,
            self._append,
            self._disk,
            self._files.see,
            self._files.see_newest,
        )

    def do(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have a call done; one that is posted is done before any later call, and its error may
        come with that. Errors: LedgerError; Replaced; DeadlineError.
        """
        call = method.message(args, kwargs)
        if not method.writes:
            after = self._unheard[-1].number if self._unheard else 0
            return self._ask(Query(self._token, next(self._tickets), after, call))
        number = self._send(call)
        if method.is_posted:
            if len(self._unheard) > UNHEARD:
                self._wait(lambda: len(self._unheard) <= UNHEARD, describe(call))
            return None
        self._wait(lambda: not self._unheard, describe(call))
        if (error := self._errors.pop(number, None)) is not None:
            raise error
        return None

    def flush(self) -> None:
        self._ask_files(RunFiles.flush)

    @property
    def wal_bytes(self) -> int:
        return self._ask_files(RunFiles.wal_bytes)

    def pack(self, into: Path) -> None:
        with self._packing, disk("writing", into), into.open("wb") as file:
            worker, offset = self._token.worker, 0
            size = self._ask_files(RunFiles.pack, worker, next(self._tickets))
            while offset < size:
                content = self._ask_files(RunFiles.read_packed, worker, offset)
                file.write(content)
                offset += len(content)

    def close(self) -> None:
        """Wait for posted writes, and let go of the service; a failure is no error."""
        try:
            if self._broken is None and self._unheard:
                self._patience_s = min(self._patience_s, CLOSE_S)
                self._wait(lambda: not self._unheard, "end")
        except RunError:
            pass
        finally:
            self._line.close()
            with self._aside_lock:
                if self._aside is not None:
                    self._aside.close()

    def _place(self, path: Path, at: Path, aside: Path | None = None) -> None:
        """As `placing.put`, from any thread. Errors: RunFolderError; Replaced."""
        named = None if aside is None else self._name(aside)
        self._ask_files(RunFiles.put_in_place, self._name(path), self._name(at), named, self._disk)
        if self._disk != HOME:
            put(path, at, aside)

    def _append(self, path: Path, line: str) -> None:
        """As `append_line`, from any thread. Errors: RunFolderError; Replaced."""
        self._ask_files(RunFiles.append_line, self._name(path), line)

    def _name(self, path: Path) -> str:
        """A path's name in the run folder, wherever that is for the service."""
        return str(path.relative_to(self.path.parent))

    def _send(self, call: Call) -> int:
        """Send a write; its number."""
        self._check_thread()
        self._hear(0.0)
        if not self._unheard:
            self._said_at = self._clock()
        self._number += 1
        settled = self._unheard[0].number - 1 if self._unheard else self._number - 1
        self._unheard.append(Record(self._token, self._number, settled, call))
        self._line.say(self._unheard[-1])
        return self._number

    def _ask(self, question: Join | Query) -> Any:
        """Ask a question on this thread's line."""
        self._check_thread()
        self._asked, self._answer, self._said_at = question.ticket, None, self._clock()
        self._line.say(question)
        self._wait(lambda: self._answer is not None, _doing(question), question)
        return _value(question, self._answer)

    def _wait(
        self, is_over: Callable[[], bool], doing: str, question: Join | Query | None = None
    ) -> None:
        """Listen, and repeat unanswered messages. Errors: DeadlineError."""
        deadline, again_s = self._clock() + self._patience_s, AGAIN_S
        while not is_over():
            if self._hear(_POLL_S):
                deadline = self._clock() + self._patience_s
                continue
            now = self._clock()
            if now >= deadline:
                raise self._nobody(doing, self._line.address)
            if now - self._said_at >= again_s:
                again_s = min(2 * again_s, MOST_AGAIN_S)
                self._line.look()
                self._repeat()
                if question is not None:
                    self._line.say(question)

    def _hear(self, wait_s: float) -> bool:
        """Take in what has come; whether anything has. Errors: what ends this client."""
        answers = self._line.heard(wait_s)
        for answer in answers:
            match answer:
                case Recorded():
                    while self._unheard and self._unheard[0].number <= answer.number:
                        self._unheard.popleft()
                case Behind():
                    self._repeat()
                case Refused(error="Replaced"):
                    self._broken = Replaced(answer.message)
                case Refused(number=number) if number:
                    self._refused(answer)
                case QueryResult() | Refused() if answer.ticket == self._asked:
                    self._answer = answer
        if self._broken is not None:
            raise self._broken
        return bool(answers)

    def _refused(self, answer: Refused) -> None:
        """A write was refused: raised to its waiter, or with the next call."""
        for record in [record for record in self._unheard if record.number == answer.number]:
            self._unheard.remove(record)
            self._errors[record.number] = _ERRORS[answer.error](answer.message)

    def _repeat(self) -> None:
        self._said_at = self._clock()
        for record in self._unheard:
            self._line.say(record)

    def _ask_files(
        self,
        method: Callable[Concatenate[RunFiles, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Ask what changes no row of the ledger: another thread than the owner's uses a line of its
        own, so that only those wait for the disk who need to.
        """
        call = METHODS[method.__name__].message(args, kwargs)
        is_owner = threading.get_ident() == self._thread
        after = self._unheard[-1].number if is_owner and self._unheard else 0
        question = Query(self._token, next(self._tickets), after, call)
        return cast("T", self._ask(question) if is_owner else self._ask_aside(question))

    def _ask_aside(self, question: Query) -> Any:
        self._check_owner()
        with self._aside_lock:
            if self._aside is None:
                self._aside = self._open_line()
            line = self._aside
            line.say(question)
            clock = AwakeClock()
            began = said_at = clock()
            again_s = AGAIN_S
            while True:
                for answer in line.heard(_POLL_S):
                    if (
                        isinstance(answer, QueryResult | Refused)
                        and answer.ticket == question.ticket
                    ):
                        return _value(question, answer)
                now = clock()
                if now - began > self._patience_s:
                    raise self._nobody(_doing(question), line.address)
                if now - said_at >= again_s:
                    said_at, again_s = now, min(2 * again_s, MOST_AGAIN_S)
                    line.look()
                    line.say(question)

    def _check_thread(self) -> None:
        self._check_owner()
        if threading.get_ident() != self._thread:
            raise LedgerError(
                f"ledger '{self.path}' was opened by one thread and is used by another; open it"
                " anew in each, only flush() may be called from any"
            )
        if self._broken is None and self._errors:  # of what was posted
            self._broken = self._errors[min(self._errors)]
        if self._broken is not None:
            raise self._broken

    def _nobody(self, doing: str, address: str) -> DeadlineError:
        return DeadlineError(
            f"'{self._token.worker}' waited {self._patience_s:.0f} s for the ledger's service at"
            f" {address}, to {doing}: nobody answered; look whether the scheduler's host lives and"
            " is reached from here, then resume"
        )


def _doing(question: Join | Query) -> str:
    return "join" if isinstance(question, Join) else describe(question.call)


def _value(question: Join | Query, answer: Any) -> Any:
    """The value of an answer. Errors: the answer's error."""
    if isinstance(answer, Refused):
        raise _ERRORS[answer.error](answer.message)
    return None if isinstance(question, Join) else method_of(question.call).answer(answer.value)
