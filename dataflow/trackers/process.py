"""One tracker's process: reads the run folder, tells the tracker, keeps how far it has come, and
ends with the run.
"""

import contextlib
import copy
import fcntl
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dataflow.errors import where
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.history.describe import described
from dataflow.records import COMPLETION, ERROR, FINISH_REASON, PROMPT
from dataflow.runs.examples import examples_of, scores_of
from dataflow.runs.texts import visible
from dataflow.runs.which import TRAINED, Part, trainers_of
from dataflow.system.files import RunFolderError
from dataflow.system.messages import Channel, MessageError
from dataflow.trackers.chosen import (
    LONGEST,
    LeaveRun,
    RunIsOver,
    TrackerAt,
    TrackerDone,
    TrackerFailed,
    TrackerSees,
    TrackerToldOf,
    TrackRun,
)
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
            steps = [step for node in self.last for step in self._steps(ledger, node)]
        yield from steps

    def _look(self, ledger: Ledger, source: str) -> None:
        times, now = self._seen.setdefault(source, {}), self._clock()
        end = ledger.next_group_id(source)
        first = max(self._from.get(source, 0), end - MOST_GROUPS)
        waiting = ledger.in_flight(source, among=range(first, end))
        for group in waiting:
            times.setdefault(group.group_id, {}).setdefault(group.state, now)
        self._from[source] = min((group.group_id for group in waiting), default=end)

    def _steps(self, ledger: Ledger, node: str) -> Iterator[StepGroups]:
        # less: it went back to a checkpoint
        last_step = self.last[node] = min(self.last[node], ledger.last_step(node))
        times = dict(ledger.step_times(node, max(0, last_step - 1)))
        for step in ledger.steps(node, last_step, last_step + _STEPS):
            states = self._seen.get(step.source, {})
            groups = {group: states.pop(group, {}) for group in (*step.trained, *step.dropped)}
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
        examples = examples_of(
            [Part(path=path, outcome=TRAINED, node=node, source=None, step=step)], most=EACH
        )
    except (RunFolderError, FileNotFoundError):
        return None
    kinds = {
        "best": examples.best,
        "worst": examples.worst,
        "by chance": examples.random,
        "with an error": examples.failed,
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
        place = None
        while self._waiting and self._clock() - self._waiting[0][0] >= self._settles_s:
            place = self._waiting.popleft()[1]
        return place


# What a library raised, in one line for people.

_SAID = 200
"""Characters of one error's own words: a database adds its statement, and all values of it."""


def in_one_line(error: BaseException) -> str:
    """What it says and where, and what it came from where it does not say so itself.

    >>> in_one_line(OSError(28, "No space left"))
    'OSError: [Errno 28] No space left (at unknown line)'
    """
    words, root = _words(error), _root(error)
    cause = (
        "" if root is error or " ".join(str(root).split()) in words else f", from {_words(root)}"
    )
    return f"{words}{cause} (at {where(error)})"


def _words(error: BaseException) -> str:
    """Its name and words, all in one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= _SAID else f"{words[:_SAID]} .."


def _root(error: BaseException) -> BaseException:
    """What was raised first of all that led to it."""
    errors = [error]
    while (before := _before(errors[-1])) is not None and before not in errors:
        errors.append(before)
    return errors[-1]


def _before(error: BaseException) -> BaseException | None:
    """What it was raised from, or while it was handled."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


POLL_S = 0.5
"""Between two looks into the run folder."""
_BATCH = 200
"""Lines, after which it is kept how far the tracker has come."""
_ALIVE_S = 0.5


DIED = "died"
"""How a run has ended that nobody leads."""


class RunLeader:
    """The scheduler whose tracker this is."""

    def __init__(self, folder: RunFolder, pid: int) -> None:
        """pid: 0: whoever leads the run."""
        self._folder, self._pid, self._has_led = folder, pid, False

    @property
    def is_there(self) -> bool:
        """Whether no other has taken its place, which a standby does also where it is only stopped:
        that has another process tell the tracker, which waits for this one to end.
        """
        leads = self._folder.read_json(CONTROL, {"pid": int}).get("pid")
        # until then the one before it may stand there
        self._has_led = self._has_led or leads == self._pid
        return not self._has_led or leads in (None, self._pid)


class _Leaves(Exception):
    """The process is to end, and another goes on later."""


class TrackerProcess:
    """The loop of one tracker.

    consumes: metrics.jsonl, rollouts, the ledger, activity.jsonl; the word that the run is over, or
        to leave it
    produces: calls of the tracker; how far it has come, in the run folder
    waits for: the tracker, without a bound: the run has one; lines, and the end of the run
    unblocked by: the run, its end
    """

    def __init__(self, order: TrackRun, channel: Channel[Any]) -> None:
        folder = RunFolder.open(order.folder)
        chosen = order.tracker
        self._folder, self._chosen, self._channel = folder, chosen, channel
        self._leader = RunLeader(folder, order.leader)
        self._within_s = order.within_s
        self._place = TrackerPlace.read_from(folder, chosen.name)
        self._settling = Settling(0.0, time.monotonic)
        self._outcome: str | None = None
        self._leaves, self._is_led = False, True
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
                tracker.finish(self._outcome or DIED)
            self._place.kept = run.kept
            self._place.write_to(self._folder, self._chosen.name)
        except _Leaves:
            return self._end(TrackerFailed(call=self._call, error="left"))
        except BaseException as error:
            with contextlib.suppress(OSError):  # the run that reads it may be gone
                traceback.print_exc()
            return self._end(TrackerFailed(call=self._call, error=in_one_line(error)))
        return self._end(TrackerDone())

    def _begin(self, tracker: Tracker) -> TrackedRun:
        graph, config = described(self._folder)
        state = self._place.kept
        run = TrackedRun(
            name=self._folder.path.name,
            folder=self._folder.path,
            graph=graph,
            config=config,
            goes_on=state is not None,
            kept=dict(state or {}),
        )
        where_to_look = tracker.start(run)
        self._keep(run)
        self._settling = Settling(tracker.settles_s, time.monotonic)
        if where_to_look:
            self._post(TrackerSees(text=str(where_to_look)[:LONGEST]))
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
            lines = self._look(tracker, run, tail, watch)
            if self._leaves:
                self._close(tracker)
                raise _Leaves
            if is_over and not lines:
                return
            if not lines:
                self._wait()

    def _look(
        self, tracker: Tracker, run: TrackedRun, tail: RunTail, watch: GroupWatch | None
    ) -> int:
        """What is there now, a batch at most; how many lines."""
        lines = 0
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
            lines += 1
            self._hear(0.0)
            if lines >= _BATCH or self._leaves:
                break
        if watch is not None:
            with contextlib.suppress(LedgerError):
                for groups in watch:
                    self._at("groups")
                    tracker.groups(groups)
                    lines += 1
            self._place.steps = dict(watch.last)
        if tracker.takes_activity:
            self._look_at_activity(tracker)
        if lines:
            self._at("flush")
            tracker.flush()
            self._keep(run)
            self._post(TrackerToldOf(lines=lines))
        return lines

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
        """The word that the run is over, or to leave; whoever led it may be gone."""
        if not self._is_led:
            time.sleep(seconds)
            return
        is_led = not seconds or self._leader.is_there
        try:
            for message in self._channel.arrived() if self._channel.readable(seconds) else ():
                if isinstance(message, RunIsOver):
                    self._outcome = message.outcome
                self._leaves |= isinstance(message, LeaveRun)
        except (EOFError, OSError, MessageError):
            is_led = False
        if not is_led:
            self._is_led, self._outcome = False, self._outcome or DIED
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._within_s)

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
            self._live()

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        self._call, self._alive_at = call, time.monotonic()
        self._live()
        yield

    def _live(self) -> None:
        """Give a sign of life; a run that is stopped reads none, and needs no other."""
        with contextlib.suppress(OSError):
            self._channel.flush()
            if not self._channel.has_output:
                self._channel.post(TrackerAt(call=self._call))

    def _post(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # that the run is gone shows when reading
            self._channel.post(message)

    def _end(self, message: Any) -> int:
        with contextlib.suppress(OSError):
            self._channel.send(message)
        return 0 if isinstance(message, TrackerDone) else 1


def track(order: TrackRun, channel: Channel[Any]) -> int:
    """The body of a tracker's process; the exit status."""
    warnings.simplefilter("default")  # what a library says of its future is no failure
    sys.path[:] = [*order.path, *(entry for entry in sys.path if entry not in order.path)]
    return TrackerProcess(order, channel).run()
