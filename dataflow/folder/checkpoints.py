"""Checkpoints with a commit marker: one that is half-written or damaged is never chosen."""

import contextlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from dataflow.folder.placing import Placing
from dataflow.system.files import RunFolderError, disk, flush_to_disk, to_json, write_atomically

MARKER = "commit.json"
TEMPORARY = "temporary"
"""A true fact of this name in the marker: the checkpoint goes when a newer one is committed."""
_NAME = re.compile(r"step-(\d{6,})")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Checkpoints:
    """The folder checkpoints/ of a run: step-000100/ and its siblings, each ended by
    commit.json.
    """

    path: Path
    """The folder that holds them."""
    placing: Placing = field(default_factory=Placing, compare=False, repr=False)
    """How one gets its name."""

    def folder(self, step: int) -> Path:
        """Where the committed checkpoint of `step` stands."""
        return self.path / f"step-{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; a committed one stays good beside
        it.
        """
        partial = self._partial(step)
        with disk("starting checkpoint", partial):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, **facts: Any) -> Path:
        """Flush every file, write the marker last and put the checkpoint in its place; returns that
        place.

        The marker holds the step, `facts`, and size and xxh3_64 of each file.
        Errors: RunFolderError; the checkpoints committed before stay as they were.
        """
        partial = self._partial(step)
        with disk("committing checkpoint", partial):
            files = {name: _seal(partial / name) for name in _names(partial)}
        if not files:
            raise RunFolderError(
                f"checkpoint of step {step} cannot be committed: '{partial}' holds no file; "
                f"write the state into the folder that begin({step}) returns first"
            )
        marker = to_json({"step": step, **facts, "files": files}, indent=1).encode()
        write_atomically(
            partial / MARKER, lambda file: _write(file, marker), what="committing checkpoint"
        )
        return self._place(step)

    @contextlib.contextmanager
    def writing(self, step: int, **facts: Any) -> Iterator[Path]:
        """A folder to fill; committed when the block ends well, removed when it raises."""
        partial = self.begin(step)
        try:
            yield partial
            self.commit(step, **facts)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, oldest first, whether good or not."""
        with disk("listing", self.path):
            below = list(self.path.iterdir()) if self.path.exists() else []
        matches = [_NAME.fullmatch(path.name) for path in below]
        return sorted(int(match[1]) for match in matches if match)

    def staying(self) -> list[int]:
        """Steps of those that no newer one removes, oldest first, whether good or not."""
        return [step for step in self.steps() if not self.is_temporary(step)]

    def latest(self, at_most: int | None = None) -> int | None:
        """Newest step, not above `at_most`, whose checkpoint is committed and undamaged; None
        without one.
        """
        self._finish_interrupted()
        for step in reversed(self.steps()):
            if (at_most is None or step <= at_most) and self.damage(step) is None:
                return step
        return None

    def keep(self, step: int) -> bool:
        """Let the checkpoint of `step` stay; True if it was a temporary one until now. Errors:
        RunFolderError.
        """
        if not self.is_temporary(step):
            return False
        self._mark(step, {})
        return True

    def let_go(self, step: int) -> None:
        """Have the committed checkpoint of `step` go when `clear` comes to it. Errors:
        RunFolderError.
        """
        self._mark(step, {TEMPORARY: True})

    def _mark(self, step: int, mark: Mapping[str, bool]) -> None:
        path = self.folder(step) / MARKER
        with disk("marking checkpoint", path):
            facts = {
                name: fact
                for name, fact in json.loads(path.read_text()).items()
                if name != TEMPORARY
            }
        marker = to_json({**facts, **mark}, indent=1).encode()
        write_atomically(path, lambda file: _write(file, marker), what="committing checkpoint")

    def clear(self, before: int, but: Collection[int] = ()) -> None:
        """Remove the temporary checkpoints of steps below `before`, each from sight first, and what
        crashes left there: checkpoints that were never marked, half-done removals. Only while none
        of these steps is being written. but: steps whose checkpoints stay for now.

        Errors: RunFolderError; all others stay as they were.
        """
        for leftover in self.path.glob(".step-*.*"):
            match = _NAME.search(leftover.name)
            if match and int(match[1]) < before and _is_rest(leftover, match[0]):
                _remove(leftover)
        for step in self.steps():
            if step < before and step not in but and self.is_temporary(step):
                removed = self.path / f".step-{step:06d}.removed"
                with disk("removing checkpoint", self.folder(step)):
                    self.folder(step).replace(removed)
                _remove(removed)

    def damage(self, step: int, *, read: bool = True) -> str | None:
        """What is wrong with the checkpoint of `step`; None when every file is as the marker says.
        read: all of it; else sizes alone are compared.
        """
        return damage_of(self.folder(step), step, read=read)

    def size_bytes(self, step: int) -> int:
        """The size of all files in a checkpoint's folder."""
        return sum(path.stat().st_size for path in self.folder(step).rglob("*") if path.is_file())

    def is_temporary(self, step: int) -> bool:
        """Whether the marker of a step says that a newer one removes it; one that cannot be read
        does not.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return json.loads((self.folder(step) / MARKER).read_text()).get(TEMPORARY) is True
        return False

    def _partial(self, step: int) -> Path:
        token = f".{self.placing.token}" if self.placing.token else ""
        return self.path / f".step-{step:06d}{token}.partial"

    def _place(self, step: int) -> Path:
        final, partial = self.folder(step), self._partial(step)
        replaced = self.path / f".step-{step:06d}.replaced"
        with disk("committing checkpoint", final):
            self.placing.place(partial, final, replaced)
            flush_to_disk(self.path)
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _finish_interrupted(self) -> None:
        """Put checkpoints in place whose marker was written just before their writer died. Not
        those with a token: who wrote one may have been replaced, and refused its place.
        """
        for partial in sorted(self.path.glob(".step-*.partial")):
            match = _NAME.search(partial.name)
            step = int(match[1]) if match else 0
            is_ours = partial == self._partial(step) and (partial / MARKER).exists()
            if is_ours and damage_of(partial, step) is None:
                self._place(step)


def _is_rest(folder: Path, name: str) -> bool:
    """Whether nobody needs what a crash has left any more."""
    is_marked = (folder / MARKER).exists() and folder.name == f".{name}.partial"
    return folder.suffix == ".removed" or (folder.suffix == ".partial" and not is_marked)


def damage_of(folder: Path, step: int, *, read: bool = True) -> str | None:
    """What is wrong with a checkpoint in a folder of any name; None when every file is as its
    marker says.
    """
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["step"] != step:
            return f"its marker is of step {marker['step']}"
        for name, expected in marker["files"].items():
            facts = (
                _facts(folder / name)
                if read
                else {**expected, "bytes": (folder / name).stat().st_size}
            )
            if facts != expected:
                return f"'{name}' is not as it was written: {facts} instead of {expected}"
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        return "it was never committed" if missing == MARKER else f"'{missing}' is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"
    return None


def _names(folder: Path) -> list[str]:
    """Relative names of all files below `folder` but the marker."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path != folder / MARKER)


def _seal(path: Path) -> dict[str, Any]:
    flush_to_disk(path)
    flush_to_disk(path.parent)
    return _facts(path)


def _facts(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return {"bytes": file.tell(), "xxh3_64": digest.hexdigest()}


def _remove(folder: Path) -> None:
    with disk("removing checkpoint", folder):
        shutil.rmtree(folder)


def _write(file: Any, content: bytes) -> None:
    file.write(content)
