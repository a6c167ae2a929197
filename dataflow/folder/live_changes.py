"""Changes to a run while it went on: swapped operators, and knobs that were set."""

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from dataflow.folder.ledger import BaseLedger, Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.settable import Settable

SWAP_FACT = "swap"
"""In the ledger: `swap/000001` and so on."""
_DIGEST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Swap:
    """One operator that took another one's place.

    Its module's text is kept: who starts later, on whatever host, runs what was checked then, and
    no other version of the file.
    """

    number: int
    """From 1 on, in the order in which they were taken in."""
    node: str
    reference: str
    """MODULE:ATTRIBUTE, or FORM:MODULE:ATTRIBUTE."""
    file: str = ""
    """Where the module stood."""
    source: str = ""
    """What stood there."""
    digest: str = ""
    """SHA-256 of that."""
    step: int = 0
    """That the run had made when it was taken in: rows of later steps may be its own."""
    at: float = 0.0
    """Seconds since 1970."""
    by: str = ""
    """Who asked for it, as user@host."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Those of it that may change, as `Settable.to_plain` gives them."""
    is_withdrawn: bool = False
    """Whether it was taken back after it stood in the ledger: a worker was killed once it was on
    record, and the next could not be built with it."""

    verb: ClassVar[str] = "swapped"

    def settable(self) -> dict[str, Settable]:
        """Its knobs that may change, with the values that its module gives them."""
        return {name: Settable.from_plain(plain) for name, plain in self.knobs.items()}

    @property
    def mark(self) -> str:
        """For a curve."""
        return f"{self.node} = {self.reference.rpartition('/')[2]}"

    def __str__(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        change = f"{self.node} = {self.reference} (sha256 {self.digest[:_DIGEST_SHOWN]})"
        return f"{change} after step {self.step}, {when}, by {self.by}"


def recorded_swaps(facts: Mapping[str, Any]) -> tuple[Swap, ...]:
    """Those of a run, in order, from the facts in its ledger."""
    swaps = (Swap(**facts[name]) for name in sorted(facts) if name.startswith(f"{SWAP_FACT}/"))
    return tuple(swap for swap in swaps if not swap.is_withdrawn)


def record_swaps(ledger: BaseLedger, nodes: Collection[str], swaps: Sequence[Swap]) -> None:
    """Put down what nodes run from now on, the last swap of each, and that later ones were taken
    back; on the disk when it returns. Errors: LedgerError.
    """
    on_record = recorded_swaps(ledger.facts())
    numbers = {swap.number for swap in on_record}
    changed = [swap for swap in swaps if swap.number not in numbers]
    last = {swap.node: swap.number for swap in swaps}
    gone = [
        swap for swap in on_record if swap.node in nodes and swap.number > last.get(swap.node, 0)
    ]
    if changed := [*(replace(swap, is_withdrawn=True) for swap in gone), *changed]:
        ledger.set_facts({f"{SWAP_FACT}/{swap.number:06}": asdict(swap) for swap in changed})
        ledger.flush()


def latest_swaps(swaps: Iterable[Swap]) -> list[Swap]:
    """The last of each node: those that count."""
    return sorted({swap.node: swap for swap in swaps}.values(), key=lambda swap: swap.number)


MAX_STALENESS = "max_staleness"
"""The knob of a feedback edge, which goes by its reader."""
KNOB_FACT = "set"
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


def recorded_knobs(facts: Mapping[str, Any]) -> tuple[KnobChange, ...]:
    """The changes of a run, in order, from the facts in its ledger."""
    return tuple(
        KnobChange(**facts[name]) for name in sorted(facts) if name.startswith(f"{KNOB_FACT}/")
    )


def record_knobs(ledger: BaseLedger | None, changes: Sequence[KnobChange]) -> None:
    """Put down changes with the step from which each counts; on the disk when it returns. Errors:
    LedgerError.
    """
    if ledger is not None and changes:
        ledger.set_facts({f"{KNOB_FACT}/{change.number:06}": asdict(change) for change in changes})
        ledger.flush()


def known_knobs(ledger: BaseLedger | None, changes: Iterable[KnobChange]) -> tuple[KnobChange, ...]:
    """The changes, each as the ledger has it, where it does."""
    on_record = (
        {}
        if ledger is None
        else {change.number: change for change in recorded_knobs(ledger.facts())}
    )
    return tuple(on_record.get(change.number, change) for change in changes)


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


LiveChange: TypeAlias = Swap | KnobChange


def read_swaps(folder: RunFolder) -> tuple[Swap, ...]:
    """The swaps of the run in a folder; none where its ledger cannot be read."""
    return recorded_swaps(_facts(folder))


def read_changes(folder: RunFolder) -> tuple[KnobChange, ...]:
    """The changed knobs of the run in a folder; none where its ledger cannot be read."""
    return recorded_knobs(_facts(folder))


def read_live_changes(folder: RunFolder) -> tuple[LiveChange, ...]:
    """All of them, in the order of their requests."""
    facts = _facts(folder)
    return tuple(
        sorted((*recorded_swaps(facts), *recorded_knobs(facts)), key=lambda change: change.at)
    )


def _facts(folder: RunFolder) -> dict[str, Any]:
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        return ledger.facts()
    return {}
