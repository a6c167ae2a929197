"""What the operating system says of the processes of a run."""

import collections
import contextlib
import getpass
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from dataflow.system.files import tail

_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_IDLE: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "Z",
}
_DUMP_S = 1.0
_STAT = Path("/proc/self/stat")
_BOOT, _NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, as the operating system sees it."""

    pid: int
    state: str = ""
    """R running, S sleeping, D in a system call, T stopped, Z ended and not waited for; empty:
    there is none."""
    rss_bytes: int = 0
    cpu: float | None = None
    """Cores used during the look; None: not known."""


def machine() -> str:
    """Where numbers of processes mean the same: the system that was booted, and the namespace of
    processes in it.
    """
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text().strip()} {_NUMBERS.readlink()}"
    return ""


def user_here() -> str:
    """This process's user, as user@host; the user's number where it has no name, as in many
    containers.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def look(pids: Iterable[int], during_s: float) -> dict[int, Process]:
    """Every process as it is, its CPU measured over so many seconds; 0: no figure of CPU."""
    numbers = list(pids)
    if not during_s:
        return {pid: _look(pid, None, 0.0) for pid in numbers}
    before, began = {pid: cpu_s(pid) for pid in numbers}, time.monotonic()
    time.sleep(during_s)
    passed = time.monotonic() - began
    return {pid: _look(pid, before[pid], passed) for pid in numbers}


def below(pid: int) -> list[int]:
    """Every process that one has started, and those that they have."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def below_each(pids: Iterable[int]) -> dict[int, list[int]]:
    """The same of each of several processes, in one look at all that there are."""
    if not _STAT.exists():
        return {pid: below(pid) for pid in pids}
    children: dict[int, list[int]] = collections.defaultdict(list)
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208, a path for each takes four times as long
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()  # behind a name that may hold anything
            children[int(fields[1])].append(int(name))
    descendants: dict[int, list[int]] = {}
    for pid in pids:
        descendants[pid], visited = list(children[pid]), {pid}
        # which grows; a number given out anew meanwhile may stand above itself
        for child in descendants[pid]:
            if child not in visited:
                visited.add(child)
                descendants[pid] += children[child]
        descendants[pid] = list(dict.fromkeys(descendants[pid]))
    return descendants


def using(folder: Path) -> list[tuple[int, str]]:
    """Processes that have files below a folder open, and their command lines; this one left out."""
    users = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(
                Path(f.path).is_relative_to(folder) for f in process.open_files()
            ):
                users.append((process.pid, " ".join(process.cmdline())))
    return users


def dump(pid: int, log: Path) -> str:
    """What a worker writes into its log when it is asked for its stacks by a signal, which needs no
    Python to run.

    Empty where it writes nothing: it is stopped, or has not come so far as to listen.
    """
    size = log.stat().st_size if log.exists() else 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR1)
    deadline, text = time.monotonic() + _DUMP_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if (now := tail(log, size)) and now == text:
            break
        text = now
    return text


def _look(pid: int, before: float | None, passed: float) -> Process:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state = _LETTERS.get(process.status(), "S")
            rss = process.memory_info().rss
        after = cpu_s(pid) if passed else None
    except psutil.Error:
        return Process(pid=pid)
    cpu = (after - before) / passed if passed and after is not None and before is not None else None
    return Process(pid=pid, state=state, rss_bytes=rss, cpu=cpu)


def cpu_s(pid: int) -> float | None:
    """Seconds that a process has computed; None where it is gone."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None
