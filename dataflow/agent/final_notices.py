"""What an agent says last that no scheduler has heard: a file in the run folder brings it to the
user's terminal.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from dataflow.system.files import RunFolderError, write_atomically

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
