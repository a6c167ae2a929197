"""The doctor within the scheduler: notes what moves, writes a report when asked, and ends a run
that has stalled.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from dataflow.doctor.facts import AWAY, SILENT_S, gather
from dataflow.doctor.history import History, Stillness, busy, decide, marks
from dataflow.doctor.report import report
from dataflow.doctor.verdict import MOVES_S, seconds, verdict
from dataflow.errors import DeadlineError
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.table import ProcessState, Table, WorkerRecord
from dataflow.system.files import Extras
from dataflow.worker.host import Settings
from dataflow.worker.messages import AskStacks

LOOK_S = 0.5
_NOTED_A_SECOND = 1000
"""Above so many workers, it checks more rarely how they stand."""
_STACKS_S = 1.0
"""Seconds for the workers to send their stacks before a report is written."""


class StallWatch:
    """Looks at a run a few times a second.

    consumes: the run's phase, the workers' heartbeats and stacks; wishes for a report
    produces: sentences for the user; requests for stacks; reports in the run folder; DeadlineError
        for a stalled run
    waits for: the workers' stacks, before a report is written
    unblocked by: the clock
    """

    def __init__(
        self,
        table: Table,
        send: Callable[[str, AskStacks], None],
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """table: as it is at any time. send: sends a message to a worker. settings: of the run."""
        self._table, self._send, self._settings, self._clock = table, send, settings, clock
        self._history = History()
        self._still = Stillness()
        self._busy = 0.0
        self._looked = float("-inf")
        self._wish = self._warned = False
        self._due: float | None = None

    def wish(self) -> None:
        """Ask for a report in the run folder; may be called from a signal handler."""
        self._wish = True

    def answer(self, stacks: bool = True) -> dict[str, Any]:
        """What is known now, in plain values, for a client. stacks: ask the workers for theirs."""
        if stacks:
            self._ask_for_stacks()
        return self._said()

    def look(self) -> list[str]:
        """Sentences for the user. Raises DeadlineError, its report written, when the run has
        stalled.
        """
        now = self._clock()
        every_s = max(LOOK_S, len(self._table.workers) / _NOTED_A_SECOND)
        if not self._settings.folder or now - self._looked < every_s:
            return []
        self._looked = now
        self._note(now)
        decision = decide(
            self._still, stall_s=self._table.limits.stall_s, slice_s=self._table.limits.slice_s
        )
        if self._due is None and (self._wish or decision == "stalled"):
            self._due = now + _STACKS_S
            self._ask_for_stacks()
        sentences = self._warn(decision == "slow")
        if self._due is not None and now >= self._due:
            self._due, self._wish = None, False
            sentences.append(self._write(stalled=decision == "stalled"))
        return sentences

    def _said(self) -> dict[str, Any]:
        now = self._clock()
        return {
            "pid": os.getpid(),
            "phase": self._table.run.phase,
            "draining": self._table.run.draining,
            "step": self._table.run.step,
            "steps": self._settings.run.steps,
            "still_s": self._still.still_s,
            "workers": {record.name: _plain(record, now) for record in self._table},
            "history": self._history.plain(now),
        }

    def _ask_for_stacks(self) -> None:
        for record in self._table:
            if record.process in (ProcessState.STARTING, ProcessState.READY):
                self._send(record.name, AskStacks())

    def _note(self, now: float) -> None:
        workers = {record.name: _plain(record, now) for record in self._table}
        self._history.note(workers, now)
        worked, self._busy = busy(workers) > self._busy, busy(workers)
        at_work = worked or any(
            w["state"] in AWAY or (w["heartbeat"].get("at") and w["silent_s"] < SILENT_S)
            for w in workers.values()
        )
        watched = self._table.run.phase not in ("starting", "over") and not self._table.run.draining
        still = self._still.look(marks(workers), at_work, now)
        self._still = still if watched else Stillness(marks=still.marks, looked=now)

    def _warn(self, slow: bool) -> list[str]:
        """Once for every time that the run stands still."""
        warn, self._warned = slow and not self._warned, slow
        if not warn:
            return []
        facts = gather(
            RunFolder.open(self._settings.folder), self._said(), during_s=0.0, wake=False
        )
        return [
            f"nothing has moved for {seconds(self._still.still_s)}: {verdict(facts, moves_s=0.0)}"
        ]

    def _write(self, *, stalled: bool) -> str:
        folder = RunFolder.open(self._settings.folder)
        facts = gather(folder, self._said())
        moves_s = 0.0 if stalled else MOVES_S
        root = verdict(facts, moves_s=moves_s)
        path = folder.path / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        content = report(folder, facts, all_stacks=True, moves_s=moves_s)
        refused: list[str] = []
        Extras(refused.append).write(path, content)
        if stalled:
            where = (
                refused[0]
                if refused
                else f"{path} says who waits for whom and where each worker is"
            )
            raise DeadlineError(
                f"nothing has moved for {seconds(self._still.still_s)}: {root} The run ends;"
                f" {where}; if it is to have more time, raise Limits.stall_s or Limits.slice_s"
            )
        return f"{root} {refused[0]}" if refused else f"wrote {path}: {root}"


def _plain(record: WorkerRecord, now: float) -> dict[str, Any]:
    """What is known of a worker, for the doctor."""
    told_at, threads = record.stacks or (now, [])
    return {
        "nodes": list(record.nodes),
        "pid": record.pid,
        "host": record.host,
        "machine": record.machine,
        "state": record.state,
        "cause": record.cause,
        "restarts": record.life.attempt,
        "silent_s": now - record.heard_at,
        "heartbeat": dict(record.told),
        "threads": threads,
        "threads_s": now - told_at,
    }
