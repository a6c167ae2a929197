"""The run folder of a host that does not see the scheduler's: at the same path on a disk of its
own.
"""

import time
from pathlib import Path

from dataflow.agent.rendezvous import KEYS_FILE, Rendezvous
from dataflow.errors import RunError
from dataflow.folder.finished import number_finished
from dataflow.system.files import disk
from dataflow.system.security import RunKeys

_SHOWN_S = 2.0
_BELOW = ("checkpoints", "finished", "logs", "rollouts")


def sees(folder: Path, keys: RunKeys) -> bool:
    """Whether the folder at that path is the one in which the scheduler has left word, with the
    keys of this run. A file system that several hosts share may show it a moment later.
    """
    deadline = time.monotonic() + _SHOWN_S
    while Rendezvous.read(folder) is None or Rendezvous.keys(folder) != keys:
        if not folder.is_dir() or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def check_under_way(host: str, folder: Path) -> None:
    """Errors: RunError where the folder of a scheduler stands there, and none has left word."""
    if Rendezvous.read(folder) is None:
        _check_nobodys(host, folder)


def make(host: str, folder: Path, scheduler: str = "") -> None:
    """Have the folders of a host that sees no other. scheduler: that the host is to join. Errors:
    RunError where a scheduler's stands there, of this run or another, or the host has other keys
    than that; RunFolderError.
    """
    at = Rendezvous.read(folder)
    if at is not None and at.address == scheduler:
        raise RunError(
            f"host '{host}' has other keys than the run in '{folder}', which the scheduler at"
            f" {scheduler} leads; give it those of this start, which stand in"
            f" '{folder / KEYS_FILE}'"
        )
    _check_nobodys(host, folder)
    with disk("making", folder):
        for below in _BELOW:
            (folder / below).mkdir(parents=True, exist_ok=True)


def _check_nobodys(host: str, folder: Path) -> None:
    if (folder / "ledger.db").exists():
        raise RunError(
            f"host '{host}' comes too late: the run in '{folder}' has ended, as its hosts were"
            " told, or is led from another host; go on with it by dataflow resume, or move the"
            " folder away, so that this host may take part"
        )


def take_up(host: str, folder: Path, part: int) -> None:
    """Put in order what earlier parts of the run have left here. part: how often it was taken up
    before. Errors: RunError where a new run finds anything; RunFolderError.
    """
    if part:
        with disk("renaming in", folder):
            number_finished(folder, part)
        return
    leftovers = [
        path
        for below in ("checkpoints", "finished", "rollouts")
        for path in (folder / below).rglob("*")
    ]
    if leftovers:
        raise RunError(
            f"host '{host}' has files of another run at '{folder}', as '{leftovers[0].name}'; move"
            " that folder away, or name another one with runs="
        )
