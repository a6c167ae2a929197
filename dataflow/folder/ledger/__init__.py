"""The ledger: what became of every prompt group, in SQLite, consistent at any moment and after any crash."""

from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.ledger import Ledger
from dataflow.folder.ledger.reads import Counts, Fate, InFlight, MadeStep, PlannedStep
from dataflow.folder.ledger.schema import STATES, LedgerError

__all__ = ["STATES", "BaseLedger", "Counts", "Fate", "InFlight", "Ledger", "LedgerError", "MadeStep", "PlannedStep"]
