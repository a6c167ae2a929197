"""When the groups of a run came how far, as somebody sees who looks at the ledger now and then."""

import time
from collections.abc import Callable, Iterator, Mapping

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.trackers.tracker import StepGroups

MOST_GROUPS = 50_000
"""That are remembered of one source; of more in flight the oldest are known by their step alone."""
_STEPS = 50
"""Of one look."""


class GroupWatch:
    """The groups of all trainers of one run; the ledger has no time but that of each step.

    consumes: states of groups in flight, steps of the surviving line
    produces: the groups of each step that is committed
    waits for: the ledger, as a reader
    unblocked by: -
    """

    def __init__(
        self,
        folder: RunFolder,
        trainers: list[str],
        last: Mapping[str, int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """last: by trainer the step that was told last."""
        self._folder, self._clock = folder, clock
        self.last = {node: last.get(node, 0) for node in trainers}
        self._seen: dict[str, dict[int, dict[str, float]]] = {}
        self._from: dict[str, int] = {}
        """By source, the first group that may still be in flight."""

    def __iter__(self) -> Iterator[StepGroups]:
        """The steps that are new. Errors: LedgerError."""
        with Ledger.open(self._folder.ledger, readonly=True) as ledger:
            for source in {source for node in self.last for source in ledger.sources(node)}:
                self._look(ledger, source)
            made = [step for node in self.last for step in self._steps(ledger, node)]
        yield from made

    def _look(self, ledger: Ledger, source: str) -> None:
        seen, now = self._seen.setdefault(source, {}), self._clock()
        end = ledger.next_group_id(source)
        first = max(self._from.get(source, 0), end - MOST_GROUPS)
        waiting = ledger.in_flight(source, among=range(first, end))
        for group in waiting:
            seen.setdefault(group.group_id, {}).setdefault(group.state, now)
        self._from[source] = min((group.group_id for group in waiting), default=end)

    def _steps(self, ledger: Ledger, node: str) -> Iterator[StepGroups]:
        # less: it went back to a checkpoint
        known = self.last[node] = min(self.last[node], ledger.last_step(node))
        times = dict(ledger.step_times(node, max(0, known - 1)))
        for step in ledger.steps(node, known, known + _STEPS):
            seen = self._seen.get(step.source, {})
            groups = {group: seen.pop(group, {}) for group in (*step.trained, *step.dropped)}
            self.last[node] = step.step
            yield StepGroups(
                node=node,
                step=step.step,
                source=step.source,
                began=times.get(step.step - 1),
                at=times.get(step.step, self._clock()),
                seen=groups,
                dropped=step.dropped,
                metrics=step.metrics,
            )
