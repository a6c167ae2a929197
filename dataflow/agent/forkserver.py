"""The forkserver's own process: forks workers, tells of their ends, and keeps them while a
scheduler is replaced.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from dataflow.agent.messages import (
    CODEC,
    SEND_S,
    Alive,
    AllHanded,
    Handed,
    Notice,
    Pause,
    SendSignal,
    Spawn,
    Stay,
    TakenAway,
)
from dataflow.system.child import Child, die_with_parent, fork
from dataflow.system.clocks import AwakeClock
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Channel, MessageError

_TURN_S = 0.05
_STANDBYS = 3
"""So many are forked, one after the other, before nobody is expected any more."""
WITHOUT_SCHEDULER = signal.SIGUSR2
"""What the kernel sends when the scheduler ends, and who ends it: also in the midst of `preload`,
where no socket is read."""

Main = Callable[[Mapping[str, Any]], int]
"""What a worker runs: takes its settings, returns the exit status."""


@dataclass
class _Worker:
    """The last process of one worker."""

    name: str
    process: Child
    settings: Mapping[str, Any]
    keeps: bool
    """Whether the others wait for its end when no scheduler comes back."""
    is_stopped: bool = False
    """By a signal (SIGSTOP), as was told: it is not by a pause."""

    @property
    def has_ended(self) -> bool:
        """Whether its end was seen."""
        return self.process.returncode is not None


@dataclass
class Forkserver:
    """One process between a scheduler and its workers.

    consumes: spawn, kill, pause, stay and end of the scheduler that holds its socket; its sign of
        life
    produces: started, stopped, continued and exited; to the next scheduler, at `takeover`, all
        workers, as they are; to a scheduler that gives no sign of life, and has a standby, that it
        is replaced
    waits for: requests; without a scheduler for the next one, for as long as `stay` said, then for
        the workers that have something to bring to an end
    unblocked by: either; its limit, after which it kills all workers
    """

    control: Channel[Any] | None
    takeover: socket.socket | None
    """Where the next scheduler asks for the workers; None: there can be none."""
    main: Main
    preload: Callable[[], None]
    """Imports what heavy workers need."""
    clean_up: Callable[[], None]
    """Run once all workers have ended."""
    standby: Callable[[], int] | None = None
    """What a standby runs that is forked from here when the scheduler has ended; None: somebody
    starts one."""
    clock: Callable[[], float] = time.monotonic
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _waiting: deque[Spawn] = field(default_factory=deque)
    """Requests of heavy workers, before `preload`."""
    _loaded: bool = False
    _stays: Stay | None = None
    """None: end with the scheduler."""
    _number: int = 0
    """Of the scheduler: how many there were before it."""
    _is_cut_off: bool = False
    """Whether the last scheduler lives, and was replaced."""
    _is_paused: bool = False
    """Whether the user has stopped the run (Ctrl-Z): its scheduler stands still, and all workers
    do."""
    _alone_since: float = 0.0
    _standbys: list[Child] = field(default_factory=list)
    """Those that were forked."""
    _expects: bool = False
    """Whether the last of them was forked since there is no scheduler."""

    def __post_init__(self) -> None:
        self._awake = AwakeClock(self.clock)
        """Nobody is silent while this process does not listen."""
        self._heard = self._awake()

    def run(self) -> NoReturn:
        """Serve until the end of the scheduler, or of the last one after it."""
        leave_to_leader()
        # the terminal's: the scheduler says what it means
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: None if self.control else self._end())
        signal.signal(WITHOUT_SCHEDULER, lambda number, frame: self._end_unless_told())
        die_with_parent(WITHOUT_SCHEDULER)
        while True:
            owes = bool(self._waiting) and not self._is_paused
            has_message = self._listen(0.0 if owes else _TURN_S)
            if owes and not has_message:
                if not self._loaded:
                    self.preload()
                    self._loaded = True
                self._fork(self._waiting.popleft())
            self._reap()
            if self.control is None:
                self._wait_alone()

    def _listen(self, wait_s: float) -> bool:
        """Take in one request, or the next scheduler; False: none came."""
        source = self.control or self.takeover
        if not select.select([source] if source else [], [], [], wait_s)[0]:
            if self._is_silent():
                self._cut_off()
            return False
        self._heard = self._awake()
        if self.control is None:
            self._hand_over()
            return True
        try:
            messages = self.control.arrived()
        except (EOFError, OSError, MessageError):
            self._pause(False)
            if self._stays:
                self._lose()
            else:
                self._end()
            return True
        for message in messages:
            self._apply(message)
        return True

    def _apply(self, message: Any) -> None:
        match message:
            case SendSignal():
                if (worker := self._workers.get(message.name)) is not None:
                    worker.process.signal(message.number)
            case Pause():
                self._pause(message.is_paused)
            case Stay():
                self._stays = message
            case Alive():
                return
            case Spawn() if message.heavy and not self._loaded:
                self._waiting.append(message)
            case Spawn():
                self._fork(message)
            case _:
                self._end()

    def _pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on, and what they started in their groups. A scorer's
        processes are not in them: they end the calls that they have, whose limits are times of day,
        and wait for others.
        """
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for worker in self._workers.values():
            worker.process.signal(signal.SIGSTOP if is_paused else signal.SIGCONT, group=True)

    def _is_silent(self) -> bool:
        """Whether the scheduler gives no sign of life though it is not paused, and another could
        take its place.
        """
        silent_s = self._awake() - self._heard
        if self.control is None or self._stays is None or self._is_paused or self.takeover is None:
            return False
        return (
            self.standby is not None
            and len(self._standbys) < _STANDBYS
            and silent_s > self._stays.silent_s
        )

    def _cut_off(self) -> None:
        """From here on the scheduler can do nothing to a worker; it is told, for when it wakes
        up.
        """
        assert self.control is not None, "it is silent"
        with contextlib.suppress(OSError):
            self.control.post(TakenAway())
        self._is_cut_off = True
        self._lose()

    def _lose(self) -> None:
        """From now on there is no scheduler."""
        assert self.control is not None, "it was there"
        self.control.close()
        self.control, self._alone_since, self._expects = None, self.clock(), False

    def _hand_over(self) -> None:
        """The next scheduler has come: it gets every worker as it is."""
        assert self.takeover is not None, "it came there"
        self._reap()
        self.control = Channel(self.takeover.accept()[0], CODEC, SEND_S)
        self._number += 1
        for worker in self._workers.values():
            process = worker.process
            handed = Handed(
                worker.name, process.pid, worker.settings, process.returncode, not worker.has_ended
            )
            self._tell(handed)
        alone_s = self.clock() - self._alone_since
        self._tell(AllHanded(os.getpid(), alone_s, self._number, self._is_cut_off))
        self._is_cut_off = False
        for worker in self._workers.values():
            if worker.is_stopped and not worker.has_ended:
                self._tell_of("stopped", worker)

    def _wait_alone(self) -> None:
        """Have the next scheduler started; end when none comes."""
        assert self._stays is not None, "it ends with the scheduler otherwise"
        alone_s = self.clock() - self._alone_since
        wait_s, end_s = self._stays.wait_s, self._stays.end_s
        if alone_s < wait_s:
            if self.standby is not None and self.takeover is not None and self._may_succeed():
                self._standbys.append(self._forked(self.standby))
                self._expects = True
            return
        if alone_s > wait_s + end_s or not any(
            worker.keeps and not worker.has_ended for worker in self._workers.values()
        ):
            self._end()

    def _may_succeed(self) -> bool:
        """Whether a standby is to be forked: none is on its way."""
        if self._expects and self._standbys[-1].poll() is None:
            return False
        return len(self._standbys) < _STANDBYS

    def _fork(self, message: Spawn) -> None:
        process = self._forked(
            lambda: self.main(message.settings), leads=True, ends_with_parent=signal.SIGKILL
        )
        self._workers[message.name] = worker = _Worker(
            message.name, process, message.settings, message.keeps
        )
        self._tell_of("started", worker)

    def _forked(
        self, body: Callable[[], int], *, leads: bool = False, ends_with_parent: int = 0
    ) -> Child:
        """A child that runs `body` and has none of the sockets."""

        def run() -> int:
            for number in (signal.SIGTERM, signal.SIGTSTP, WITHOUT_SCHEDULER):
                signal.signal(number, signal.SIG_DFL)
            for connection in (self.control, self.takeover):
                if connection is not None:
                    connection.close()
            return body()

        return fork(run, leads=leads, ends_with_parent=ends_with_parent)

    def _reap(self) -> None:
        """Tell of the workers that have ended, were stopped or go on; what an ended one started
        ends with it, before another takes its place.
        """
        for worker in [worker for worker in self._workers.values() if not worker.has_ended]:
            if worker.process.poll() is None:
                self._look_at(worker)
            else:
                self._tell_of("exited", worker)

    def _look_at(self, worker: _Worker) -> None:
        """Tell whether somebody has stopped a worker, or let it go on, since the last look; a pause
        is no such news.
        """
        change = worker.process.change()
        is_stopped = change == "stopped"
        if change is None or self._is_paused or is_stopped == worker.is_stopped:
            return
        worker.is_stopped = is_stopped
        self._tell_of(change, worker)

    def _tell_of(
        self, event: Literal["started", "stopped", "continued", "exited"], worker: _Worker
    ) -> None:
        self._tell(Notice(event, worker.name, worker.process.pid, worker.process.returncode))

    def _tell(self, message: Any) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):
                self.control.send(message)

    def _end_unless_told(self) -> None:
        """The scheduler is gone. What it sent before may be a `Stay`, so that is read first; the
        channel's end comes behind it.
        """
        has_more = self.control is not None and self.control.has_input
        if self._stays is None and not has_more:
            self._end()

    def _end(self) -> NoReturn:
        """Kill the workers and what they started, then clean up; also in the midst of `preload`."""
        processes = [worker.process for worker in self._workers.values()]
        for process in processes:
            process.kill()
        for process in processes:
            process.end(0.0)
        self.clean_up()
        os._exit(0)


def open_takeover(path: str) -> socket.socket:
    """Where the next scheduler comes to; in a folder of mode 0700, so that nobody else can."""
    takeover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    takeover.bind(path)
    takeover.listen(1)
    return takeover
