"""How a run stands, told from its folder: nothing there is locked, opened for writing, or waited
for.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_hold import FOLDER as HOLDERS
from dataflow.folder.run_lock import FILE as LOCK
from dataflow.folder.socket_folder import CONTROL
from dataflow.history.resume import TIMES
from dataflow.system import processes

LOCKS = Path("/proc/locks")
HELD_S = 30.0
"""A counter of a run over hosts that was raised so long ago is nobody's: it is raised once a
second."""
RUNNING, FINISHED, STOPPED, DIED, UNKNOWN = "running", "finished", "stopped", "died", "unknown"


@dataclass(frozen=True, kw_only=True)
class State:
    """How a run stands."""

    word: str
    """running | finished | stopped | died | unknown."""
    note: str = ""
    """What else is to be known of that; mostly nothing."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What tells it."""

    outcome: str = ""
    """As times.json has it; empty: there is none."""
    leads: bool = False
    """Whether a process of this machine has the scheduler's lock, or one of some machine raises the
    run's counter."""
    works: bool = False
    """Whether some process of it lives here, as a worker does whose scheduler has died."""
    elsewhere: bool = False
    """Whether another machine led it last, whose processes nobody sees from here."""


def decide(signs: Signs) -> State:
    """The state that these signs stand for."""
    if signs.leads:
        return State(word=RUNNING)
    if signs.outcome in (FINISHED, STOPPED):
        return State(word=signs.outcome)
    if signs.works:
        return State(
            word=DIED, note="its workers wait for a scheduler: dataflow resume takes them over"
        )
    if signs.elsewhere:
        return State(
            word=UNKNOWN, note="another machine led it, whose processes are not seen from here"
        )
    return State(word=DIED)


def state_of(folder: RunFolder) -> State:
    """How the run in a folder stands now."""
    return decide(signs_of(folder))


def signs_of(folder: RunFolder, now: float | None = None) -> Signs:
    """What a folder, and this machine, tell of a run. now: seconds since 1970; the clock's when
    None.
    """
    outcome = str(folder.read_json("times.json", TIMES).get("outcome", ""))
    if (raised := _raised(folder.path / HOLDERS)) is not None:
        return Signs(outcome=outcome, leads=(time.time() if now is None else now) - raised < HELD_S)
    # The lock file is not opened: whoever holds a lock of this process on it would lose it when it
    # is closed again.
    kinds = lock_kinds(folder.path / LOCK)
    control, this_machine = (
        folder.read_json(CONTROL, {"pid": int, "machine": str}),
        processes.machine(),
    )
    if control.get("machine", this_machine) != this_machine:
        return Signs(outcome=outcome, leads="POSIX" in kinds, works=bool(kinds), elsewhere=True)
    pid = control.get("pid")
    leads = "POSIX" in kinds or (not LOCKS.exists() and pid is not None and _lives(int(pid)))
    return Signs(outcome=outcome, leads=leads, works=bool(kinds))


def lock_kinds(path: Path, locks: Iterable[str] | None = None) -> set[str]:
    """Which kinds of lock processes of this machine have on a file: POSIX, FLOCK. locks: lines of
    /proc/locks.
    """
    try:
        number = str(path.stat().st_ino)
    except OSError:
        return set()
    if locks is None:
        locks = ()
        with contextlib.suppress(OSError):
            locks = LOCKS.read_text().splitlines()
    kinds = set()
    for line in locks:
        parts = line.split()
        # By the number alone: what stat calls the device is another one in some file systems.
        if (
            len(parts) >= 6
            and "->" not in parts
            and parts[3] == "WRITE"
            and parts[5].rpartition(":")[2] == number
        ):
            kinds.add(parts[1])
    return kinds


def _raised(holders: Path) -> float | None:
    """When the counter of a run over hosts was last raised; None where nobody holds it, or it never
    had one.
    """
    with contextlib.suppress(OSError, ValueError):
        newest = max(
            (entry for entry in os.scandir(holders) if entry.name.isdecimal()),
            key=lambda each: int(each.name),
        )
        if Path(newest.path).read_bytes() != b"released":
            return newest.stat().st_mtime
    return None


def _lives(pid: int) -> bool:
    return processes.look([pid], 0.0)[pid].state not in ("", "Z")


def begun_at(folder: RunFolder, config: Mapping[str, Any]) -> float | None:
    """When it began, in seconds since 1970: as it says itself, or the age of what is written
    first.
    """
    at = config.get("begun")
    if isinstance(at, int | float):
        return float(at)
    for name in ("graph.svg", "graph.json", "config.json"):
        with contextlib.suppress(OSError):
            return (folder.path / name).stat().st_mtime
    return None
