"""The scheduler that takes the place of one that has died: its workers are at work, and it goes on with them."""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dataflow.graph import Graph
from dataflow.limits import Limits
from dataflow.planning.plan import Plan
from dataflow.scheduler.attempts import WorkerState, how
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import TakenDesk
from dataflow.worker.host import Settings

NAME = "scheduler"
"""In faults.jsonl."""


class Successor(Scheduler):
    """As `Scheduler`, but for its start.

    Whoever was at work stays so, and hears again what it may have missed. Whoever was not, because it was starting, or
    had died, or died meanwhile, has fallen, and is started again like any other.
    """

    def __init__(
        self, graph: Graph, plan: Plan, settings: Settings, desk: TakenDesk, left: Mapping[str, Any], *,
        limits: Limits | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """desk: with the workers. left: the last handover of the scheduler before."""
        keys: Mapping[str, bytes] = next((event["settings"]["keys"] for event in desk.handed), {})
        super().__init__(graph, plan, dataclasses.replace(settings, keys=keys), limits=limits, clock=clock, desk=desk)
        self._left, self._handed = left, {event["name"]: event for event in desk.handed}
        self._alone_s, self._was = desk.alone_s, "did not answer" if desk.lives else "ended"

    def start(self, progress: Callable[[Collection[str]], None] = lambda late: None) -> None:
        """Take the run up where it stands; it goes on at once."""
        left, now = self._left, self._clock()
        self._faults.noticed(NAME, self._was, self._desk.number - 1, now - self._alone_s)
        self.conductor.take_up(left["conductor"])
        self._schedule, self._ended = [(step, wishes) for step, wishes in left["schedule"]], set(left["ended"])
        orders = self.scaling.take_up(left["scaling"])
        for name, known in left["workers"].items():
            self.workers[name] = self._state(name, known)
        self._join_deadline, self._deadline = now + self.limits.start_s, now + self.limits.drain_s
        self.recovery.take_up({name: state.settings.attempt for name, state in self.workers.items()})
        self._begun = True
        for name, known in left["workers"].items():
            self._adopt(self.workers[name], known["state"])
        self._obey(orders)
        for state in [state for state in self.workers.values() if state.state == "ready"]:
            self._desk.send(state.name, {"kind": "start"})
            for word in [word for node in state.nodes for word in self.conductor.words_for(node, again=False)]:
                self._tell(state, word)
        self._desk.stay(self.limits.adopt_s, self.limits.drain_s, self.limits.silent_s)
        why = f"whose scheduler {self._was}: without one for {self._alone_s:.1f} s"
        self._faults.recovered(NAME, f"process {os.getpid()} goes on with the run, {why}")

    def _state(self, name: str, known: Mapping[str, Any]) -> WorkerState:
        """What is known of one worker: from the scheduler before, and from the forkserver where it ever forked it."""
        worker, _, replica = name.rpartition("-")
        handed, now = self._handed.get(name), self._clock()
        settings = (
            self._settings_of(worker, int(replica)) if handed is None else Settings.from_plain(handed["settings"])
        )
        return WorkerState(
            name, self.plan.workers[worker], settings, forked=now, heard=now, pid=handed["pid"] if handed else 0,
            addresses=known["addresses"], earlier=known["earlier"],
        )  # fmt: skip

    def _adopt(self, state: WorkerState, was: str) -> None:
        handed = self._handed.get(state.name)
        if handed is not None and handed["alive"]:
            self._running.add(state.name)
            if was in ("ready", "stopping"):
                state.state, state.wired = was, True
            else:
                self._kill(state, "was not at work when the scheduler ended")
        elif was in ("left", "gone"):
            state.state = was
        elif self.scaling.leaves(state.name):
            state.state = "left"
            self._obey(self.scaling.exited(state.name))
        elif was == "stopping" or self.conductor.over:
            state.state = "gone"
        else:
            state.state = "ready"
            self._fell(state, "was never started" if handed is None else how(handed["status"]))
