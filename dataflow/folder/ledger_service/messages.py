"""The messages between the ledger's service and its clients, a class each."""

from typing import Literal, TypeAlias

from dataflow.folder.ledger.questions import AnyRead, Result
from dataflow.folder.ledger.upkeep import AnyWrite
from dataflow.folder.ledger.writers import Token
from dataflow.system.messages import Codec, Message, Natural

# From a client


class Join(Message):
    """Write for this worker, in the place of whoever did; the same process may say so again."""


class Flush(Message):
    """Bring all that was committed to the disk itself."""


class AskWalBytes(Message):
    """How large the database's log is."""


class PutInPlace(Message):
    """Rename what this process wrote, as `placing.put`; paths are those in the run folder."""

    path: str
    at: str
    aside: str | None
    disk: str = ""
    """The host whose folder that is, where it has one of its own: then it is noted only, and its
    process renames."""


class AppendLine(Message):
    """Append a line to a file that several hosts have something to say in; twice is as good as
    once.
    """

    path: str
    line: str


class Pack(Message):
    """Keep a copy of the ledger as it is now, packed, in the place of the last one for this worker;
    its size.
    """


class ReadPacked(Message):
    """Some bytes of it."""

    offset: Natural


class ReadMetrics(Message):
    """Some bytes of metrics.jsonl; none at its end, or where it is not there."""

    offset: Natural


class Query(Message):
    """A question, or something that may be done twice."""

    token: Token
    ticket: Natural
    after: Natural
    """The last write that is to be made before."""
    what: (
        AnyRead
        | Join
        | Flush
        | AskWalBytes
        | Pack
        | ReadPacked
        | PutInPlace
        | AppendLine
        | ReadMetrics
    )


class Record(Message):
    """A write; each is made once, in the order of their numbers."""

    token: Token
    number: Natural
    """1, 2, ... in a session; none is given twice."""
    after: Natural
    """The last one before it that has an answer, or will have none that is waited for."""
    call: AnyWrite


# To a client


class QueryResult(Message):
    """The answer to a question."""

    ticket: Natural
    result: Result


class Recorded(Message):
    """Writes up to this one are made."""

    number: Natural


class Behind(Message):
    """Earlier writes did not come: send them again, from this one on."""

    number: Natural


class Refused(Message):
    """It was not done. Of a question by its ticket, of a write by its number; the other one is
    0.
    """

    ticket: Natural
    number: Natural
    error: Literal["LedgerError", "RunFolderError", "Replaced"]
    message: str


ToLedger: TypeAlias = Query | Record
Answer: TypeAlias = QueryResult | Recorded | Behind | Refused
TO_LEDGER: Codec[ToLedger] = Codec("dataflow.to-ledger", 1, Query, Record)
FROM_LEDGER: Codec[Answer] = Codec(
    "dataflow.from-ledger", 1, QueryResult, Recorded, Behind, Refused
)
