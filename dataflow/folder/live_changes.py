"""Changes to a run while it went on: swapped operators, and knobs that were set."""

import contextlib
from typing import TypeAlias

from dataflow.folder import knob_changes, swaps
from dataflow.folder.knob_changes import KnobChange
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import Swap

LiveChange: TypeAlias = Swap | KnobChange


def read_live_changes(folder: RunFolder) -> tuple[LiveChange, ...]:
    """The changes of the run in a folder, in the order of their requests; none where its ledger
    cannot be read.
    """
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        facts = ledger.facts()
        return tuple(
            sorted(
                (*swaps.recorded(facts), *knob_changes.recorded(facts)), key=lambda each: each.at
            )
        )
    return ()
