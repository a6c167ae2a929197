"""`dataflow list`: the runs of a folder, newest first, from the ends of their files; what else lies
there is named.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from dataflow.display.formatting import clean, fit, known
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.state import State, begun_at, state_of
from dataflow.system.files import Extras, RunFolderError, disk

MARKS = ("config.json", "graph.json", "metrics.jsonl", "ledger.db")
"""A folder with none of them is no run."""
TAILS = (1 << 17, 1 << 22, 1 << 26)
"""Bytes of the end of metrics.jsonl that are read, until an evaluation stands there."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run, as a line of the list says it."""

    name: str
    folder: str
    graph: str = ""
    state: State
    steps: int = 0
    wanted: int | None = None
    """Steps that it was to make; None: until the prompts end."""
    accuracy: float | None = None
    """Of the last evaluation."""
    reward: float | None = None
    """Mean of the last step."""
    loss: float | None = None
    """Of the last step."""
    begun: float | None = None
    """Seconds since 1970."""
    written: float | None = None
    """When its last step was."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        fields = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("state", "notes")
        }
        notes = [*([self.state.note] if self.state.note else []), *self.notes]
        return fields | {"state": self.state.word, "notes": notes}


@dataclass(frozen=True)
class Runs:
    """What lies in a folder."""

    runs: tuple[ListedRun, ...]
    """Newest first."""
    others: tuple[tuple[str, str], ...] = field(default=())
    """What is no run, and why."""


def runs_in(root: Path) -> Runs:
    """The runs in a folder, or the run that the folder itself is. Errors: RunFolderError where
    there is none.
    """
    if not root.is_dir():
        raise RunFolderError(
            f"no folder of runs at '{root}':"
            f" {'that is a file' if root.exists() else 'nothing is there'}; give the folder that"
            " --runs named, which is 'runs' where it was left out"
        )
    if _is_run(root):
        return Runs((listed(root),))
    runs, skipped = [], []
    with disk("reading", root):
        names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    for name in names:
        try:
            if not _is_folder_of_its_own(root / name):
                continue
            if _is_run(root / name):
                runs.append(listed(root / name))
            else:
                skipped.append((name, "no run"))
        except OSError as error:
            skipped.append((name, f"cannot be read: {error.strerror or error}"))
    return Runs(
        tuple(sorted(runs, key=lambda run: (run.begun or 0.0, run.name), reverse=True)),
        tuple(skipped),
    )


def listed(path: Path) -> ListedRun:
    """The line of one run. Errors: OSError where the folder cannot be looked into."""
    os.scandir(path).close()
    problems: list[str] = []
    folder = RunFolder.open(path, Extras(problems.append))
    graph, config = folder.read_json("graph.json"), folder.read_json("config.json")
    if not graph and not config and not problems:
        problems.append(
            "neither graph.json nor config.json is there: an earlier version made it, or it never"
            " began"
        )
    leaders = config.get("leading")
    leader = (
        leaders[0]
        if isinstance(leaders, list) and leaders and isinstance(leaders[0], str)
        else None
    )
    last = last_lines(folder.metrics, leader, problems)
    return ListedRun(
        name=path.resolve().name,
        folder=str(path),
        graph=_text(graph.get("name")),
        state=state_of(folder),
        steps=int(known(last.step.get("step")) or 0),
        wanted=_whole(config.get("steps")),
        accuracy=known(last.evaluation.get("eval_accuracy")),
        reward=known(last.step.get("reward_mean")),
        loss=known(last.step.get("loss")),
        begun=begun_at(folder, config),
        written=last.at,
        notes=tuple(problems),
    )


@dataclass(frozen=True, kw_only=True)
class Last:
    """The end of metrics.jsonl."""

    step: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    at: float | None = None
    """When the file was last written."""


def last_lines(path: Path, leader: str | None, problems: list[str]) -> Last:
    """The last line of a step, and of an evaluation, without reading all of a long file. leader:
    whose steps count; None: anybody's. said: gets what could not be read.
    """
    step: Mapping[str, Any] = {}
    evaluation: Mapping[str, Any] = {}
    for most in TAILS:
        try:
            with path.open("rb") as file:
                size, at = file.seek(0, os.SEEK_END), path.stat().st_mtime
                file.seek(max(0, size - most))
                text = file.read(most)
        except FileNotFoundError:
            return Last()
        except OSError as error:
            problems.append(f"'{path.name}' cannot be read: {error.strerror or error}")
            return Last()
        for line in _backwards(text):
            if "eval_accuracy" in line:
                evaluation = evaluation or line
            elif "step" in line and (leader is None or line.get("node", leader) == leader):
                step = step or line
            if step and evaluation:
                break
        if size <= most or (step and evaluation):
            return Last(step=step, evaluation=evaluation, at=at)
    return Last(step=step, evaluation=evaluation, at=at)


def _backwards(text: bytes) -> Iterator[dict[str, Any]]:
    """The JSON maps of these lines, the last first; what is torn at either end is passed over."""
    for line in reversed(text.split(b"\n")):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _is_folder_of_its_own(path: Path) -> bool:
    """Whether it is a folder, and no link to another one beside it, such as `latest`."""
    if (
        path.is_symlink()
        and (path.parent / path.readlink()).parent.resolve() == path.parent.resolve()
    ):
        return False
    return stat.S_ISDIR(path.stat().st_mode)


def _is_run(path: Path) -> bool:
    names = {entry.name for entry in os.scandir(path)}
    return any(mark in names for mark in MARKS)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago that was, for people: 41 s, 12 min, 3 h, 5 d."""
    if at is None:
        return "-"
    passed = max(0.0, (time.time() if now is None else now) - at)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if passed >= 2 * size:
            return f"{passed / size:.0f} {unit}"
    return f"{passed:.0f} s"


WIDEST = 60
"""Cells of a column; what is longer is cut."""


def in_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> list[str]:
    """A line for the headings, one for each row. right: headings of the columns that stand at the
    right of theirs.
    """
    texts = [[clean(cell) for cell in row] for row in rows]
    widths = [
        min(WIDEST, max([cell_len(head), *(cell_len(row[at]) for row in texts)]))
        for at, head in enumerate(heads)
    ]
    return ["  ".join(_cells(row, heads, widths, right)).rstrip() for row in (heads, *texts)]


def _cells(
    row: Sequence[str], heads: Sequence[str], widths: Sequence[int], right: Sequence[str]
) -> list[str]:
    return [
        " " * max(width - cell_len(cell), 0) + fit(cell, min(cell_len(cell), width))
        if head in right
        else fit(cell, width)
        for cell, head, width in zip(row, heads, widths, strict=True)
    ]
