"""What a worker of a run over hosts reads in the run folder, where hosts may have a folder each.

Hosts give each other no files. Lines of metrics come from the ledger's service, a checkpoint of
another host from the address of its copies.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from dataflow.errors import GraphError, RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.copies.process import bring_checkpoint
from dataflow.folder.copies.store import Copies
from dataflow.folder.ledger import HOME, BaseLedger
from dataflow.system.files import RunFolderError, disk, write_atomically

METRICS = "metrics.jsonl"
"""All lines of it are in the scheduler's folder."""


class OwnFiles:
    """The files of a run, from one of its hosts."""

    def __init__(
        self,
        ledger: BaseLedger,
        host: str,
        read_metrics: Callable[[int], bytes],
        copies: Copies | None,
    ) -> None:
        """ledger: of the run; its folder is that of this host. host: whose folder no other sees, or
        `HOME`. read_metrics: some bytes of the scheduler's metrics.jsonl from an offset on.
        """
        self._ledger, self._host, self._root = ledger, host, ledger.path.parent
        self._read_metrics, self._copies = read_metrics, copies
        self._log = structlog.get_logger(disk=host)

    def see(self, path: Path) -> None:
        """Before a file is read: have the lines of metrics here, and see that rollouts are those
        that count. Errors: RunFolderError where these are on another host.
        """
        name = self._name(path)
        if name == METRICS:
            if self._host != HOME:
                self._bring_metrics(path)
            return
        host = self._ledger.places(name).get(name, HOME)
        if host != self._host:
            raise RunFolderError(
                f"'{name}' is not on this host, but {_where(host)}, and hosts with a folder each"
                " give each other no rollouts; to keep the steps from there on, place the worker"
                " where it was (--place)"
            )

    def see_newest(self, path: Path, at_most: int | None) -> None:
        """Have the newest checkpoint here, from the address of the copies where another host has
        made it, and let none count that stands here and is another's.

        path: of the folder with checkpoints. Errors: RunError where none is to be had that was
        made; GraphError where the address does not answer and there is nothing else.
        """
        checkpoints, below = Checkpoints(path), self._name(path)
        rows = _steps(self._ledger.places(f"{below}/"))
        if self._host == HOME and not rows:
            return
        for step in checkpoints.steps():
            if rows.get(step, HOME) != self._host:
                _set_aside(checkpoints.folder(step))
        local_step = checkpoints.latest(at_most) or 0
        steps = [step for step in rows if at_most is None or step <= at_most]
        newest = max(steps, default=0)
        if newest <= local_step and (local_step or not at_most or self._host == HOME):
            return
        trainer, reason = "" if path.parent == self._root else path.name, "there is no address"
        if self._copies is not None:
            upto = newest if at_most is None else at_most
            try:
                copied = bring_checkpoint(
                    self._copies, trainer, self._root, local_step, upto, self._log.info
                )
                if copied is not None:
                    name = f"{below}/{checkpoints.folder(copied).name}"
                    self._ledger.set_place(name, self._host)
                    return
                reason = f"'{self._copies.place}' has no newer one"
            except RunError as error:
                reason = str(error)
            except GraphError as error:  # it does not answer: what it has is not known
                if not local_step:
                    raise
                reason = str(error)
        if newest > local_step:
            lost = f"the checkpoint of step {newest} is {_where(rows[newest])}"
            if not local_step:
                raise RunError(
                    f"'{self._root.name}' cannot go on: {lost}, and no copy is to be had"
                    f" ({reason}); place the trainer there (--place), or start a new run"
                )
            self._log.warning(f"{lost}: the run goes on from step {local_step}", reason=reason)

    def _bring_metrics(self, path: Path) -> None:
        with disk("writing", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lines = b""
        while some := self._read_metrics(len(lines)):
            lines += some
        write_atomically(path, lambda file: file.write(lines), flush=False)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _steps(rows: Mapping[str, str]) -> dict[int, str]:
    """By step, the host that has its checkpoint."""
    steps = {path.rpartition("step-")[2]: host for path, host in rows.items()}
    return {int(step): host for step, host in steps.items() if step.isdecimal()}


def _where(host: str) -> str:
    return f"on host '{host}'" if host else "in the scheduler's folder"


def _set_aside(folder: Path) -> None:
    """A checkpoint that another host has made anew, or that none has any more."""
    names = (folder.with_name(f"not-counted-{at}-{folder.name}") for at in range(1, 1_000_000))
    with disk("renaming", folder):
        folder.rename(next(place for place in names if not place.exists()))
