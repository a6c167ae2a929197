"""Operators that took the place of others in a live run: what each is, in values, and how the ledger keeps them."""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataflow.folder.ledger import BaseLedger, Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder

FACT = "swap"
"""In the ledger: `swap/000001` and so on."""
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Swap:
    """One operator that took another one's place.

    Its module's text is kept: who starts later, on whatever host, runs what was checked then, and no other version of
    the file."""

    number: int
    """From 1 on, in the order in which they were taken in."""
    node: str
    reference: str
    """MODULE:ATTRIBUTE."""
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

    def __str__(self) -> str:
        """For people."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        what = f"{self.node} = {self.reference} (sha256 {self.digest[:_SHOWN]})"
        return f"{what} after step {self.step}, {when}, by {self.by}"


def recorded(facts: Mapping[str, Any]) -> tuple[Swap, ...]:
    """Those of a run, in order, from the facts in its ledger."""
    return tuple(Swap(**facts[name]) for name in sorted(facts) if name.startswith(f"{FACT}/"))


def record(ledger: BaseLedger, swaps: Iterable[Swap]) -> None:
    """Put down those that the ledger does not know; on the disk when it returns. Errors: LedgerError."""
    known = ledger.facts()
    facts = {f"{FACT}/{swap.number:06}": asdict(swap) for swap in swaps}
    if missing := {name: fact for name, fact in facts.items() if name not in known}:
        ledger.set_facts(missing)
        ledger.flush()


def read_swaps(folder: RunFolder) -> tuple[Swap, ...]:
    """Those of the run in a folder; none where its ledger cannot be read."""
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        return recorded(ledger.facts())
    return ()


def of_nodes(swaps: Iterable[Swap], nodes: Sequence[str]) -> list[Swap]:
    """Those of some nodes."""
    return [swap for swap in swaps if swap.node in nodes]
