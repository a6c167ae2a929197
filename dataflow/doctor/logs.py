"""The last error of each log of a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from dataflow.system.files import tail

_BEGIN = "Traceback (most recent call last):"
_FILE = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SIGNS = re.compile(
    r"level='(error|critical|warning)'|^(ERROR|CRITICAL|WARNING)\b|^Fatal Python error|\bKilled\b"
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What a log says last of something that went wrong."""

    log: str
    said: str
    """One line."""
    where: str = ""
    """File and line, where there was a traceback."""
    lines_ago: int = 0
    """Lines that follow it."""


def last_errors(folder: Path) -> list[Trouble]:
    """For each log that has one, its last error, by name of the log."""
    found = [last_error(path.name, tail(path)) for path in sorted(folder.glob("*.log"))]
    return [trouble for trouble in found if trouble is not None]


def last_error(name: str, text: str) -> Trouble | None:
    """The last traceback, or the last line that is an error or a warning, whichever comes later."""
    lines = text.splitlines()
    begins = [at for at, line in enumerate(lines) if line.strip() == _BEGIN]
    signs = [at for at, line in enumerate(lines) if _SIGNS.search(line)]
    if begins and (not signs or begins[-1] >= signs[-1]):
        return _traceback(name, lines, begins[-1])
    if signs:
        return Trouble(
            log=name, said=lines[signs[-1]].strip(), lines_ago=len(lines) - 1 - signs[-1]
        )
    return None


def _traceback(name: str, lines: list[str], begin: int) -> Trouble:
    """Its last line that is not indented, and the innermost file outside installed packages."""
    places = []
    end = begin
    for at in range(begin + 1, len(lines)):
        if found := _FILE.match(lines[at]):
            places.append(f"{found['file']}:{found['line']}")
        elif lines[at] and not lines[at][0].isspace():
            end = at
            break
    own = [place for place in places if "site-packages" not in place] or places
    said = lines[end].strip() if end > begin else "a traceback without an end"
    return Trouble(
        log=name, said=said, where=own[-1] if own else "", lines_ago=len(lines) - 1 - end
    )
