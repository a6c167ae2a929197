"""Operators that took the place of others in a live run: what each is, in values, and how the
ledger keeps them.
"""

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from dataflow.folder.ledger import BaseLedger, Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.settable import Settable

FACT = "swap"
"""In the ledger: `swap/000001` and so on."""
_SHOWN = 12


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
        change = f"{self.node} = {self.reference} (sha256 {self.digest[:_SHOWN]})"
        return f"{change} after step {self.step}, {when}, by {self.by}"


def recorded(facts: Mapping[str, Any]) -> tuple[Swap, ...]:
    """Those of a run, in order, from the facts in its ledger."""
    swaps = (Swap(**facts[name]) for name in sorted(facts) if name.startswith(f"{FACT}/"))
    return tuple(swap for swap in swaps if not swap.is_withdrawn)


def record(ledger: BaseLedger, nodes: Collection[str], swaps: Sequence[Swap]) -> None:
    """Put down what nodes run from now on, the last swap of each, and that later ones were taken
    back; on the disk when it returns. Errors: LedgerError.
    """
    recorded_swaps = recorded(ledger.facts())
    numbers = {swap.number for swap in recorded_swaps}
    changed = [swap for swap in swaps if swap.number not in numbers]
    last = {swap.node: swap.number for swap in swaps}
    gone = [
        swap
        for swap in recorded_swaps
        if swap.node in nodes and swap.number > last.get(swap.node, 0)
    ]
    if changed := [*(replace(swap, is_withdrawn=True) for swap in gone), *changed]:
        ledger.set_facts({f"{FACT}/{swap.number:06}": asdict(swap) for swap in changed})
        ledger.flush()


def read_swaps(folder: RunFolder) -> tuple[Swap, ...]:
    """Those of the run in a folder; none where its ledger cannot be read."""
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        return recorded(ledger.facts())
    return ()


def latest(swaps: Iterable[Swap]) -> list[Swap]:
    """The last of each node: those that count."""
    return sorted({swap.node: swap for swap in swaps}.values(), key=lambda swap: swap.number)
