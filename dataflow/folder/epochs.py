"""What was changed in a run while it went on, whether an operator or a knob: each begins an epoch of its ledger."""

import contextlib
from typing import TypeAlias

from dataflow.folder import knob_changes, swaps
from dataflow.folder.knob_changes import KnobChange
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import Swap

Epoch: TypeAlias = Swap | KnobChange


def read_epochs(folder: RunFolder) -> tuple[Epoch, ...]:
    """Those of the run in a folder, in the order in which they were asked for; none where its ledger cannot be read."""
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        facts = ledger.facts()
        return tuple(sorted((*swaps.recorded(facts), *knob_changes.recorded(facts)), key=lambda each: each.at))
    return ()
