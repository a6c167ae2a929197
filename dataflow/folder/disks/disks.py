"""What a worker of a run over hosts sees of others' files: its own disk, and the rest on demand."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from dataflow.folder.checkpoints import Checkpoints, damage_of
from dataflow.folder.disks.fetching import HostPeer, Peer, fetch, listed
from dataflow.folder.disks.messages import Answer, ListFiles, ReadFile
from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.places import HOME, holders
from dataflow.folder.ledger.questions import ListPlaces
from dataflow.folder.ledger.upkeep import AddPlace
from dataflow.system.files import RunFolderError, disk
from dataflow.system.security import RunKeys

METRICS = "metrics.jsonl"
"""All lines of it are in the scheduler's folder."""


class Disks:
    """The files of a run, from one of its hosts.

    consumes: rows of the ledger that say who has what; files of other hosts
    produces: the same files here, and a row for each that is worth one
    waits for: the answers of other hosts, each up to a deadline
    unblocked by: they
    """

    def __init__(
        self,
        ledger: BaseLedger,
        disk: str,
        at_home: Callable[[ListFiles | ReadFile], Answer],
        addresses: Mapping[str, str],
        keys: RunKeys | None,
    ) -> None:
        """ledger: of the run; its folder is that of this host. disk: `HOME`, or the name of this
        host, whose folder no other sees. at_home: asks for files of the scheduler's folder.
        addresses: by host with a folder of its own that is there, of its files.
        """
        self._ledger, self._disk, self._root = ledger, disk, ledger.path.parent
        self._at_home, self._addresses, self._keys = at_home, addresses, keys
        self._log = structlog.get_logger(disk=disk)

    def see(self, path: Path) -> None:
        """Fetch the current version of this file, if any host has it. Errors: RunFolderError where
        no host that has it gives it; a file that nobody ever had stays absent.
        """
        name = self._name(path)
        if name == METRICS:
            if self._disk != HOME and listed(_AtHome(self._at_home), METRICS):
                self._bring(HOME, name)
            return
        have = holders(self._ledger.do(ListPlaces(name)), name)
        if self._disk in have:
            return
        self._from_any(name, have, lambda host: self._bring(host, name))

    def see_newest(self, path: Path, at_most: int | None) -> None:
        """Have the newest checkpoint here that anybody gives, and let none count that stands here
        and is another's. path: of the folder with checkpoints.
        """
        checkpoints, name = Checkpoints(path), self._name(path)
        rows = self._ledger.do(ListPlaces(f"{name}/"))
        if not rows and self._disk == HOME:
            return
        have = {
            step: holders(rows, f"{name}/{folder.name}")
            for step, folder in _folders(checkpoints, rows, name).items()
        }
        if self._disk != HOME:
            have |= {step: (HOME,) for step in self._home_steps(name) if step not in have}
        for step in checkpoints.steps():
            if self._disk not in have.get(step, ()):
                _set_aside(checkpoints.folder(step))
        for step in sorted(
            (step for step in have if at_most is None or step <= at_most), reverse=True
        ):
            if self._disk in have[step] and checkpoints.damage(step) is None:
                return
            try:
                self._from_any(
                    f"{name}/{checkpoints.folder(step).name}",
                    have[step],
                    self._bringer(checkpoints, name, step),
                )
                return
            except RunFolderError as error:
                self._log.warning(
                    "a checkpoint cannot be had; taking the one before it",
                    step=step,
                    error=str(error),
                )

    def _from_any(self, name: str, have: Sequence[str], bring: Callable[[str], None]) -> None:
        """Fetch from the first host that gives it. Errors: RunFolderError with what each host
        said.
        """
        errors = []
        for host in have:
            if host == self._disk:
                continue
            try:
                bring(host)
            except RunFolderError as error:
                errors.append(str(error))
                continue
            self._ledger.do(AddPlace(name, self._disk))
            if self._disk != HOME:
                self._log.info("fetched", path=name, host=host or "the scheduler's")
            return
        raise RunFolderError(
            f"'{name}' is not on this host, and is not to be had:"
            f" {'; '.join(errors) or 'nobody else has it'}; have the host take part that made it,"
            " or"
            " go on from copies at an address (dataflow resume --from)"
        )

    def _bring(self, host: str, name: str) -> None:
        with self._peer(host) as peer:
            fetch(peer, name, self._root / name)

    def _bringer(self, checkpoints: Checkpoints, name: str, step: int) -> Callable[[str], None]:
        def bring(host: str) -> None:
            folder = checkpoints.folder(step)
            aside = folder.with_name(f".{folder.name}.fetched.partial")
            with disk("fetching", folder):
                shutil.rmtree(aside, ignore_errors=True)
                with self._peer(host) as peer:
                    for file in listed(peer, f"{name}/{folder.name}"):
                        fetch(peer, file, aside / Path(file).relative_to(f"{name}/{folder.name}"))
                if why := damage_of(aside, step):
                    raise RunFolderError(f"the checkpoint of step {step} there is not good: {why}")
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)

        return bring

    def _home_steps(self, name: str) -> list[int]:
        """Steps of the checkpoints in the scheduler's folder."""
        below = {
            Path(file).parts[len(Path(name).parts)] for file in listed(_AtHome(self._at_home), name)
        }
        return [
            int(folder_name.removeprefix("step-"))
            for folder_name in below
            if folder_name.removeprefix("step-").isdecimal()
        ]

    @contextlib.contextmanager
    def _peer(self, host: str) -> Iterator[Peer]:
        """The peer that serves a host's files. Errors: RunFolderError where the host takes no
        part.
        """
        if host == HOME:
            yield _AtHome(self._at_home)
            return
        if host not in self._addresses or self._keys is None:
            raise RunFolderError(f"host '{host}' has it and takes no part in the run")
        with contextlib.closing(HostPeer(host, self._addresses[host], self._keys)) as peer:
            yield peer

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))


class _AtHome:
    """The ledger's service as a peer; it sees the scheduler's folder."""

    def __init__(self, ask: Callable[[ListFiles | ReadFile], Answer]) -> None:
        self.ask = ask


def _folders(
    checkpoints: Checkpoints, rows: Mapping[str, Sequence[str]], name: str
) -> dict[int, Path]:
    """Folders of the steps that are here, or in the ledger."""
    numbers = {row.removeprefix(f"{name}/step-") for row in rows}
    return {
        step: checkpoints.folder(step)
        for step in {
            *checkpoints.steps(),
            *(int(number) for number in numbers if number.isdecimal()),
        }
    }


def _set_aside(folder: Path) -> None:
    """Set a checkpoint aside that another host has made anew, or that nobody has any more."""
    places = (folder.with_name(f"not-counted-{at}-{folder.name}") for at in range(1, 1_000_000))
    with disk("renaming", folder):
        folder.rename(next(place for place in places if not place.exists()))
