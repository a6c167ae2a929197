"""The messages between the ledger's service and its clients."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dataflow.folder.ledger.methods import calls_of
from dataflow.folder.ledger_service import files as files  # its methods are called, too
from dataflow.system.messages import Codec, Life, Message, Natural

if TYPE_CHECKING:
    from dataflow.folder.ledger.methods import Call as AnyRead
    from dataflow.folder.ledger.methods import Call as AnyWrite
else:
    AnyRead = calls_of(lambda method: not method.writes)
    AnyWrite = calls_of(lambda method: method.writes)


@dataclass(frozen=True)
class Token:
    """A process that writes."""

    worker: str
    life: Life
    session: int
    """A random number of who counts its writes from 1: two that do so are told apart, be they of
    one life."""


# From a client


class Join(Message):
    """Write for this worker, in the place of whoever did; the same process may say so again."""

    token: Token
    ticket: Natural


class Query(Message):
    """A question, or something that may be done twice."""

    token: Token
    ticket: Natural
    after: Natural
    """The last write that is to be made before."""
    call: AnyRead


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
    value: Any = None


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


ToLedger: TypeAlias = Join | Query | Record
Answer: TypeAlias = QueryResult | Recorded | Behind | Refused
TO_LEDGER: Codec[ToLedger] = Codec("dataflow.to-ledger", 2, Join, Query, Record)
FROM_LEDGER: Codec[Answer] = Codec(
    "dataflow.from-ledger", 2, QueryResult, Recorded, Behind, Refused
)
