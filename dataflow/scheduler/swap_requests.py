"""Requests for a swap: the operator is tried in a process of its own while the run goes on, then
swapped in.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from dataflow.errors import DataflowError
from dataflow.folder.live_changes import Swap
from dataflow.scheduler import live_changes
from dataflow.scheduler.control_server import Client, ControlServer
from dataflow.scheduler.requests import Reply, SwapNode, Swapped
from dataflow.scheduler.table import ProcessState, Table, WorkerRecord
from dataflow.system.messages import Life, Refused
from dataflow.worker import swapped
from dataflow.worker.host import Settings
from dataflow.worker.messages import FromWorker, Tried
from dataflow.worker.swapped import TRIAL_S

READY_S = 20.0
"""Seconds for a worker to be ready with it; then the requester is told that it starts."""
LAST_WORD_S = 1.0
"""Seconds for a trial's messages to arrive after its end."""


@dataclass
class _PendingSwap:
    """A swap whose requester waits."""

    client: Client
    request: SwapNode
    swap: Swap
    trial: str
    """The process that tries it; empty: it has ended."""
    until: float
    gone_at: float | None = None
    """When the trial ended without a word."""


class SwapRequests:
    """The swap under way.

    consumes: requests; what a trial says of an operator, and that its process has ended
    produces: a process for each trial; what is to be swapped in; replies
    waits for: the trial, then the worker that starts with the operator
    unblocked by: their messages; a limit for each, after which whoever asked is answered
    """

    def __init__(
        self,
        table: Table,
        server: ControlServer,
        settings_of: Callable[[WorkerRecord], Settings],
        swap_in: Callable[[Swap], None],
        reply: Callable[[Client, SwapNode, Reply], None],
        clock: Callable[[], float],
    ) -> None:
        """settings_of: what a worker that starts now would be told. swap_in: takes an operator in
        that fits.
        """
        self._table, self._server, self._settings_of = table, server, settings_of
        self._swap_in, self._reply, self._clock = swap_in, reply, clock
        self._pending: _PendingSwap | None = None

    def ask(self, client: Client, request: SwapNode) -> None:
        """Begin with a request, or say at once why not."""
        try:
            live_changes.check_swap(self._table, request.node)
        except DataflowError as error:
            self._reply(client, request, Refused(str(error)))
            return
        if self._pending is not None:
            pending_swap = self._pending.swap
            self._reply(
                client,
                request,
                Refused(
                    f"'{pending_swap.node}' is just being swapped for '{pending_swap.reference}';"
                    " ask again when"
                    " that is done"
                ),
            )
            return
        swap = Swap(
            number=self._table.swaps.following,
            node=request.node,
            reference=request.reference,
            by=request.by,
        )
        self._table.last_ticket += 1
        settings = dataclasses.replace(
            self._settings_of(live_changes.worker_of(self._table, request.node)),
            worker=swapped.NAME,
            replica=self._table.last_ticket,
            life=Life(),
            tries=swap,
        )
        trial = f"{swapped.NAME}-{settings.replica}"
        self._server.spawn(trial, dataclasses.asdict(settings), False, False)
        self._pending = _PendingSwap(client, request, swap, trial, self._clock() + TRIAL_S)

    def hear(self, name: str, message: FromWorker) -> bool:
        """Take in what a trial says; whether it is one, be it that of a swap which is over."""
        if name in self._table.workers or not name.startswith(f"{swapped.NAME}-"):
            return False
        if isinstance(message, Tried) and self._pending is not None and self._pending.trial == name:
            self._judge(self._pending, message)
        return True

    def ended(self, name: str) -> None:
        """A process has ended."""
        if (
            self._pending is not None
            and self._pending.trial == name
            and self._pending.gone_at is None
        ):
            self._pending.gone_at = self._clock()

    def look(self) -> None:
        """Answer the requester once the outcome is known, or the time is up."""
        pending, now = self._pending, self._clock()
        if pending is None:
            return
        swaps = self._table.swaps
        if pending.trial:
            if pending.gone_at is not None and now - pending.gone_at > LAST_WORD_S:
                self._refuse(
                    pending,
                    f"importing '{pending.swap.reference}' ended the process that tried it; mend"
                    " it, and swap again",
                )
            elif now > pending.until:
                self._refuse(
                    pending,
                    f"'{pending.swap.reference}' was not imported and checked within"
                    f" {TRIAL_S:.0f} s; have its module do less where it is imported, and swap"
                    " again",
                )
        elif not swaps.worker and swaps.taken_back:
            self._refuse(pending, f"{swaps.taken_back}; it goes on with the operator before")
        elif not swaps.worker:
            self._done(pending, Swapped(live_changes.swap_told(pending.swap)))
        elif live_changes.worker_of(self._table, pending.swap.node).process is ProcessState.GONE:
            self._done(
                pending, Refused(f"the run has ended before '{swaps.worker}' could start again")
            )
        elif now > pending.until:
            self._done(
                pending,
                Swapped(
                    f"'{pending.swap.reference}' is taken in for '{pending.swap.node}', but"
                    f" '{swaps.worker}' has not started within {READY_S:.0f} s (dataflow doctor"
                    " says what it does)"
                ),
            )

    def _judge(self, pending: _PendingSwap, message: Tried) -> None:
        self._dismiss(pending)
        if message.swap is None:
            self._refuse(pending, message.error)
            return
        try:
            live_changes.check_swap(self._table, pending.swap.node)  # it has changed meanwhile
        except DataflowError as error:
            self._refuse(pending, str(error))
            return
        swap = message.swap
        pending.swap = dataclasses.replace(
            pending.swap,
            file=swap.file,
            source=swap.source,
            digest=swap.digest,
            knobs=swap.knobs,
            step=self._table.run.step,
            at=time.time(),
        )
        pending.until = self._clock() + READY_S
        self._swap_in(pending.swap)

    def _refuse(self, pending: _PendingSwap, why: str) -> None:
        self._dismiss(pending)
        self._done(pending, Refused(f"{why} (the run goes on as it was)"))

    def _dismiss(self, pending: _PendingSwap) -> None:
        if pending.trial:
            self._server.dismiss(pending.trial)
            pending.trial = ""

    def _done(self, pending: _PendingSwap, reply: Reply) -> None:
        self._pending = None
        self._reply(pending.client, pending.request, reply)
