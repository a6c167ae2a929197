"""The trackers of a run, as the run sees them: a process for each, which is watched, ended when it
hangs, and tried again.

None of them has a file of the run open for writing but in the run folder.
"""

import contextlib
import math
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.system import processes
from dataflow.system.child import KILL_S, Child, fork, program
from dataflow.system.messages import Channel, MessageError
from dataflow.trackers.chosen import (
    SEND_S,
    TRACKER_CODEC,
    ChosenTracker,
    LeaveRun,
    RunIsOver,
    TrackerAt,
    TrackerDone,
    TrackerFailed,
    TrackerSees,
    TrackerToldOf,
    TrackRun,
)
from dataflow.worker.cpu_watchdog import LOOK_S, CpuWatchdog

STEPS_BACK = True
"""Whether trackers have what nobody else wants of processors and disks."""
LEAVE_S = 3.0
"""For trackers that are to leave the run before its end; then they are killed."""
AGAIN_S = 10.0
"""Before the first try after one that failed; then twice as long each time."""
SPARE_BYTES = 1 << 30
"""Where less is free, trackers do not run, as they write what they like, and a run needs its disk
for rollouts."""
LOG_BYTES = 1 << 20
"""Of what a tracker prints, in one attempt; the rest is read and lost."""
LOG = "trackers.log"
TURN_S = 0.1
_READ_BYTES = 1 << 16


@dataclass(eq=False)
class TrackerChild:
    """One tracker, and how it stands."""

    chosen: ChosenTracker
    process: Child | None = None
    channel: Channel[Any] | None = None
    prints: int = -1
    """Where what it prints comes from; below 0: nowhere."""
    printed: int = 0
    heard: float = 0.0
    used_before_s: float = 0.0
    used_s: float = 0.0
    """Its processor time when it fell silent, and now."""
    idle: CpuWatchdog | None = None
    """Of its silence."""
    call: str = ""
    fails: int = 0
    well_since: float | None = None
    """When it last began to take in lines; None: it has not since it failed."""
    next_at: float = float("-inf")
    is_told: bool = False
    """Whether people know that it fails."""
    has_shown: bool = False
    """Whether people know where to look."""
    is_done: bool = False
    failure: TrackerFailed | None = None
    killed: str = ""
    """Why it was killed; empty: it was not."""
    leaves_until: float | None = None
    """When it is killed that was asked to leave, by the machine's clock; None: it was not asked."""
    is_last_try: bool = False
    """The run is over, and it was tried again since."""


class TrackersOfRun:
    """All trackers of one run.

    consumes: what trackers' processes say and print; the word that the run is over, by `end`
    produces: processes; sentences for people, each once
    waits for: nothing while the run goes on; at its end the trackers, up to `Limits.track_s`; in
    `close` `LEAVE_S`
    unblocked by: trackers; deadlines
    """

    def __init__(
        self,
        folder: RunFolder,
        chosen: Sequence[ChosenTracker],
        limits: Limits | None = None,
        *,
        forks: bool = False,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """forks: trackers are forks of this process, which has no threads and leads no run, rather
        than fresh ones, which end with the scheduler that this is.
        """
        self._folder, self._limits, self._forks = folder, limits or Limits(), forks
        self._clock, self._free_bytes = clock, free_bytes
        self.trackers = [TrackerChild(tracker) for tracker in chosen]
        self._outcome: str | None = None
        self._within_s = self._until = math.inf
        self._has_room, self._looked_at_room = True, float("-inf")
        self._texts: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(tracker.is_done for tracker in self.trackers)

    def look(self, wait_s: float = 0.0) -> list[str]:
        """Look at all of them, and return what is new for people; waits for one to say
        something.
        """
        self._turn(wait_s)
        texts, self._texts = self._texts, []
        return texts

    def over(self, outcome: str, within_s: float) -> None:
        """The run is over: trackers are to tell what is left, in so many seconds."""
        if self._outcome is None:
            self._outcome, self._within_s, self._until = outcome, within_s, self._clock() + within_s
            for tracker in self.trackers:
                self._post(tracker, RunIsOver(outcome=outcome))

    def end(self, outcome: str, say: Callable[[str], object], within_s: float = math.inf) -> None:
        """The run is over, and trackers take in what is left: wait for that, up to `Limits.track_s`
        or `within_s`, or Ctrl-C.
        """
        within_s = min(within_s, self._limits.track_s)
        self.over(outcome, within_s)
        began, is_told = time.monotonic(), False
        try:
            while not self.is_done and time.monotonic() < began + within_s + LEAVE_S + KILL_S:
                for text in self.look(TURN_S):
                    say(text)
                if not is_told and time.monotonic() - began > 1.0:
                    is_told = True
                    say(
                        f"waiting for {self._names} to take in what is left, {within_s:.0f} s at"
                        " most"
                    )
        except KeyboardInterrupt:
            self._kill_all()
            self._until = float("-inf")
        for text in self.look():
            say(text)
        self.close()

    def close(self) -> None:
        """End what is left of them, after they have brought out what they took in, where they
        can.
        """
        for tracker in self.trackers:
            self._leave(tracker)
        until = time.monotonic() + LEAVE_S
        for tracker in self.trackers:
            if tracker.process is not None:
                tracker.process.ended_within(until - time.monotonic())
                self._take_all(tracker, self._clock())
        self._kill_all()

    def _kill_all(self) -> None:
        for tracker in self.trackers:
            if tracker.process is not None:
                tracker.process.kill()
        for tracker in self.trackers:
            if tracker.process is not None:
                tracker.process.end(KILL_S)
                self._clear(tracker)

    @property
    def _names(self) -> str:
        return ", ".join(tracker.chosen.name for tracker in self.trackers)

    def _say(self, text: str) -> None:
        self._texts.append(text)
        _append(self._folder.logs / LOG, f"{text}\n".encode())

    def _turn(self, wait_s: float) -> None:
        now = self._clock()
        self._look_at_room(now)
        for tracker in self.trackers:
            if tracker.process is None and self._may_start(tracker, now):
                self._start(tracker, now)
        running = [tracker for tracker in self.trackers if tracker.process is not None]
        ready = [t.channel.fileno() for t in running if t.channel is not None]
        prints = [t.prints for t in running if t.prints >= 0 and t.printed <= LOG_BYTES]
        if wait_s:
            select.select([*ready, *prints], [], [], wait_s)
        for tracker in running:
            self._take_prints(tracker)
            self._hear(tracker)
        self._look_at_ends()

    def _may_start(self, tracker: TrackerChild, now: float) -> bool:
        if tracker.is_done or not self._has_room:
            return False
        if self._outcome is None:
            return now >= tracker.next_at
        if tracker.is_last_try or now >= self._until:
            return False
        tracker.is_last_try = True
        return True

    def _start(self, tracker: TrackerChild, now: float) -> None:
        channel, theirs = Channel.pair(TRACKER_CODEC)
        prints, inner = os.pipe()
        os.set_blocking(prints, False)
        tracker.channel, tracker.prints, tracker.printed = channel, prints, 0
        tracker.heard, tracker.call = now, "start"
        tracker.well_since = tracker.failure = tracker.leaves_until = tracker.idle = None
        tracker.killed = ""
        try:
            tracker.process = self._process(theirs, inner)
        except OSError as error:
            self._clear(tracker)
            self._failed(tracker, f"cannot be started: {error}")
            return
        finally:
            theirs.close()
            os.close(inner)
        self._post(
            tracker,
            TrackRun(
                folder=str(self._folder.path),
                tracker=tracker.chosen,
                path=[entry or str(Path.cwd()) for entry in sys.path],
                leader=0 if self._forks else os.getpid(),
                within_s=self._limits.track_s,
                steps_back=STEPS_BACK,
            ),
        )
        if self._outcome is not None:
            self._post(tracker, RunIsOver(outcome=self._outcome))

    def _process(self, theirs: Any, inner: int) -> Child:
        if not self._forks:
            return program(
                "dataflow.trackers",
                end=theirs,
                leads=True,
                outlives_s=self._limits.track_s + LEAVE_S,
                stdin=subprocess.DEVNULL,
                stdout=inner,
                stderr=inner,
            )

        def body() -> int:
            from dataflow.trackers.process import track

            os.dup2(inner, 1)
            os.dup2(inner, 2)
            channel: Channel[Any] = Channel(theirs, TRACKER_CODEC, SEND_S)
            return track(channel.receive(SEND_S), channel)

        return fork(body, leads=True, keep=(theirs.fileno(), inner), ends_with_parent=9)

    def _post(self, tracker: TrackerChild, message: Any) -> None:
        if tracker.channel is not None:
            with contextlib.suppress(OSError):  # its end is seen elsewhere
                tracker.channel.post(message)

    def _hear(self, tracker: TrackerChild) -> None:
        assert tracker.process is not None, "it runs"
        now = self._clock()
        self._take_all(tracker, now)
        if tracker.process.poll() is not None:
            self._ended(tracker)
        elif tracker.leaves_until is not None:
            if time.monotonic() > tracker.leaves_until:
                tracker.process.kill()
            if time.monotonic() > tracker.leaves_until + KILL_S:
                self._clear(tracker)
        elif not tracker.killed and self._hangs_s(tracker, now) > self._limits.track_s:
            state = f"has been in '{tracker.call}'" if tracker.call else "was not heard"
            tracker.killed = f"{state} for {self._limits.track_s:.0f} s, and was ended"
            tracker.process.kill()

    def _hangs_s(self, tracker: TrackerChild, now: float) -> float:
        """How long it has been silent and computed nothing, or has computed. Time in which others
        had all processors does not count.
        """
        assert tracker.process is not None, "it runs"
        pid = tracker.process.pid

        def used_s() -> float:
            tracker.used_s = sum(processes.cpu_s(p) or 0.0 for p in (pid, *processes.below(pid)))
            return tracker.used_s

        if now - tracker.heard < LOOK_S:
            return 0.0
        if tracker.idle is None:
            tracker.idle, tracker.used_before_s = CpuWatchdog(used_s), used_s()
        idle_s = tracker.idle.look(now - tracker.heard, now)
        return max(idle_s, tracker.used_s - tracker.used_before_s)

    def _take_all(self, tracker: TrackerChild, now: float) -> None:
        """What it has said."""
        if tracker.channel is None:
            return
        with contextlib.suppress(EOFError, MessageError, OSError):  # its end is seen elsewhere
            tracker.channel.flush()
            for message in tracker.channel.arrived():
                tracker.heard, tracker.idle = now, None
                self._take(tracker, message, now)

    def _take(self, tracker: TrackerChild, message: Any, now: float) -> None:
        match message:
            case TrackerAt(call=call):
                tracker.call = call
            case TrackerSees(text=text):
                if not tracker.has_shown:
                    tracker.has_shown = True
                    self._say(f"{tracker.chosen.name}: {text}")
            case TrackerToldOf():
                tracker.well_since = now if tracker.well_since is None else tracker.well_since
                if tracker.is_told and now - tracker.well_since >= self._limits.track_s:
                    self._say(f"tracker {tracker.chosen.name} takes in the run again")
                    tracker.is_told, tracker.fails = False, 0
            case TrackerFailed():
                tracker.failure = message
            case TrackerDone():
                tracker.is_done = True

    def _ended(self, tracker: TrackerChild) -> None:
        assert tracker.process is not None, "it ran"
        self._take_all(tracker, self._clock())  # what it said between the last look and its end
        self._take_prints(tracker)
        state = tracker.process.state
        self._clear(tracker)
        if tracker.is_done or tracker.leaves_until is not None:
            return
        if tracker.killed:
            self._failed(tracker, tracker.killed)
        elif tracker.failure is not None:
            self._failed(tracker, f"failed in '{tracker.failure.call}': {tracker.failure.error}")
        else:
            self._failed(tracker, f"{state} in '{tracker.call}'")

    def _failed(self, tracker: TrackerChild, why: str) -> None:
        pause_s = min(self._limits.track_again_s, AGAIN_S * 2**tracker.fails)
        tracker.fails, tracker.next_at = min(tracker.fails + 1, 16), self._clock() + pause_s
        if self._outcome is not None and tracker.is_last_try:
            self._give_up(tracker, why)
        elif not tracker.is_told:
            tracker.is_told = True
            log = f"{self._folder.path.name}/logs/tracker-{tracker.chosen.name}.log"
            self._say(
                f"tracker {tracker.chosen.name} {why}; the run goes on, and it is tried again from"
                f" where it was; see {log}"
            )

    def _give_up(self, tracker: TrackerChild, why: str) -> None:
        tracker.is_done = True
        again = f"dataflow track {self._folder.path} --to {tracker.chosen.reference}"
        state = "has failed" if tracker.is_told else why
        self._say(
            f"tracker {tracker.chosen.name} {state}; it lacks the end of the run: {again} tells it"
            " the rest"
        )

    def _look_at_ends(self) -> None:
        """Of a run that is over: whom to wait for no longer."""
        if self._outcome is None:
            return
        is_late = self._clock() >= self._until
        for tracker in self.trackers:
            if tracker.is_done:
                continue
            if tracker.process is not None:
                if is_late:
                    self._leave(tracker)
            elif is_late:
                self._give_up(tracker, f"was not done {self._within_s:.0f} s after the run")
            elif tracker.is_last_try or not self._has_room:
                is_failed = tracker.is_last_try
                self._give_up(
                    tracker, "has failed" if is_failed else "stood still for want of room"
                )

    def _look_at_room(self, now: float) -> None:
        if now - self._looked_at_room < 0.5:
            return
        self._looked_at_room = now
        try:
            free = self._free_bytes(self._folder.path)
        except OSError:
            return
        had_room = self._has_room
        self._has_room = free >= (SPARE_BYTES if had_room else 2 * SPARE_BYTES)
        if had_room and not self._has_room:
            for tracker in self.trackers:
                self._leave(tracker)
            self._say(
                f"trackers stand still: the disk of {self._folder.path} has"
                f" {free / SPARE_BYTES:.1f} GiB free, and the run needs it; they go on where they"
                " were once there are 2 GiB"
            )
        elif not had_room and self._has_room:
            self._say("trackers go on: the disk has room again")

    def _take_prints(self, tracker: TrackerChild) -> None:
        if tracker.prints < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(tracker.prints, _READ_BYTES)
            if not data:
                os.close(tracker.prints)
                tracker.prints = -1
            elif tracker.printed < LOG_BYTES:
                log = self._folder.logs / f"tracker-{tracker.chosen.name}.log"
                _append(log, data[: LOG_BYTES - tracker.printed])
            tracker.printed += len(data)

    def _leave(self, tracker: TrackerChild) -> None:
        """Have it bring out what it took in, and end, where it can."""
        if tracker.process is not None and tracker.leaves_until is None:
            self._post(tracker, LeaveRun())
            tracker.leaves_until = time.monotonic() + LEAVE_S

    def _clear(self, tracker: TrackerChild) -> None:
        """Forget a process that has ended, or hangs in the kernel."""
        tracker.process = None
        if tracker.channel is not None:
            tracker.channel.close()
            tracker.channel = None
        if tracker.prints >= 0:
            os.close(tracker.prints)
            tracker.prints = -1


def _append(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.fstat(handle).st_size < 4 * LOG_BYTES:
                os.write(handle, data)
        finally:
            os.close(handle)
