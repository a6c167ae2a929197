"""Whoever asks for other values of knobs: checked at once, taken in, and answered when every worker
goes by them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataflow.errors import DataflowError
from dataflow.folder.knob_changes import KnobChange
from dataflow.scheduler.control_server import Client
from dataflow.scheduler.requests import KnobsSet, Refused, Reply, SetKnobs
from dataflow.scheduler.swaps import knob_policy
from dataflow.scheduler.table import Table

BOUNDARY_S = 20.0
"""For the boundaries of all changes to come; then who asked is told that they will."""


@dataclass
class _PendingSet:
    """Somebody waits for these to count."""

    client: Client
    request: SetKnobs
    changes: Sequence[KnobChange]
    until: float


class KnobRequests:
    """The changes under way.

    consumes: requests; what the workers' heartbeats say
    produces: changes; replies
    waits for: the workers, each of which says which change it goes by
    unblocked by: their heartbeats; a limit, after which whoever asked is answered
    """

    def __init__(
        self,
        table: Table,
        take_in: Callable[[Sequence[KnobChange]], None],
        reply: Callable[[Client, SetKnobs, Reply], None],
        clock: Callable[[], float],
    ) -> None:
        """take_in: lets changes count that were checked."""
        self._table, self._take_in, self._reply, self._clock = table, take_in, reply, clock
        self._pending: list[_PendingSet] = []

    def ask(self, client: Client, request: SetKnobs) -> None:
        """Begin with a request, or say at once why not."""
        try:
            changes = knob_policy.planned(self._table, request.wishes, request.by, time.time())
        except DataflowError as error:
            self._reply(client, request, Refused(f"{error} (the run goes on as it was)"))
            return
        self._take_in(changes)
        self._pending.append(_PendingSet(client, request, changes, self._clock() + BOUNDARY_S))

    def look(self) -> None:
        """Answer whoever asked, when it is known what came of it, or the time is up."""
        for pending in list(self._pending):
            late = knob_policy.late(self._table, pending.changes[-1].number)
            if late and self._clock() <= pending.until:
                continue
            self._pending.remove(pending)
            what = ", ".join(each.mark for each in pending.changes)
            text = f"{what} from now on"
            if late:
                text = (
                    f"{what} is taken in, and counts with {late} at the next boundary, which has"
                    " not come yet"
                )
            self._reply(pending.client, pending.request, KnobsSet(text))
