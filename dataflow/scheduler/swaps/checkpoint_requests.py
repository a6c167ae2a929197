"""Whoever asks for a checkpoint: each trainer writes one after the step under way, and the asker
hears of it then."""

from collections.abc import Callable
from dataclasses import dataclass

from dataflow.scheduler.control_server import Client
from dataflow.scheduler.requests import CheckpointKept, KeepCheckpoint, Refused, Reply
from dataflow.scheduler.table import Table

WRITTEN_S = 45.0
"""For the step under way to end and its checkpoint to be written; then who asked is told that it
will be."""


@dataclass
class _PendingCheckpoint:
    """Somebody waits for it."""

    client: Client
    request: KeepCheckpoint
    number: int
    until: float


class CheckpointRequests:
    """The checkpoints under way that were asked for.

    consumes: requests; what trainers say of themselves
    produces: wishes, which a trainer that is started again hears too; replies
    waits for: the trainers
    unblocked by: their heartbeats; a limit, after which whoever asked is answered
    """

    def __init__(
        self,
        table: Table,
        wish: Callable[[int], None],
        reply: Callable[[Client, KeepCheckpoint, Reply], None],
        clock: Callable[[], float],
    ) -> None:
        """wish: lets each trainer write one, by its number."""
        self._table, self._wish, self._reply, self._clock = table, wish, reply, clock
        self._pending: list[_PendingCheckpoint] = []

    def ask(self, client: Client, request: KeepCheckpoint) -> None:
        """Begin with a request, or say at once why not."""
        run = self._table.run
        if self._table.is_ending or not self._table.begun or not run.checkpoints():
            what = "is ending and writes its last one" if self._table.is_ending else "is starting"
            what = what if run.checkpoints() else "trains nothing"
            why = f"a checkpoint is wanted of a run that {what}; ask one that is at work on steps"
            self._reply(client, request, Refused(why))
            return
        number = run.checkpoint + 1
        self._wish(number)
        self._pending.append(_PendingCheckpoint(client, request, number, self._clock() + WRITTEN_S))

    def look(self) -> None:
        """Answer whoever asked, when it is written, or the time is up."""
        for pending in list(self._pending):
            late = self._table.run.without_checkpoint(pending.number)
            if late and self._clock() <= pending.until:
                continue
            self._pending.remove(pending)
            steps = self._table.run.checkpoints()
            text = "; ".join(
                f"'{trainer}' has the checkpoint of step {step}" for trainer, step in steps.items()
            )
            if late:
                text = f"it is taken in, but {late} have not written it within {WRITTEN_S:.0f} s"
            self._reply(pending.client, pending.request, CheckpointKept(text))
