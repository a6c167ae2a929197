"""Workers that somebody has stopped by a signal (SIGSTOP): how long they may stand still."""

from collections.abc import Callable

from dataflow.folder.faults import STOPPED, Faults
from dataflow.scheduler.attempts import WorkerState


class Stops:
    """Who stands still, and since when.

    Nobody knows whether whoever stopped a worker will ever come back, and the run waits for it meanwhile.

    consumes: the forkserver's events of workers
    produces: whom to let go on; lines of faults.jsonl
    waits for: `limit_s`
    unblocked by: its owner's clock
    """

    def __init__(self, faults: Faults, limit_s: float, clock: Callable[[], float]) -> None:
        self._faults, self._limit_s, self._clock = faults, limit_s, clock
        self._since: dict[str, float] = {}

    def note(self, state: WorkerState, event: str) -> bool:
        """Take in an event; False: it is about something else, as when the worker has ended."""
        since = self._since.pop(state.name, None)
        if event == "stopped":
            self._since[state.name] = self._clock()
        elif event == "continued" and since is None and state.state == "ready":
            self._faults.recovered(state.name, f"worker {state.name} {STOPPED}, and was let go on")
        return event in ("stopped", "continued")

    def let_go_on(self, state: WorkerState) -> bool:
        """Whether a worker has stood still for too long; said once of each stop."""
        since = self._since.get(state.name)
        if since is None or self._clock() - since <= self._limit_s:
            return False
        del self._since[state.name]
        if state.state == "ready":
            self._faults.noticed(state.name, STOPPED, state.settings.attempt, since)
        return True
