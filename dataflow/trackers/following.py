"""A run's side of its trackers: starts their keeper, passes on what it says, and tells it that the
run is over.
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.system.channel import Channel
from dataflow.system.child import end, program
from dataflow.system.messages import MessageError
from dataflow.system.priority import step_back
from dataflow.trackers import messages
from dataflow.trackers.chosen import ChosenTracker

SEND_S = 2.0
END_S = 5.0
"""For the keeper to end once it was told that nobody waits any more."""
TURN_S = 0.1
LOG = "trackers.log"


class TrackersOfRun:
    """The keeper of a run's trackers, as the run sees it.

    consumes: what the keeper says
    produces: sentences for people; the word that the run is over
    waits for: nothing while the run goes on; at its end the keeper, up to `Limits.track_s`
    unblocked by: the keeper's end, or that deadline
    """

    def __init__(self, folder: RunFolder, chosen: Sequence[ChosenTracker], limits: Limits) -> None:
        self._limits = limits
        self._names = ", ".join(each.name for each in chosen)
        self._again = (
            f"dataflow track {folder.path} --to {' --to '.join(each.reference for each in chosen)}"
        )
        self._keeper: subprocess.Popen[Any] | None = None
        self._channel: Channel[Any] | None = None
        self._said: list[str] = []
        if chosen:
            self._start(folder, chosen)

    def look(self) -> list[str]:
        """What is new; returns at once."""
        self._listen()
        said, self._said = self._said, []
        return said

    def end(self, outcome: str, say: Callable[[str], object], within_s: float = math.inf) -> None:
        """The run is over, and trackers take in what is left: wait for that, up to `Limits.track_s`
        or `within_s`, or Ctrl-C.
        """
        if self._keeper is None or self._channel is None:
            return
        with contextlib.suppress(OSError):
            self._channel.send(messages.RunIsOver(outcome=outcome))
        began, is_told, within_s = time.monotonic(), False, min(within_s, self._limits.track_s)
        deadline = began + within_s + min(within_s, END_S)
        try:
            while self._keeper.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError, ValueError):
                    self._channel.readable(TURN_S)
                for text in self.look():
                    say(text)
                if not is_told and time.monotonic() - began > 1.0:
                    is_told = True
                    say(
                        f"waiting for {self._names} to take in what is left, {within_s:.0f} s at"
                        " most"
                    )
                if self._channel is None:
                    break
        except KeyboardInterrupt:
            deadline = began
        for text in self.look():
            say(text)
        if self._keeper.poll() is None and time.monotonic() >= deadline:
            say(f"{self._names} lack the end of the run, which {self._again} tells them")
        self.close()

    def close(self) -> None:
        """End it; trackers that are behind stay so."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._keeper is not None:
            self._keeper.kill()
            end(self._keeper, END_S)
            self._keeper = None

    def _start(self, folder: RunFolder, chosen: Sequence[ChosenTracker]) -> None:
        self._channel, theirs = Channel.pair(messages.KEEPER_CODEC, SEND_S)
        try:
            with (folder.logs / LOG).open("ab") as log:
                self._keeper = program(
                    "dataflow.trackers",
                    end=theirs,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            with contextlib.suppress(OSError):
                step_back(self._keeper.pid)
            self._channel.send(
                messages.KeepTrackers(
                    folder=str(folder.path),
                    trackers=tuple(chosen),
                    limits=self._limits,
                    path=[each or str(Path.cwd()) for each in sys.path],
                    parent=os.getpid(),
                )
            )
        except OSError as error:
            self._said.append(f"{self._names} cannot be started: {error}; the run goes on without")
            self.close()
        finally:
            theirs.close()

    def _listen(self) -> None:
        if self._channel is None:
            return
        try:
            if self._channel.readable(0.0):
                self._said += [
                    m.text for m in self._channel.arrived() if isinstance(m, messages.KeeperSays)
                ]
        except (EOFError, OSError, MessageError):
            self._channel.close()
            self._channel = None
            if self._keeper is not None and self._keeper.poll() not in (None, 0):
                self._said.append(
                    f"the process that keeps {self._names} has ended; the run goes on without, see"
                    f" {LOG}"
                )
