"""One tracker's process: reads the run folder, tells the tracker, keeps how far it has come, and
ends with the run."""

import contextlib
import copy
import fcntl
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dataflow.folder.ledger import LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.runs.which import trainers_of
from dataflow.system.channel import Channel
from dataflow.trackers import messages
from dataflow.trackers.chosen import ChosenTracker
from dataflow.trackers.failure import in_one_line
from dataflow.trackers.group_watch import GroupWatch
from dataflow.trackers.samples import table_of
from dataflow.trackers.settling import Settling
from dataflow.trackers.tail import FOLDER, RunTail, TrackerPlace
from dataflow.trackers.tracker import StepFigures, TrackedRun, Tracker
from dataflow.worker.kept_counts import known_edges

POLL_S = 0.5
"""Between two looks into the run folder."""
_BATCH = 200
"""Lines, after which it is kept how far the tracker has come."""
_ALIVE_S = 0.5


class _Leaves(Exception):
    """The process is to end, and another goes on later."""


class TrackerProcess:
    """The loop of one tracker.

    consumes: metrics.jsonl, rollouts, the ledger, activity.jsonl; the word that the run is over, or
    to leave it produces: calls of the tracker; how far it has come, in the run folder
    waits for: the tracker, without a bound: its keeper has one; lines, and the end of the run
    unblocked by: the run, its keeper
    """

    def __init__(self, folder: RunFolder, chosen: ChosenTracker, channel: Channel[Any]) -> None:
        self._folder, self._chosen, self._channel = folder, chosen, channel
        self._place = TrackerPlace.read_from(folder, chosen.name)
        self._settling = Settling(0.0, time.monotonic)
        self._outcome: str | None = None
        self._leaves = False
        self._call, self._alive_at = "", float("-inf")
        self._activity = 0

    def run(self) -> int:
        """Do it; the exit status."""
        try:
            with self._calling("waiting for the process that told this run before"):
                self._hold()
            with self._calling("start"):
                tracker = self._chosen.make()
                run = self._begin(tracker)
            self._follow(tracker, run)
            with self._calling("finish"):
                tracker.finish(self._outcome or "died")
            self._place.kept = run.kept
            self._place.write_to(self._folder, self._chosen.name)
        except _Leaves:
            return self._end(messages.TrackerFailed(call=self._call, error="left"))
        except BaseException as error:
            with contextlib.suppress(OSError):  # the keeper that reads it may be gone
                traceback.print_exc()
            return self._end(messages.TrackerFailed(call=self._call, error=in_one_line(error)))
        return self._end(messages.TrackerDone())

    def _begin(self, tracker: Tracker) -> TrackedRun:
        graph, config = described(self._folder)
        kept = self._place.kept
        run = TrackedRun(
            name=self._folder.path.name,
            folder=self._folder.path,
            graph=graph,
            config=config,
            goes_on=kept is not None,
            kept=dict(kept or {}),
        )
        told = tracker.start(run)
        self._keep(run)
        self._settling = Settling(tracker.settles_s, time.monotonic)
        if told:
            self._channel.send(messages.TrackerSees(text=str(told)[: messages.LONGEST]))
        return run

    def _follow(self, tracker: Tracker, run: TrackedRun) -> None:
        tail = RunTail(self._folder, self._place.read)
        last = self._place.steps or {}
        watch = (
            GroupWatch(self._folder, trainers_of(run.graph, run.config), last)
            if tracker.takes_groups
            else None
        )
        while True:
            # before the look, so that nothing comes after the last one
            is_over = self._outcome is not None
            told = self._look(tracker, run, tail, watch)
            if self._leaves:
                self._close(tracker)
                raise _Leaves
            if is_over and not told:
                return
            if not told:
                self._wait()

    def _look(
        self, tracker: Tracker, run: TrackedRun, tail: RunTail, watch: GroupWatch | None
    ) -> int:
        """What is there now, a batch at most; how many lines."""
        told = 0
        for place, figures in tail:
            if figures is not None:
                before = copy.deepcopy(run.kept)
                try:
                    if self._place.figures < place:
                        self._at("log")
                        tracker.log(figures)
                        self._place.figures, before = place, copy.deepcopy(run.kept)
                    self._tell_rollouts(tracker, figures)
                except Exception:
                    self._place.kept = before
                    self._close(tracker)
                    raise
            self._place.read = place
            told += 1
            self._hear(0.0)
            if told >= _BATCH or self._leaves:
                break
        if watch is not None:
            with contextlib.suppress(LedgerError):
                for groups in watch:
                    self._at("groups")
                    tracker.groups(groups)
                    told += 1
            self._place.steps = dict(watch.last)
        if tracker.takes_activity:
            self._look_at_activity(tracker)
        if told:
            self._at("flush")
            tracker.flush()
            self._keep(run)
            self._channel.send(messages.TrackerToldOf(lines=told))
        return told

    def _tell_rollouts(self, tracker: Tracker, figures: StepFigures) -> None:
        """Those of a line's step, where it is time for some."""
        every = tracker.rollouts_every
        if not figures.is_evaluation and every and (figures.step - 1) % every == 0:
            self._at("rollouts")
            if (table := table_of(self._folder, figures.node, figures.step)) is not None:
                tracker.rollouts(table)

    def _close(self, tracker: Tracker) -> None:
        """Before an end in the midst of the run: what was taken in, and can be brought out, is not
        told again."""
        call = self._call
        with contextlib.suppress(Exception):
            self._at("flush")
            tracker.flush()
            self._at("close")
            tracker.close()
            self._place.write_to(self._folder, self._chosen.name)
        self._call = call

    def _look_at_activity(self, tracker: Tracker) -> None:
        newest = None
        for place, line in self._folder.stream_activity(self._activity):
            self._activity, newest = place, line
        if newest is not None and isinstance(newest.get("nodes"), dict):
            self._at("activity")
            tracker.activity(newest["nodes"])
            tracker.crossed(known_edges(newest.get("edges")))

    def _wait(self) -> None:
        self._at("")
        self._hear(POLL_S)
        self._settle()

    def _hear(self, seconds: float) -> None:
        """The word that the run is over, or to leave. Raises EOFError where the keeper is gone."""
        if self._channel.readable(seconds):
            for message in self._channel.arrived():
                if isinstance(message, messages.RunIsOver):
                    self._outcome = message.outcome
                self._leaves |= isinstance(message, messages.LeaveRun)

    def _hold(self) -> None:
        """Wait until no other process tells this tracker of this run."""
        try:
            (self._folder.path / FOLDER).mkdir(exist_ok=True)
            lock = os.open(
                self._folder.path / FOLDER / f"{self._chosen.name}.lock",
                os.O_RDWR | os.O_CREAT,
                0o600,
            )
        except OSError:  # a disk without room, or a folder of another user
            return
        while True:
            try:
                # that no process below has, whatever it inherits
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._at(self._call)
                self._hear(POLL_S)
            else:
                self._place = TrackerPlace.read_from(self._folder, self._chosen.name)
                return

    def _keep(self, run: TrackedRun) -> None:
        """How far it has come, once that is certain."""
        self._place.kept = run.kept
        self._settling.reached(self._place)
        self._settle()

    def _settle(self) -> None:
        if (place := self._settling.certain()) is not None:
            place.write_to(self._folder, self._chosen.name)

    def _at(self, call: str) -> None:
        now = time.monotonic()
        if call != self._call or now - self._alive_at >= _ALIVE_S:
            self._call, self._alive_at = call, now
            self._channel.send(messages.TrackerAt(call=call))

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        self._call, self._alive_at = call, time.monotonic()
        self._channel.send(messages.TrackerAt(call=call))
        yield

    def _end(self, message: Any) -> int:
        with contextlib.suppress(OSError):
            self._channel.send(message)
        return 0 if isinstance(message, messages.TrackerDone) else 1


def track(
    folder: Path, chosen: ChosenTracker, channel: Callable[[], Channel[Any]], path: Sequence[str]
) -> int:
    """The body of a tracker's process. path: where modules are found."""
    warnings.simplefilter("default")  # what a library says of its future is no failure
    sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
    return TrackerProcess(RunFolder.open(folder), chosen, channel()).run()
