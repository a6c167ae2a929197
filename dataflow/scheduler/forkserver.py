"""The forkserver's own process: forks workers, tells of their ends, and keeps them while a scheduler is replaced."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgpack

from dataflow.system.clocks import AwakeClock
from dataflow.system.forking import fork

MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_TURN_S = 0.05
_SUCCESSORS = 3
"""So many are forked, one after the other, before nobody is expected any more."""
_WITHOUT_SCHEDULER = signal.SIGUSR2
"""What the kernel sends when the scheduler ends: also in the midst of `preload`, where no socket is read."""

Main = Callable[[Mapping[str, Any]], int]
"""What a worker runs: takes its settings, returns the exit status."""


@dataclass
class _Child:
    """The last process of one worker."""

    name: str
    pid: int
    settings: Mapping[str, Any]
    keeps: bool
    """Whether the others wait for its end when no scheduler comes back."""
    is_stopped: bool = False
    """By a signal (SIGSTOP), as was told: it is not by a pause."""
    status: int | None = None
    """How it ended, when it has."""
    has_ended: bool = False


@dataclass
class Forkserver:
    """One process between a scheduler and its workers.

    consumes: spawn, kill, pause, stay and end of the scheduler that holds its socket; its sign of life
    produces: started, stopped, continued and exited; to a successor that comes to its door all workers, as they are;
        to a scheduler that gives no sign of life, and has a successor, that it is replaced
    waits for: requests; without a scheduler for a successor, for as long as `stay` said, then for the workers that
        have something to bring to an end
    unblocked by: either; its limit, after which it kills all workers
    """

    control: socket.socket | None
    door: socket.socket | None
    """Where a successor asks for the workers; None: there can be none."""
    main: Main
    preload: Callable[[], None]
    """Imports what heavy workers need."""
    clean_up: Callable[[], None]
    """Run once all workers have ended."""
    successor: Callable[[], int] | None = None
    """What a successor runs that is forked from here when the scheduler has ended; None: somebody starts one."""
    clock: Callable[[], float] = time.monotonic
    _children: dict[str, _Child] = field(default_factory=dict)
    _waiting: deque[dict[str, Any]] = field(default_factory=deque)
    """Requests of heavy workers, before `preload`."""
    _loaded: bool = False
    _stays: tuple[float, float] | None = None
    """Seconds to wait for a successor, and then for workers to end; None: end with the scheduler."""
    _silent_s: float = 0.0
    """A scheduler that was not heard for longer is replaced, where there is something to replace it with."""
    _number: int = 0
    """Of the scheduler: how many there were before it."""
    _is_cut_off: bool = False
    """Whether the last scheduler lives, and was replaced."""
    _is_paused: bool = False
    """Whether the user has stopped the run (Ctrl-Z): its scheduler stands still, and all workers do."""
    _alone_since: float = 0.0
    _successors: list[int] = field(default_factory=list)
    """Process numbers of those that were forked."""
    _expects: bool = False
    """Whether the last of them was forked since there is no scheduler."""

    def __post_init__(self) -> None:
        self._awake = AwakeClock(self.clock)
        """Nobody is silent while this process does not listen."""
        self._heard = self._awake()

    def run(self) -> NoReturn:
        """Serve until the end of the scheduler, or of its last successor."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the terminal's: the scheduler says what it means
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        signal.signal(_WITHOUT_SCHEDULER, lambda number, frame: None if self._stays else self._end())
        die_with_parent(_WITHOUT_SCHEDULER)
        while True:
            owes = bool(self._waiting) and not self._is_paused
            heard = self._listen(0.0 if owes else _TURN_S)
            if owes and not heard:
                if not self._loaded:
                    self.preload()
                    self._loaded = True
                self._fork(self._waiting.popleft())
            self._reap()
            if self.control is None:
                self._wait_alone()

    def _listen(self, wait_s: float) -> bool:
        """Take in one request, or a successor; False: none came."""
        who = self.control or self.door
        if not select.select([who] if who else [], [], [], wait_s)[0]:
            if self._is_silent():
                self._cut_off()
            return False
        self._heard = self._awake()
        if self.control is None:
            self._hand_over()
            return True
        try:
            data = self.control.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if data:
            self._do(msgpack.unpackb(data))
            return True
        self._pause(False)
        if self._stays:
            self._lose()
        else:
            self._end()
        return True

    def _do(self, message: dict[str, Any]) -> None:
        if "kill" in message:
            child = self._children.get(message["kill"])
            if child is not None and not child.has_ended:
                _signal(child.pid, message["signal"])
        elif "pause" in message:
            self._pause(message["pause"])
        elif "stay" in message:
            self._stays, self._silent_s = (message["stay"], message["end"]), message["silent"]
        elif "here" in message:
            return
        elif "spawn" not in message:
            self._end()
        elif message["heavy"] and not self._loaded:
            self._waiting.append(message)
        else:
            self._fork(message)

    def _pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on, and what they started in their groups. A scorer's processes are not in
        them: they end the calls that they have, whose limits are times of day, and wait for others."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for child in self._children.values():
            if not child.has_ended:
                _signal_group(child.pid, signal.SIGSTOP if is_paused else signal.SIGCONT)

    def _is_silent(self) -> bool:
        """Whether the scheduler gives no sign of life though it is not paused, and another could take its place."""
        silent_s = self._awake() - self._heard
        if self.control is None or self._stays is None or self._is_paused or self.door is None:
            return False
        return self.successor is not None and len(self._successors) < _SUCCESSORS and silent_s > self._silent_s

    def _cut_off(self) -> None:
        """From here on the scheduler can do nothing to a worker; it is told, for when it wakes up."""
        assert self.control is not None, "it is silent"
        with contextlib.suppress(OSError):
            event = {"event": "replaced", "name": "nursery", "pid": os.getpid(), "status": None}
            self.control.send(msgpack.packb(event), socket.MSG_DONTWAIT)
        self._is_cut_off = True
        self._lose()

    def _lose(self) -> None:
        """From now on there is no scheduler."""
        assert self.control is not None, "it was there"
        self.control.close()
        self.control, self._alone_since, self._expects = None, self.clock(), False

    def _hand_over(self) -> None:
        """A successor has come: it gets every worker as it is."""
        assert self.door is not None, "it came there"
        self._reap()
        self.control, _ = self.door.accept()
        self._number += 1
        for child in self._children.values():
            facts = {"name": child.name, "pid": child.pid, "settings": child.settings, "status": child.status}
            self._tell({"event": "handed", "alive": not child.has_ended, **facts})
        alone_s = self.clock() - self._alone_since
        before = {"number": self._number, "lives": self._is_cut_off}
        self._is_cut_off = False
        self._tell({"event": "all_handed", "name": "nursery", "pid": os.getpid(), "alone_s": alone_s} | before)
        for child in self._children.values():
            if child.is_stopped and not child.has_ended:
                self._tell_of("stopped", child)

    def _wait_alone(self) -> None:
        """Have a successor started; end when none comes."""
        assert self._stays is not None, "it ends with the scheduler otherwise"
        alone_s = self.clock() - self._alone_since
        wait_s, end_s = self._stays
        if alone_s < wait_s:
            if self.successor is not None and self.door is not None and self._may_succeed():
                self._successors.append(self._forked(self.successor))
                self._expects = True
            return
        if alone_s > wait_s + end_s or not any(c.keeps and not c.has_ended for c in self._children.values()):
            self._end()

    def _may_succeed(self) -> bool:
        """Whether a successor is to be forked: none is on its way."""
        if self._expects:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._successors[-1], os.WNOHANG)[0] == 0:
                    return False
        return len(self._successors) < _SUCCESSORS

    def _fork(self, message: Mapping[str, Any]) -> None:
        def work() -> int:
            os.setpgid(0, 0)
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            return self.main(message["settings"])

        parent, name = os.getpid(), message["spawn"]
        pid = self._forked(work)
        self._children[name] = child = _Child(name, pid, message["settings"], bool(message.get("keeps")))
        self._tell_of("started", child)

    def _forked(self, body: Callable[[], int]) -> int:
        """A child that runs `body` and has none of the sockets; its number."""
        pid = fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.signal(_WITHOUT_SCHEDULER, signal.SIG_DFL)
            for held in (self.control, self.door):
                if held is not None:
                    held.close()
            run_forever(body)
        return pid

    def _reap(self) -> None:
        """Tell of the workers that have ended, were stopped or go on; what an ended one started ends with it, before
        another takes its place."""
        for child in [child for child in self._children.values() if not child.has_ended]:
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    self._look_at(child)
                    continue
                _kill_group(child.pid)
                child.status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            child.has_ended = True
            self._tell_of("exited", child)

    def _look_at(self, child: _Child) -> None:
        """Tell whether somebody has stopped a worker, or let it go on, since the last look; a pause is no such news."""
        change = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        is_stopped = change is not None and change.si_code == os.CLD_STOPPED
        if change is None or self._is_paused or is_stopped == child.is_stopped:
            return
        child.is_stopped = is_stopped
        self._tell_of("stopped" if is_stopped else "continued", child)

    def _tell_of(self, event: str, child: _Child) -> None:
        self._tell({"event": event, "name": child.name, "pid": child.pid, "status": child.status})

    def _tell(self, event: Mapping[str, Any]) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):
                self.control.send(msgpack.packb(event))

    def _end(self) -> NoReturn:
        """Kill the workers and what they started, then clean up; also in the midst of `preload`."""
        living = [child.pid for child in self._children.values() if not child.has_ended]
        for pid in living:
            _signal(pid, signal.SIGKILL)
        for pid in living:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                _kill_group(pid)
                os.waitpid(pid, 0)
        self.clean_up()
        os._exit(0)


def open_door(path: str) -> socket.socket:
    """Where a successor comes to; in a folder of mode 0700, so that nobody else can."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(path)
    door.listen(1)
    return door


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def run_forever(body: Callable[[], int]) -> NoReturn:
    """Run in a forked child and never return into the parent's code."""
    status = 1
    try:
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _kill_group(leader: int) -> None:
    """Kill what a worker that has ended, and is not reaped, leaves: until then its number is nobody else's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> None:
    """To a worker and what it started; to it alone where it has been forked so recently that it has no group yet."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        _signal(leader, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
