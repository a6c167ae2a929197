"""The small server that forks a pool's processes: one thread, so that forking is always safe."""

import contextlib
import math
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.scoring.at_work import make_calls
from dataflow.scoring.calls import CALLS, PoolSettings
from dataflow.system.channel import Channel
from dataflow.system.child import Forked, ended_within, fork, let_go_on
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Codec

PROGRESS_FIELDS = 4
_SEND_S = 10.0
_LOOK_S = 1.0
_LAST_BREATH_S = 0.1
_GIVE_BACK_S = 2.0
"""For calls that ask, when the owner is gone or closes the pool."""
_RESERVE_MB = 1536


@dataclass(frozen=True)
class ForkProcess:
    """Fork a process; its end of a channel comes with it."""

    process: int


@dataclass(frozen=True)
class EndProcess:
    """End a process."""

    process: int


@dataclass(frozen=True)
class Lost:
    """A process has closed its channel: say how it ended, and end it if it has not."""

    process: int


@dataclass(frozen=True)
class Spawned:
    """The process runs."""

    process: int
    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """The process has ended."""

    process: int
    status: int | None
    """None: it had closed its channel, and lived on until now."""


SERVER: Codec[Any] = Codec(
    "scorers-server", 1, ForkProcess, EndProcess, Lost, Spawned, ProcessEnded
)


def start_server(progress: memoryview, settings: PoolSettings) -> tuple[Channel[Any], Forked]:
    """Fork the server; our end of its channel, and its process.

    The kernel lets it go on when its owner ends: one that was stopped could not clean up."""
    control, theirs = Channel.pair(SERVER, _SEND_S)
    owner = os.getpid()

    def serve() -> int:
        _go_quiet()
        return _serve(Channel(theirs, SERVER, _SEND_S), owner, progress, settings)

    with theirs:
        return control, fork(serve, keep=[theirs.fileno()], ends_with_parent=signal.SIGCONT)


def _serve(control: Channel[Any], owner: int, progress: memoryview, settings: PoolSettings) -> int:
    """Fork and end processes as told; the exit status.

    consumes: orders to spawn a process (with its socket), to end one, or to say how a lost one
    ended produces: a reply to each, with its pid or its exit status
    waits for: an order, looking every second whether the owner still lives, and whether somebody
    stopped a process unblocked by: an order, or the end of the owner
    """
    processes: dict[int, Forked] = {}
    try:
        while True:
            if not control.readable(_LOOK_S):
                if os.getppid() != owner:
                    break
                for process in processes.values():
                    let_go_on(process)
                continue
            for order in control.arrived():
                number = order.process
                match order:
                    case ForkProcess():
                        end = control.files.popleft()
                        processes[number] = _spawn(end, number, progress, settings)
                        os.close(end)
                        control.send(Spawned(number, processes[number].pid))
                    case EndProcess():
                        control.send(ProcessEnded(number, _ended(processes.pop(number))))
                    case Lost():
                        lost = processes.pop(number)
                        lives = not ended_within(lost, _LAST_BREATH_S)
                        status = _ended(lost)
                        control.send(ProcessEnded(number, None if lives else status))
    except (OSError, EOFError):
        pass
    finally:
        until_s = time.monotonic() + (_GIVE_BACK_S if settings.asks else 0.0)
        for process in processes.values():
            ended_within(process, until_s - time.monotonic())
        for process in processes.values():
            _ended(process)
    return 0


def _spawn(end: int, number: int, progress: memoryview, settings: PoolSettings) -> Forked:
    def make() -> int:
        _limit_memory(settings.memory_mb)
        width = settings.concurrency * PROGRESS_FIELDS
        starts = range(number * width, (number + 1) * width, PROGRESS_FIELDS)
        sources = [progress[start : start + PROGRESS_FIELDS] for start in starts]
        with contextlib.suppress(OSError, EOFError):
            make_calls(Channel(socket.socket(fileno=end), CALLS, math.inf), sources, settings)
        return 0

    return fork(make, leads=True, keep=[end], ends_with_parent=signal.SIGKILL)


def _ended(process: Forked) -> int:
    """Kill a process with all that it started, unless it has ended by itself; its exit status."""
    process.kill()
    return process.wait()


def _go_quiet() -> None:
    """Out of the terminal's group, deaf to Ctrl-C, and without the worker's handlers."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.set_wakeup_fd(-1)
    leave_to_leader()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _limit_memory(memory_mb: int | None) -> None:
    """A wall some way behind the limit that the owner keeps: allocators reserve more than they
    use."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is None or sys.platform != "linux":
        return
    with Path("/proc/self/status").open() as status:
        used_kb = next((int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    limit = (used_kb << 10) + ((memory_mb + _RESERVE_MB) << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
