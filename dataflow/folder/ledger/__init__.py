"""The ledger: what became of every prompt group, in SQLite, consistent at any moment and after any
crash.
"""

from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.ledger import Ledger
from dataflow.folder.ledger.reads import Fate, InFlight, MadeStep, OutcomeCounts, PlannedStep
from dataflow.folder.ledger.schema import STATES, LedgerError

__all__ = [
    "STATES",
    "BaseLedger",
    "Fate",
    "InFlight",
    "Ledger",
    "LedgerError",
    "MadeStep",
    "OutcomeCounts",
    "PlannedStep",
]
