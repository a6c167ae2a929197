"""The ledger: what became of every prompt group, in SQLite, consistent at any moment and after any crash."""

from dataflow.ledger.ledger import Ledger
from dataflow.ledger.reads import Counts, InFlight, PlannedStep
from dataflow.ledger.schema import STATES, LedgerError

__all__ = ["STATES", "Counts", "InFlight", "Ledger", "LedgerError", "PlannedStep"]
