"""Copies of one trainer's checkpoints in a part: whole from the moment on at which their marker is
there.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.folder.checkpoints import MARKER, TEMPORARY
from dataflow.folder.copies.address import Address, CopyError, Moved
from dataflow.system.files import RunFolderError

LEDGER = "ledger.db.zst"
"""Beside a checkpoint's files: the ledger as it was when they were copied, or later than their
step."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Store:
    """checkpoints/ of a part, or checkpoints/TRAINER/."""

    address: Address
    """Of the part."""
    trainer: str = ""

    @property
    def place(self) -> Address:
        """The folder there."""
        place = self.address.below("checkpoints")
        return place.below(self.trainer) if self.trainer else place

    def steps(self) -> list[int]:
        """Steps that have a folder there, whole or not, ascending. Errors: CopyError."""
        found = map(_NAME.fullmatch, self.place.names())
        return sorted(int(match[1]) for match in found if match)

    def marker(self, step: int) -> dict[str, Any]:
        """What its marker says; empty where there is none, or a torn one: no copy. Errors:
        CopyError.
        """
        found = self.place.get_json(f"{name_of(step)}/{MARKER}")
        return found if found.get("step") == step and LEDGER in found.get("files", {}) else {}

    def whole(self) -> list[int]:
        """Steps that are there whole, as far as markers tell, ascending. Errors: CopyError."""
        return [step for step in self.steps() if self.marker(step)]

    def put(
        self,
        step: int,
        folder: Path,
        snapshot: Callable[[Path], None],
        moved: Moved,
        check: Callable[[], None],
    ) -> None:
        """Copy a committed checkpoint: its files, the ledger as it is now, and then its marker.

        snapshot: writes the ledger. check: raises where nothing may be written any more; asked
        before the marker. Where all that is there but the marker, which says otherwise, that alone
        is written. Errors: CopyError; RunFolderError where the folder is not what its marker says:
        then nothing is whole that was not before.
        """
        marker = local_marker(folder)
        if not (known := self.marker(step)) or _but_ledger(known) != dict(marker["files"]):
            if known:
                self.place.remove(f"{name_of(step)}/{MARKER}")
            known = self._put_files(step, folder, marker, snapshot, moved)
        wanted = {**marker, "files": known["files"]}
        if self.marker(step) != wanted:
            check()
            self.place.put_json(f"{name_of(step)}/{MARKER}", wanted)

    def _put_files(
        self,
        step: int,
        folder: Path,
        marker: Mapping[str, Any],
        snapshot: Callable[[Path], None],
        moved: Moved,
    ) -> dict[str, Any]:
        found = {}
        for name, wanted in marker["files"].items():
            with _opened(folder / name) as source:
                found[name] = self.place.put(f"{name_of(step)}/{name}", source, moved)
            if found[name] != wanted:
                raise RunFolderError(
                    f"'{folder / name}' is not as it was written: {found[name]} instead of"
                    f" {wanted}; look at the disk"
                )
        with tempfile.TemporaryDirectory(prefix="dataflow-ledger-") as aside:
            snapshot(Path(aside) / LEDGER)
            with (Path(aside) / LEDGER).open("rb") as source:
                found[LEDGER] = self.place.put(f"{name_of(step)}/{LEDGER}", source, moved)
        return {"files": found}

    def get(self, step: int, into: Path, moved: Moved) -> None:
        """Bring a whole checkpoint here, into an empty folder; the ledger lies beside its files.
        Errors: CopyError, also where a file is not as the marker says.
        """
        marker = self.marker(step)
        for name, wanted in marker["files"].items():
            if (found := self.place.get(f"{name_of(step)}/{name}", into / name, moved)) != wanted:
                raise CopyError(
                    f"'{name}' of the checkpoint of step {step} at '{self.place.text}' is damaged:"
                    f" {found} instead of {wanted}"
                )

    def clear(self, before: int, but: int | None = None) -> None:
        """Remove copies of steps below `before` that are temporary, or were never whole; the marker
        first. but: a step that stays. Errors: CopyError.
        """
        for step in self.steps():
            if step < before and step != but:
                marker = self.marker(step)
                if not marker or marker.get(TEMPORARY) is True:
                    self._remove(step)

    def take_back(self, last: int) -> None:
        """Remove what is of later steps than `last`: those were taken back, and others will have
        their numbers. Errors: CopyError.
        """
        for step in self.steps():
            if step > last:
                self._remove(step)

    def _remove(self, step: int) -> None:
        self.place.remove(f"{name_of(step)}/{MARKER}")
        self.place.remove(name_of(step))


def name_of(step: int) -> str:
    """Of a checkpoint's folder."""
    return f"step-{step:06d}"


def local_marker(folder: Path) -> dict[str, Any]:
    """That of a checkpoint here. Errors: RunFolderError where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"'{folder}' is no committed checkpoint: {error}; it may be gone by now"
        ) from error
    return found


def _but_ledger(marker: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts for name, facts in marker["files"].items() if name != LEDGER}


def _opened(path: Path) -> Any:
    """Errors: RunFolderError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise RunFolderError(
            f"'{path}' cannot be copied: {error.strerror}; it may be gone by now"
        ) from error


def is_gone(folder: Path) -> bool:
    """Whether a checkpoint is not there any more."""
    with contextlib.suppress(OSError):
        return not (folder / MARKER).exists()
    return False
