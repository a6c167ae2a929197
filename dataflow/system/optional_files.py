"""Files that a run can do without, that is all but ledger, rollouts and checkpoints: what the disk
refuses is told, once for each file, and what is missing, torn or broken counts as not there.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dataflow.system.files import RunFolderError, append_line, disk, write_atomically

Tell: TypeAlias = Callable[[str], object]
"""Takes a sentence for the user or the log."""

Kind: TypeAlias = type | tuple[type, ...]
_LONGEST = 16 << 20
"""Bytes of a line."""
warn: Tell = logging.getLogger(__name__).warning


@dataclass(eq=False)
class Extras:
    """Writes such files for one process."""

    tell: Tell = warn
    _refused: set[Path] = field(default_factory=set)
    """Those of which it was told that the disk refuses them; each may be told again once it was
    taken."""

    def write(self, path: Path, content: str | bytes, *, flush: bool = False) -> bool:
        """Put the content at `path`, whole or not at all; whether the disk took it."""
        encoded = content.encode() if isinstance(content, str) else content
        return self.attempt(
            path, lambda: write_atomically(path, lambda file: file.write(encoded), flush=flush)
        )

    def append(self, path: Path, line: str) -> bool:
        """Append one line; whether the disk took it."""
        return self.attempt(path, lambda: append_line(path, line))

    def remove(self, path: Path) -> bool:
        """Remove the file if it is there; whether the disk let it go."""
        return self.attempt(path, lambda: path.unlink(missing_ok=True), "removing")

    def rename(self, path: Path, to: Path) -> bool:
        """Give it another name; whether it has that."""
        return self.attempt(path, lambda: path.replace(to), "renaming")

    def attempt(self, path: Path, act: Callable[[], object], doing: str = "writing") -> bool:
        """Do something to `path`; whether the disk let it."""
        try:
            with disk(doing, path):
                act()
        except RunFolderError as error:
            if path not in self._refused:
                self._refused.add(path)
                self.tell(f"{error}; the run goes on without it")
            return False
        self._refused.discard(path)
        return True


def read_text(path: Path, tell: Tell = warn) -> str:
    """The text of a file; none where it is missing or cannot be read."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        tell(f"'{path}' cannot be read: {error.strerror or error}; it counts as missing")
        return ""


def read_map(
    path: Path, kinds: Mapping[str, Kind] | None = None, tell: Tell = warn
) -> dict[str, Any]:
    """The JSON map in a file; an empty one where it is missing or is none. kinds: of values; others
    are left out.
    """
    text = read_text(path, tell)
    try:
        values = json.loads(text) if text else {}
    except ValueError as error:
        tell(f"'{path}' is not JSON: {error}; it counts as missing")
        return {}
    if not isinstance(values, dict):
        tell(f"'{path}' holds no JSON map but a {type(values).__name__}; it counts as missing")
        return {}
    wrong = [
        name
        for name, kind in (kinds or {}).items()
        if name in values and not isinstance(values[name], kind)
    ]
    if wrong:
        tell(
            f"'{path}' has values of other types than were written: {wrong}; they count as missing"
        )
    return {name: value for name, value in values.items() if name not in wrong}


def read_lines(path: Path, tell: Tell = warn) -> tuple[list[dict[str, Any]], int]:
    """The JSON maps in a file of one a line, and how many lines are torn or none; none where it is
    missing.
    """
    lines: list[dict[str, Any]] = []
    torn = 0
    for text in read_text(path, tell).split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif text.strip():
            torn += 1
    return lines, torn


def stream_lines(path: Path, start: int, tell: Tell = warn) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON maps in a file of one a line, from a byte on: each with the byte where the next
    begins; no torn one.

    It ends before a line that is longer than any that a run writes.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            for text in iter(lambda: stream.readline(_LONGEST), b""):
                if not text.endswith(b"\n"):
                    return
                start += len(text)
                with contextlib.suppress(ValueError):
                    if isinstance(line := json.loads(text), dict):
                        yield start, line
    except FileNotFoundError:
        return
    except OSError as error:
        tell(f"'{path}' cannot be read: {error.strerror or error}; it counts as missing")
