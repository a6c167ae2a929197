"""One tracker's process: reads the run folder, tells the tracker, keeps how far it has come, and
ends with the run.
"""

import contextlib
import copy
import fcntl
import math
import os
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataflow.errors import where
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.records import COMPLETION, ERROR, FINISH_REASON, PROMPT
from dataflow.runs.examples import examples_of, scores_of
from dataflow.runs.texts import visible
from dataflow.runs.which import TRAINED, Part, trainers_of
from dataflow.system.channel import Channel
from dataflow.system.files import RunFolderError
from dataflow.trackers import messages
from dataflow.trackers.chosen import ChosenTracker
from dataflow.trackers.tail import FOLDER, RunTail, TrackerPlace
from dataflow.trackers.tracker import (
    TEXT,
    RolloutTable,
    StepFigures,
    StepGroups,
    TrackedRun,
    Tracker,
)
from dataflow.worker.kept_counts import known_edges

# When the groups of a run came how far, as somebody sees who looks at the ledger now and then.

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


# A table of some rollouts of one step: the best, the worst, some by chance, some with an error.

EACH = 3
_FRONT, _BACK = ("step", "why"), (FINISH_REASON, ERROR, PROMPT, COMPLETION)


def table_of(folder: RunFolder, node: str, step: int) -> RolloutTable | None:
    """Of what a step trained; None where its rollouts are not in this folder, or not any more."""
    trainers = trainers_of(folder.read_json("graph.json"), folder.read_json("config.json"))
    path = folder.rollouts_of(node if len(trainers) > 1 else None).step_file(step)
    if not path.is_file():
        return None
    try:
        found = examples_of(
            [Part(path=path, outcome=TRAINED, node=node, source=None, step=step)], most=EACH
        )
    except (RunFolderError, FileNotFoundError):
        return None
    kinds = {
        "best": found.best,
        "worst": found.worst,
        "by chance": found.random,
        "with an error": found.failed,
    }
    rows = [(why, row) for why, chosen in kinds.items() for row in chosen]
    scores = list(dict.fromkeys(name for _, row in rows for name in scores_of(row)))
    return RolloutTable(
        node=node,
        step=step,
        columns=[*_FRONT, *scores, *_BACK],
        rows=[[step, why, *(_cell(row, name) for name in (*scores, *_BACK))] for why, row in rows],
    )


def _cell(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    return visible(value, TEXT) if isinstance(value, str) else value


# How far a tracker has come for certain, where its library writes later than it takes.


class Settling:
    """Places in the order in which they were reached; one is certain once `settles_s` have gone by
    since.

    >>> now = 0.0
    >>> settling = Settling(2.0, lambda: now)
    >>> settling.reached(TrackerPlace(read=10))
    >>> settling.certain() is None
    True
    >>> now = 2.0
    >>> settling.certain().read
    10
    """

    def __init__(self, settles_s: float, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self._settles_s, self._clock = settles_s, clock
        self._waiting: deque[tuple[float, TrackerPlace]] = deque()

    def reached(self, place: TrackerPlace) -> None:
        """All up to it was taken in."""
        if self._settles_s == math.inf:
            return
        steps = None if place.steps is None else dict(place.steps)
        self._waiting.append(
            (self._clock(), replace(place, kept=copy.deepcopy(place.kept), steps=steps))
        )

    def certain(self) -> TrackerPlace | None:
        """The last place that has become so since this was asked before; None: there is none."""
        found = None
        while self._waiting and self._clock() - self._waiting[0][0] >= self._settles_s:
            found = self._waiting.popleft()[1]
        return found


# What a library raised, in one line for people.

_SAID = 200
"""Characters of one error's own words: a database adds its statement, and all values of it."""


def in_one_line(error: BaseException) -> str:
    """What it says and where, and what it came from where it does not say so itself.

    >>> in_one_line(OSError(28, "No space left"))
    'OSError: [Errno 28] No space left (at unknown line)'
    """
    said, root = _words(error), _root(error)
    cause = "" if root is error or " ".join(str(root).split()) in said else f", from {_words(root)}"
    return f"{said}{cause} (at {where(error)})"


def _words(error: BaseException) -> str:
    """Its name and words, all in one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= _SAID else f"{words[:_SAID]} .."


def _root(error: BaseException) -> BaseException:
    """What was raised first of all that led to it."""
    seen = [error]
    while (before := _before(seen[-1])) is not None and before not in seen:
        seen.append(before)
    return seen[-1]


def _before(error: BaseException) -> BaseException | None:
    """What it was raised from, or while it was handled."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


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
        to leave it
    produces: calls of the tracker; how far it has come, in the run folder
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
        told again.
        """
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
