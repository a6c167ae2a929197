"""The knobs of a trainer at each of its steps, where some were changed while the run went on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from dataflow.folder.ledger import BaseLedger
from dataflow.folder.live_changes import MAX_STALENESS, KnobChange, bound_at, record_knobs
from dataflow.node import Learn
from dataflow.staleness import Bound

T = TypeVar("T", bound=Learn)


class KnobsByStep(Generic[T]):
    """A pure function of the ledger and of what was heard: a step that is made again has the knobs
    that it had.

    A change counts from the next step on that is begun, and stands in the ledger before that. A
    smaller bound on staleness holds once the groups are through that were started under the larger
    one; until then it gives way to the next that comes.
    """

    def __init__(
        self, trainer: T, changes: Iterable[KnobChange], ledger: BaseLedger | None = None
    ) -> None:
        """trainer: as it was declared."""
        self._trainer, self._ledger = trainer, ledger
        self._counting: list[KnobChange] = []
        self._waiting: list[KnobChange] = []
        self.hear(changes)

    @property
    def is_behind(self) -> bool:
        """Whether some change waits for a step to begin."""
        return bool(self._waiting)

    def hear(self, changes: Iterable[KnobChange]) -> None:
        """Changes of this trainer's knobs, some of which may be known."""
        numbers = {change.number for change in (*self._counting, *self._waiting)}
        for change in changes:
            if change.number not in numbers:
                (self._counting if change.step else self._waiting).append(change)

    def take(self, step: int, bound: Bound | None) -> Sequence[KnobChange]:
        """Let waiting changes count from this step on, which has not begun; the changes that count
        now. bound: as declared.
        """
        decided: dict[int, KnobChange] = {}
        for change in self._waiting:
            first = step
            if change.knob == MAX_STALENESS and (before := self.bound(step, bound)) is not None:
                first += before.max_staleness + 1 if change.value < before.max_staleness else 0
                to_come = [e for e in self._counting if e.knob == MAX_STALENESS and e.step > step]
                decided |= {e.number: dataclasses.replace(e, step=first) for e in to_come}
            decided[change.number] = dataclasses.replace(change, step=first)
            self._counting = [decided.get(e.number, e) for e in self._counting] + [
                decided[change.number]
            ]
        self._waiting.clear()
        record_knobs(self._ledger, list(decided.values()))
        return list(decided.values())

    def at(self, step: int) -> T:
        """The knobs of a step."""
        knobs = self._trainer
        for knob, value in {e.knob: e.value for e in self._own() if e.step <= step}.items():
            knobs = knobs.with_knob(knob, value)
        return knobs

    def bound(self, step: int, declared: Bound | None) -> Bound | None:
        """The bound on staleness that holds for a step."""
        if declared is None:
            return None
        of_bound = [e for e in self._counting if e.knob == MAX_STALENESS]
        name = of_bound[0].trainer if of_bound else ""
        value = bound_at(of_bound, name, step, declared.max_staleness)
        return dataclasses.replace(declared, max_staleness=value)

    def _own(self) -> list[KnobChange]:
        return sorted(
            (e for e in self._counting if e.knob != MAX_STALENESS), key=lambda each: each.number
        )
