"""Knobs that were changed while a run went on: which, by whom, from which step on; kept in the
ledger.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dataflow.folder.ledger import BaseLedger, Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import Swap

MAX_STALENESS = "max_staleness"
"""The knob of a feedback edge, which goes by its reader."""
FACT = "set"
"""In the ledger: `set/000001` and so on."""


@dataclass(frozen=True, kw_only=True)
class KnobChange:
    """One knob of one node that has another value from some step on."""

    number: int
    """From 1 on, in the order in which they were asked for."""
    node: str
    knob: str
    value: Any
    was: Any
    """The value before."""
    trainer: str
    """The trainer whose steps it counts by; empty: none."""
    asked: int = 0
    """Steps that the run had made when it was requested."""
    step: int = 0
    """The first that may have rows of it; of a trainer's own knobs and of a bound the first that it
    holds for. 0: it is not on record yet."""
    at: float = 0.0
    """Seconds since 1970."""
    by: str = ""
    """Who asked for it, as user@host."""
    swap: int = 0
    """Number of the swap that had put the node's operator in place; 0: it is the one that was
    declared."""

    verb: ClassVar[str] = "set"

    @property
    def mark(self) -> str:
        """A mark for a curve."""
        return f"{self.node}.{self.knob} = {self.value}"

    def __str__(self) -> str:
        """The change as text."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        return f"{self.mark} (was {self.was}) from step {self.step} on, {when}, by {self.by}"


def recorded(facts: Mapping[str, Any]) -> tuple[KnobChange, ...]:
    """The changes of a run, in order, from the facts in its ledger."""
    return tuple(KnobChange(**facts[name]) for name in sorted(facts) if name.startswith(f"{FACT}/"))


def record(ledger: BaseLedger | None, changes: Sequence[KnobChange]) -> None:
    """Put down changes with the step from which each counts; on the disk when it returns. Errors:
    LedgerError.
    """
    if ledger is not None and changes:
        ledger.set_facts({f"{FACT}/{change.number:06}": asdict(change) for change in changes})
        ledger.flush()


def known(ledger: BaseLedger | None, changes: Iterable[KnobChange]) -> tuple[KnobChange, ...]:
    """The changes, each as the ledger has it, where it does."""
    on_record = (
        {} if ledger is None else {change.number: change for change in recorded(ledger.facts())}
    )
    return tuple(on_record.get(change.number, change) for change in changes)


def read_changes(folder: RunFolder) -> tuple[KnobChange, ...]:
    """The changes of the run in a folder; none where its ledger cannot be read."""
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        return recorded(ledger.facts())
    return ()


def of_operators(changes: Iterable[KnobChange], swaps: Iterable[Swap]) -> tuple[KnobChange, ...]:
    """Those of operators that are in place where these swaps were made, in order, and no others. A
    knob is set of one operator, and of none that takes its place.
    """
    in_place = {swap.node: swap.number for swap in swaps}
    return tuple(change for change in changes if change.swap == in_place.get(change.node, 0))


def bound_at(changes: Iterable[KnobChange], trainer: str, step: int, declared: int) -> int:
    """The bound on staleness that held for a step of a trainer. changes: of the run, in order."""
    for change in changes:
        if change.knob == MAX_STALENESS and change.trainer == trainer and 0 < change.step <= step:
            declared = int(change.value)
    return declared
