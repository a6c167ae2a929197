"""Where the agents of a run find the scheduler that leads it: a file in the run folder, which all
hosts see.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from dataflow.planning.hosts import Host
from dataflow.system.files import RunFolderError, to_json, write_atomically
from dataflow.system.security import RunKeys

_FILE = "agents.json"
KEYS_FILE = "agents.keys"
"""Beside it, of mode 0600: the run's keys, for a scheduler that takes the place of this one; both
go with the run."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Written by each scheduler that leads the run, looked up by agents that hear nothing."""

    address: str
    """Of its socket for agents."""
    hosts: tuple[Host, ...]
    """Of the plan; none before there is one."""

    def write(self, folder: Path, keys: RunKeys) -> None:
        """Put it, and the run's keys, where agents and successors look. Errors: RunFolderError."""
        for name, mode, content in (
            (KEYS_FILE, 0o600, keys.to_bytes()),
            (_FILE, 0o644, to_json(asdict(self)).encode()),
        ):
            write_atomically(folder / name, partial(_put, content, mode), flush=False)

    @classmethod
    def read(cls, folder: Path) -> "Rendezvous | None":
        """What the last one wrote; None where there is nothing."""
        try:
            return msgspec.json.decode((folder / _FILE).read_bytes(), type=cls)
        except (OSError, ValueError):
            return None

    @staticmethod
    def keys(folder: Path) -> RunKeys | None:
        """Of the run; None where this user finds none."""
        try:
            return RunKeys.from_bytes((folder / KEYS_FILE).read_bytes())
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(folder: Path) -> None:
        """The run has no agents any more."""
        for name in (_FILE, KEYS_FILE):
            (folder / name).unlink(missing_ok=True)


def _put(content: bytes, mode: int, file: BinaryIO) -> None:
    os.fchmod(file.fileno(), mode)
    file.write(content)


_LOOK_S = 1.0
"""Between two looks for such files."""


def leave(folder: Path, host: str, sentence: str) -> None:
    """Say in the run folder why a host does not take part; nothing is said where it is not seen, or
    refuses.
    """
    if folder.is_dir():
        with contextlib.suppress(RunFolderError, OSError):
            write_atomically(
                _path(folder, host), lambda file: file.write(sentence.encode()), flush=False
            )


def take_back(folder: Path, host: str) -> None:
    """Of an earlier agent of this host."""
    with contextlib.suppress(OSError):
        _path(folder, host).unlink(missing_ok=True)


class FinalNotices:
    """Of the agents of a run, each told once; what was said before this was made is not."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """folder: of the run."""
        self._folder, self._clock = folder, clock
        self._told = self._found()
        self._looked = float("-inf")

    def new(self) -> list[str]:
        """Those that came since."""
        if self._clock() - self._looked < _LOOK_S:
            return []
        self._looked = self._clock()
        notices = self._found()
        new = [
            sentence
            for file, (_, sentence) in notices.items()
            if notices[file] != self._told.get(file)
        ]
        self._told = notices
        return new

    def _found(self) -> dict[str, tuple[float, str]]:
        """By file: when, and what."""
        notices = {}
        for path in sorted(_path(self._folder, "*").parent.glob(_path(self._folder, "*").name)):
            with contextlib.suppress(OSError):
                notices[path.name] = (
                    path.stat().st_mtime,
                    path.read_text(errors="backslashreplace"),
                )
        return notices


def _path(folder: Path, host: str) -> Path:
    return folder / "logs" / f"agent-{host}.last"
