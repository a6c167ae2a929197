"""Gives what a process wrote its name in the run folder: in one step, and never for a process that
was replaced.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataflow.system.files import RunFolderError, append_line, disk

Place = Callable[[Path, Path, Path | None], None]
"""As `put`."""


def put(path: Path, at: Path, aside: Path | None = None) -> None:
    """Rename a file or a folder. aside: where what stands there goes first, which a folder needs.

    Done again after a crash, or by one who did not hear that it was done, it changes nothing.
    Errors: RunFolderError.
    """
    with disk("putting in place", at):
        if not path.exists():
            if at.exists():
                return
            raise RunFolderError(
                f"'{path}' cannot be put at '{at}': it is not there; write it first"
            )
        if aside is not None and at.exists():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(aside)
            at.replace(aside)
        path.replace(at)


@dataclass(frozen=True)
class Placing:
    """Steps before others can see what a process wrote."""

    token: str = ""
    """In the names of what has no place yet: no two processes that may write the same have one;
    empty where one can not go on when another was started in its place."""
    place: Place = put
    append: Callable[[Path, str], None] = append_line
    """To a file in which several processes write lines."""
    disk: str = ""
    """The host whose own the run folder is; empty: the scheduler's."""
    see: Callable[[Path], None] = lambda path: None
    """Called before a file is read: proves that the file here counts. Errors: RunFolderError."""
    see_newest: Callable[[Path, int | None], None] = lambda path, at_most: None
    """Called before a checkpoint is chosen: has the newest of a folder here, of all steps or of
    those up to one."""

    def aside(self, path: Path) -> Path:
        """The path at which a file is written before it gets its name: the same, or one
        beside it.
        """
        return path.with_name(f".{path.name}.{self.token}.placing") if self.token else path
