"""Keeps the trackers of a run: a process for each, which is watched, ended when it hangs, and tried
again.

None of them is a process of the run, and none has a file of it open for writing but in the run
folder.
"""

import contextlib
import os
import select
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from dataflow.system.child import Forked, describe_status, ended_within, fork
from dataflow.system.clocks import AwakeClock
from dataflow.system.messages import MessageError
from dataflow.trackers import messages
from dataflow.trackers.chosen import ChosenTracker
from dataflow.trackers.process import track

SEND_S = 5.0
LEAVE_S = 3.0
"""For trackers that are to leave the run before its end; then they are killed."""
AGAIN_S = 10.0
"""Before the first try after one that failed; then twice as long each time."""
SPARE_BYTES = 1 << 30
"""Where less is free, trackers do not run, as they write what they like, and a run needs its disk
for rollouts."""
LOG_BYTES = 1 << 20
"""Of what a tracker prints, in one attempt; the rest is read and lost."""
_READ_BYTES = 1 << 16
FLOOD_S = 0.05
"""After each read beyond that: who prints without end waits for it."""


@dataclass(eq=False)
class KeptTracker:
    """One tracker, and how it stands."""

    chosen: ChosenTracker
    process: Forked | None = None
    channel: Channel[Any] | None = None
    prints: int = -1
    """Where what it prints comes from; below 0: nowhere."""
    printed: int = 0
    heard: float = 0.0
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
    failure: messages.TrackerFailed | None = None
    last_try: bool = False
    """The run is over, and it was tried again since."""


class TrackerKeeper:
    """All trackers of one run.

    consumes: what trackers' processes say and print; the word that the run is over, by `end`
    produces: processes; sentences for people, each once
    waits for: trackers, at most as long as one look takes; `LEAVE_S` where they are to leave
    unblocked by: trackers; deadlines
    """

    def __init__(
        self,
        folder: RunFolder,
        chosen: Sequence[ChosenTracker],
        say: Callable[[str], object],
        *,
        limits: Limits | None = None,
        path: Sequence[str] = (),
        clock: Callable[[], float] | None = None,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
        again_s: float = AGAIN_S,
    ) -> None:
        """say: to people. path: where modules are found. clock: None: one that stands still while
        this process has no core, as trackers have none then.
        """
        self._folder, self._say, self._limits, self._path = (
            folder,
            say,
            limits or Limits(),
            list(path),
        )
        self._clock, self._free_bytes, self._again_s = clock or AwakeClock(), free_bytes, again_s
        self._kept = [KeptTracker(each) for each in chosen]
        self._outcome: str | None = None
        self._within_s = self._until = float("inf")
        self._has_room, self._looked_at_room = True, float("-inf")

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(each.is_done for each in self._kept)

    def end(self, outcome: str, within_s: float = float("inf")) -> None:
        """The run is over: trackers are to tell what is left, in so many seconds."""
        if self._outcome is None:
            self._outcome, self._within_s, self._until = outcome, within_s, self._clock() + within_s
            for each in self._kept:
                if each.channel is not None:
                    self._send_end(each)

    def turn(self, wait_s: float) -> None:
        """Look at all of them; waits for one to say something."""
        now = self._clock()
        self._look_at_room(now)
        for each in self._kept:
            if (
                not each.is_done
                and each.process is None
                and self._has_room
                and self._may_start(each, now)
            ):
                self._start(each, now)
        ends = {each.channel.fileno(): each for each in self._kept if each.channel is not None}
        prints = {each.prints: each for each in self._kept if each.prints >= 0}
        ready = select.select([*ends, *prints], [], [], wait_s)[0]
        for number in ready:
            if number in prints:
                self._take_prints(prints[number])
        for each in self._kept:
            if each.process is not None:
                self._hear(each)
        self._look_at_ends()

    def close(self) -> None:
        """End what is left of them."""
        self._leave(self._kept)

    def _may_start(self, each: KeptTracker, now: float) -> bool:
        if self._outcome is None:
            return now >= each.next_at
        if each.last_try:
            return False
        each.last_try = True
        return True

    def _start(self, each: KeptTracker, now: float) -> None:
        channel, theirs = Channel.pair(messages.TRACKER_CODEC, SEND_S)
        out, inner = os.pipe()
        each.process = fork(
            partial(_child, self._folder.path, each.chosen, theirs, inner, self._path),
            leads=True,
            keep=(theirs.fileno(), inner),
            ends_with_parent=9,
        )
        theirs.close()
        os.close(inner)
        os.set_blocking(out, False)
        each.channel, each.prints, each.printed = channel, out, 0
        each.heard, each.call, each.well_since, each.failure = now, "start", None, None
        if self._outcome is not None:
            self._send_end(each)

    def _send_end(self, each: KeptTracker) -> None:
        assert each.channel is not None and self._outcome is not None
        with contextlib.suppress(OSError):
            each.channel.send(messages.RunIsOver(outcome=self._outcome))

    def _hear(self, each: KeptTracker) -> None:
        assert each.channel is not None and each.process is not None
        now = self._clock()
        self._take_all(each, now)
        status = each.process.poll()
        if status is not None:
            self._ended(each, status)
        elif now - each.heard > self._limits.track_s:
            what = f"has been in '{each.call}'" if each.call else "was not heard"
            self._stop(each)
            self._failed(each, f"{what} for {self._limits.track_s:.0f} s, and was ended")

    def _take_all(self, each: KeptTracker, now: float) -> None:
        """What it has said."""
        assert each.channel is not None
        with contextlib.suppress(EOFError, MessageError, OSError):  # its end is seen elsewhere
            for message in each.channel.arrived():
                each.heard = now
                self._take(each, message, now)

    def _take(self, each: KeptTracker, message: Any, now: float) -> None:
        match message:
            case messages.TrackerAt(call=call):
                each.call = call
            case messages.TrackerSees(text=text):
                if not each.has_shown:
                    each.has_shown = True
                    self._say(f"{each.chosen.name}: {text}")
            case messages.TrackerToldOf():
                each.well_since = now if each.well_since is None else each.well_since
                if each.is_told and now - each.well_since >= self._limits.track_s:
                    self._say(f"tracker {each.chosen.name} takes in the run again")
                    each.is_told, each.fails = False, 0
            case messages.TrackerFailed():
                each.failure = message
            case messages.TrackerDone():
                each.is_done = True

    def _ended(self, each: KeptTracker, status: int) -> None:
        self._take_all(each, self._clock())  # what it said between the last look and its end
        self._take_prints(each)
        self._stop(each)
        if each.is_done:
            return
        if each.failure is not None:
            self._failed(each, f"failed in '{each.failure.call}': {each.failure.error}")
        else:
            self._failed(each, f"{describe_status(status)} in '{each.call}'")

    def _failed(self, each: KeptTracker, why: str) -> None:
        pause_s = min(self._limits.track_again_s, self._again_s * 2**each.fails)
        each.fails, each.next_at = min(each.fails + 1, 16), self._clock() + pause_s
        if self._outcome is not None and each.last_try:
            self._give_up(each, why)
        elif not each.is_told:
            each.is_told = True
            log = f"{self._folder.path.name}/logs/tracker-{each.chosen.name}.log"
            self._say(
                f"tracker {each.chosen.name} {why}; the run goes on, and it is tried again from"
                f" where it was; see {log}"
            )

    def _give_up(self, each: KeptTracker, why: str) -> None:
        each.is_done = True
        again = f"dataflow track {self._folder.path} --to {each.chosen.reference}"
        said = "has failed" if each.is_told else why
        self._say(
            f"tracker {each.chosen.name} {said}; it lacks the end of the run: {again} tells it the"
            " rest"
        )

    def _look_at_ends(self) -> None:
        if self._outcome is None:
            return
        is_late = self._clock() >= self._until
        if is_late:
            self._leave(self._kept)
        for each in self._kept:
            if each.is_done or not (
                is_late or (each.process is None and (each.last_try or not self._has_room))
            ):
                continue
            self._stop(each)
            why = "has failed" if each.last_try else "stood still for want of room"
            self._give_up(
                each, f"was not done {self._within_s:.0f} s after the run" if is_late else why
            )

    def _look_at_room(self, now: float) -> None:
        if now - self._looked_at_room < 0.5:
            return
        self._looked_at_room = now
        try:
            free = self._free_bytes(self._folder.path)
        except OSError:
            return
        had, self._has_room = (
            self._has_room,
            free >= (SPARE_BYTES if self._has_room else 2 * SPARE_BYTES),
        )
        if had and not self._has_room:
            self._leave(self._kept)
            self._say(
                f"trackers stand still: the disk of {self._folder.path} has"
                f" {free / SPARE_BYTES:.1f} GiB free, and the run needs it; they go on where they"
                " were once there are 2 GiB"
            )
        elif not had and self._has_room:
            self._say("trackers go on: the disk has room again")

    def _take_prints(self, each: KeptTracker) -> None:
        if each.prints < 0:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(each.prints, _READ_BYTES)
            if not data:
                os.close(each.prints)
                each.prints = -1
                return
            if each.printed < LOG_BYTES:
                _append(
                    self._folder.logs / f"tracker-{each.chosen.name}.log",
                    data[: LOG_BYTES - each.printed],
                )
            else:
                time.sleep(FLOOD_S)
            each.printed += len(data)

    def _leave(self, all_kept: Sequence[KeptTracker]) -> None:
        """End them, after they have brought out what they took in, where they can."""
        for each in all_kept:
            if each.channel is not None:
                with contextlib.suppress(OSError):
                    each.channel.send(messages.LeaveRun())
        until = time.monotonic() + LEAVE_S
        for each in all_kept:
            if each.process is not None:
                ended_within(each.process, until - time.monotonic())
            if each.channel is not None:
                self._take_all(each, self._clock())
            self._stop(each)

    def _stop(self, each: KeptTracker) -> None:
        if each.process is not None:
            each.process.kill()
            each.process.wait(SEND_S)
            each.process = None
        if each.channel is not None:
            each.channel.close()
            each.channel = None
        if each.prints >= 0:
            os.close(each.prints)
            each.prints = -1


def _child(
    folder: Path, chosen: ChosenTracker, end: socket.socket, prints: int, path: Sequence[str]
) -> int:
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    return track(folder, chosen, lambda: Channel(end, messages.TRACKER_CODEC, SEND_S), path)


def _append(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.fstat(handle).st_size < 4 * LOG_BYTES:
                os.write(handle, data)
        finally:
            os.close(handle)
