"""What the ledger's service answers, over whatever socket: the newest attempt writes, each write
once.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast

from dataflow.errors import Replaced, RunError
from dataflow.folder import placing
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.ledger.calls import LedgerCall, Value
from dataflow.folder.ledger.copying import pack
from dataflow.folder.ledger.questions import ListPlaces
from dataflow.folder.ledger.upkeep import SetPlace
from dataflow.folder.ledger.writers import (
    FLOOR,
    Admit,
    ListWriters,
    NotMade,
    NumberedWrite,
    PrepareWriters,
    Token,
    Writer,
)
from dataflow.folder.ledger_service.messages import (
    Answer,
    AppendLine,
    AskWalBytes,
    Behind,
    Flush,
    Join,
    Pack,
    PutInPlace,
    Query,
    QueryResult,
    ReadMetrics,
    ReadPacked,
    Record,
    Recorded,
    Refused,
    ToLedger,
)
from dataflow.system.files import RunFolderError, append_line, disk

PACKED_BYTES = 4 << 20
"""Bytes of one answer, at most."""


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
        self, ledger: Ledger, *, floor: int | None = None, holds: Callable[[], None] = lambda: None
    ) -> None:
        """floor: processes that an earlier scheduler than that of this number has started write no
        more; None: as it was, for workers that were taken over. holds: raises Replaced once
        somebody else holds the run. Errors: LedgerError.
        """
        self._ledger, self._folder, self._holds = ledger, ledger.path.parent, holds
        ledger.do(PrepareWriters(floor))
        ledger.flush()
        self._writers = ledger.do(ListWriters())
        self._packed: dict[str, tuple[int, IO[bytes]]] = {}
        """By worker, a copy of the ledger that it fetches, and the ticket that asked for it."""
        self._has_places = bool(ledger.do(ListPlaces("")))
        """Whether some file of the run was made on a host with a folder of its own."""
        self._floor = self._writers[FLOOR].token.holder if FLOOR in self._writers else 0

    def hear(self, message: ToLedger) -> Answer | Deferred:
        """Make a request, or answer why not. Errors: Replaced, once another scheduler holds the
        run: nothing was done.
        """
        ticket, number = (0, message.number) if isinstance(message, Record) else (message.ticket, 0)
        try:
            self._holds()
        except RunFolderError as error:  # the disk does not say
            return Refused(ticket, number, "RunFolderError", str(error))
        try:
            return (
                self._recorded(message) if isinstance(message, Record) else self._answered(message)
            )
        except (Replaced, LedgerError, RunFolderError) as error:
            return Refused(ticket, number, _kind(error), str(error))

    def close(self) -> None:
        """Drop copies that nobody has fetched."""
        for _, file in self._packed.values():
            file.close()

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
        """
        worker, refusal = message.token.worker, None
        try:
            self._ledger.do(NumberedWrite(worker, message.number, message.call))
        except LedgerError as error:
            refusal = str(error)
            self._ledger.do(NotMade(worker, message.number, refusal))
        self._writers[worker] = writer = Writer(message.token, message.number, refusal)
        return writer

    def _answered(self, message: Query) -> Answer | Deferred:
        token, request = message.token, message.what
        if isinstance(request, Join):
            self._admit(token)
            return QueryResult(message.ticket, Value(None))
        writer = self._admitted(token)
        if writer.number < message.after:
            return Behind(writer.number + 1)
        match request:
            case Flush():
                return Deferred(partial(self._aside, message, self._ledger.flush))
            case Pack():
                return Deferred(partial(self._aside, message, partial(self._pack, message)))
            case ReadPacked():
                return Deferred(
                    partial(
                        self._aside,
                        message,
                        partial(self._read_packed, token.worker, request.offset),
                    )
                )
            case AskWalBytes():
                return QueryResult(message.ticket, Value(self._ledger.wal_bytes))
            case PutInPlace():
                self._put_in_place(request)
                return QueryResult(message.ticket, Value(None))
            case ReadMetrics():
                return Deferred(
                    partial(self._aside, message, partial(self._read_metrics, request.offset))
                )
            case AppendLine():
                append_line(self._inside(request.path), request.line)
                return QueryResult(message.ticket, Value(None))
            case _:
                return QueryResult(
                    message.ticket,
                    request.travels_as(self._ledger.do(cast("LedgerCall[Any]", request))),
                )

    def _put_in_place(self, request: PutInPlace) -> None:
        """Put a file in place in this folder; or note that the worker's host does so in its own,
        and that its file counts from now on.
        """
        path, at = self._inside(request.path), self._inside(request.at)
        aside = None if request.aside is None else self._inside(request.aside)
        if not request.disk:
            placing.put(path, at, aside)
        if request.disk or self._has_places:
            self._ledger.do(SetPlace(request.at, request.disk))
            self._has_places = True

    def _aside(self, message: Query, do: Callable[[], Any]) -> Answer:
        """Run what waits for the disk in the thread for that."""
        try:
            return QueryResult(message.ticket, Value(do()))
        except (LedgerError, RunFolderError) as error:
            return Refused(message.ticket, 0, _kind(error), str(error))

    def _pack(self, message: Query) -> int:
        """Pack a copy; a repeated question gets the same one, since its bytes are fetched in
        parts.
        """
        worker = message.token.worker
        ticket, file = self._packed.get(worker, (0, None))
        with disk("packing", self._ledger.path):
            if file is None or ticket != message.ticket:
                if file is not None:
                    file.close()
                file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                pack(self._ledger.path, file)
                self._packed[worker] = message.ticket, file
            return file.seek(0, 2)

    def _read_packed(self, worker: str, offset: int) -> bytes:
        if worker not in self._packed:
            raise LedgerError(
                f"'{worker}' asked for a copy of the ledger that is not there: the service was"
                " started again meanwhile; ask for a new one"
            )
        file = self._packed[worker][1]
        with disk("reading", self._ledger.path):
            file.seek(offset)
            return file.read(PACKED_BYTES)

    def _read_metrics(self, offset: int) -> bytes:
        path = self._folder / "metrics.jsonl"
        with disk("reading", path):
            if not path.exists():
                return b""
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(PACKED_BYTES)

    def _admit(self, token: Token) -> None:
        writer = self._writers.get(token.worker)
        if token.holder < self._floor or (writer is not None and token.age < writer.token.age):
            raise _replaced(token, writer)
        if writer is not None and writer.token == token:
            return
        self._ledger.do(Admit(token))
        self._writers[token.worker] = Writer(token)

    def _admitted(self, token: Token) -> Writer:
        """The writer of a process that may write. Errors: Replaced."""
        writer = self._writers.get(token.worker)
        if writer is None or writer.token != token or token.holder < self._floor:
            raise _replaced(token, writer)
        return writer

    def _inside(self, name: str) -> Path:
        """A path in the run folder. Errors: RunFolderError for one that leads out of it."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise RunFolderError(f"'{name}' is not in the run folder; give a path below it")
        return self._folder / path


def _kind(error: RunError) -> Literal["LedgerError", "RunFolderError", "Replaced"]:
    if isinstance(error, Replaced):
        return "Replaced"
    return "LedgerError" if isinstance(error, LedgerError) else "RunFolderError"


def _replaced(token: Token, writer: Writer | None) -> Replaced:
    successor: Any = (
        "none"
        if writer is None
        else f"attempt {writer.token.attempt} of scheduler {writer.token.holder}"
    )
    return Replaced(
        f"attempt {token.attempt} of '{token.worker}', started by scheduler {token.holder} of this"
        " run, may write nothing any more: another one was started in its place (found"
        f" {successor});"
        " it was cut off or stopped for too long, and ends without touching the run"
    )
