"""At the end of a run, what its hosts have made comes into the scheduler's folder, as far as that
is cheap.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dataflow.folder.disks.fetching import HostPeer, fetch, listed
from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.places import HOME
from dataflow.folder.ledger.questions import ListPlaces
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError
from dataflow.system.security import RunKeys

BRING_BYTES = 1 << 30
"""The most bytes of all files together; the rest stays where it was made."""
BRING_S = 45.0
"""Seconds for all of it. Agents wait longer for a scheduler that says nothing."""
LOG_BYTES = 16 << 20
"""The most bytes of one log; a longer one stays."""


class Bringing:
    """One call of `bring`.

    consumes: rows of the ledger that say who has what; files of the hosts
    produces: logs/HOST/, rollouts and the last checkpoint of each trainer in this folder; what
    stays, in one sentence waits for: the hosts, up to a deadline
    unblocked by: they
    """

    def __init__(
        self,
        folder: RunFolder,
        ledger: BaseLedger,
        addresses: Mapping[str, str],
        keys: RunKeys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: the scheduler's. ledger: one whose `placing` brings what it sees. addresses: of
        the hosts' files.
        """
        self._folder, self._ledger, self._addresses, self._keys = folder, ledger, addresses, keys
        self._clock, self._until, self._bytes = clock, clock() + BRING_S, BRING_BYTES
        self._sizes: dict[str, int] = {}
        self._trouble: list[str] = []

    def bring(self, trainers: Mapping[str | None, int]) -> str:
        """Fetch what there is. trainers: the last step, by the trainer's own folder. What stays on
        its host, and why, as text; empty: nothing does.
        """
        for host, address in self._addresses.items():
            with contextlib.closing(HostPeer(host, address, self._keys)) as peer:
                try:
                    self._sizes |= listed(peer, "rollouts") | listed(peer, "checkpoints")
                    for name, size in listed(peer, "logs").items():
                        if size <= LOG_BYTES and self._may(size):
                            fetch(
                                peer,
                                name,
                                self._folder.logs / host / Path(name).relative_to("logs"),
                            )
                except RunFolderError as error:
                    self._trouble.append(str(error))
        stays = self._rollouts() + [
            name for own, last in trainers.items() for name in self._checkpoint(own, last)
        ]
        if not stays and not self._trouble:
            return ""
        why = (
            "; ".join(dict.fromkeys(self._trouble))
            or f"they are more than {BRING_BYTES >> 20} MiB, or took too long"
        )
        return (
            f"{len(stays)} of the files that hosts have made stay there, as"
            f" '{stays[0] if stays else 'logs'}': {why}"
        )

    def _rollouts(self) -> list[str]:
        """Names of rollout files that stay."""
        names = []
        for name, have in self._ledger.do(ListPlaces("rollouts/")).items():
            if HOME not in have and not self._see(name, have, self._sizes.get(name, 0)):
                names.append(name)
        return names

    def _checkpoint(self, own: str | None, last: int) -> list[str]:
        """Fetch the newest checkpoint, unless it stays."""
        checkpoints = self._folder.checkpoints_of(own)
        below = checkpoints.path.relative_to(self._folder.path)
        rows = self._ledger.do(ListPlaces(f"{below}/"))
        of_steps = {int(name.rpartition("step-")[2]): name for name in rows}
        newest = max((step for step in of_steps if step <= last), default=0)
        if not newest or HOME in rows[of_steps[newest]]:
            return []
        name = of_steps[newest]
        size = sum(size for file, size in self._sizes.items() if file.startswith(f"{name}/"))
        if self._may(size):
            with self._told():
                self._ledger.placing.see_newest(checkpoints.path, newest)
        return [] if checkpoints.folder(newest).exists() else [name]

    def _see(self, name: str, have: Sequence[str], size: int) -> bool:
        if set(have).intersection(self._addresses) and self._may(size):
            with self._told():
                self._ledger.placing.see(self._folder.path / name)
                return True
        return False

    def _may(self, size: int) -> bool:
        """Whether there is room and time for so many bytes more."""
        if size > self._bytes or self._clock() > self._until:
            return False
        self._bytes -= size
        return True

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RunFolderError as error:
            self._trouble.append(str(error))
