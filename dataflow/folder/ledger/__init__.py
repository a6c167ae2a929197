"""The ledger: what became of every prompt group, in SQLite, consistent at any moment and after any
crash.
"""

from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.ledger import Ledger
from dataflow.folder.ledger.records import (
    Fate,
    InFlight,
    MadeStep,
    OutcomeCounts,
    PlannedStep,
    some,
)
from dataflow.folder.ledger.schema import HOME, STATES, LedgerError

__all__ = [
    "HOME",
    "STATES",
    "BaseLedger",
    "Fate",
    "InFlight",
    "Ledger",
    "LedgerError",
    "MadeStep",
    "OutcomeCounts",
    "PlannedStep",
    "some",
]
