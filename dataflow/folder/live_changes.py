"""What was changed in a run while it went on: operators that took the place of others, knobs that
were set.
"""

import contextlib
from typing import TypeAlias

from dataflow.folder import knob_changes, swaps
from dataflow.folder.knob_changes import KnobChange
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import Swap

LiveChange: TypeAlias = Swap | KnobChange


def read_live_changes(folder: RunFolder) -> tuple[LiveChange, ...]:
    """Those of the run in a folder, in the order in which they were asked for; none where its
    ledger cannot be read.
    """
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        facts = ledger.facts()
        return tuple(
            sorted(
                (*swaps.recorded(facts), *knob_changes.recorded(facts)), key=lambda each: each.at
            )
        )
    return ()
