"""The weight lines of one process, of its trainers and of those that it reads: as sites, for each
rank.

Within a host ends meet in its private folder, between hosts at a tcp address with the keys of the
run. There a trainer listens whether it has readers on other hosts or not: who is started again may
come to be on one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.planning.executors import COLLECTIVE
from dataflow.planning.plan import Plan
from dataflow.structure import line_of, readers_of, refresh_of, refreshes_of
from dataflow.system.files import write_atomically
from dataflow.system.security import again_at
from dataflow.weight_ends import EXECUTORS, Refresh, WeightSite
from dataflow.worker.host import Settings
from dataflow.worker.messages import WeightLine
from dataflow.worker.weight_ports import listen


@dataclass(frozen=True)
class _Followed:
    """A line that is read from another host."""

    name: str
    executor: str
    way: Callable[[], str]
    """The sites that would be used now."""


class WeightLines:
    """Knows the addresses, and listens at those between hosts from the first on; `ports` opens the
    ends.
    """

    def __init__(self, graph: Graph, plan: Plan, nodes: Iterable[str], settings: Settings) -> None:
        self._graph, self._plan, self._nodes, self._settings = graph, plan, list(nodes), settings
        self._has_hosts = bool(settings.host)
        self.listeners: dict[str, Any] = {}
        """Listeners by address, until an end takes them."""
        self._read: dict[str, WeightLine] = {}
        self._followed: dict[Path, _Followed] = {}
        """Files with the present address of a line, for all ranks of a reader."""

    @cached_property
    def own(self) -> dict[str, WeightLine]:
        """The lines of its trainers, by name; it listens there."""
        return {
            line_of(self._graph, node, refresh): self._line(node, refresh)
            for node in self._nodes
            for refresh in (None, *refreshes_of(self._graph, node))
            if readers_of(self._graph, node, refresh)
        }

    def read_from(self, lines: Mapping[str, WeightLine]) -> None:
        """Where weight lines are that its operators read, from now on.

        Errors: RunError where what they are read by does not lead there.
        """
        self._read |= lines
        for file, read in self._followed.items():
            if read.name not in lines:
                continue
            if (executor := read.way()) != read.executor and read.executor not in COLLECTIVE:
                raise RunError(
                    f"the weights of '{read.name}' were read by {read.executor}, and now their"
                    f" trainer is on '{lines[read.name].host}'; this worker ends, and is started"
                    f" again to read them by {executor}"
                )
            _note(file, lines[read.name].at[read.executor])

    def sites_of(self, trainer: str, refresh: Refresh | None) -> list[WeightSite]:
        """Where a trainer of this process offers its weights: a site for each executor."""
        line = self.own[line_of(self._graph, trainer, refresh)]
        return [self._site(trainer, executor, address) for executor, address in line.at.items()]

    def site_of(self, trainer: str, reader: str) -> WeightSite:
        """Where the replica of a reader in this process finds a trainer's weights."""
        name = line_of(self._graph, trainer, refresh_of(self._graph, reader))
        member = f"{reader}-{self._settings.replica}"
        if not self._has_hosts:
            executor = self._executor(trainer, reader, self._settings.replica)
            return self._site(trainer, executor, self._beside(name, executor), member, reader)
        executor = self._way(name, trainer, reader)
        file = Path(self._settings.sockets) / f"{member}.{name}.{executor}"
        self._followed[file] = _Followed(name, executor, lambda: self._way(name, trainer, reader))
        _note(file, self._read[name].at[executor])
        site = self._site(trainer, executor, self._read[name].at[executor], member, reader)
        return replace(site, where=str(file))

    def close(self) -> None:
        """Let go of the addresses that no end has taken."""
        while self.listeners:
            self.listeners.popitem()[1].close()

    def _line(self, trainer: str, refresh: Refresh | None) -> WeightLine:
        """The line of a trainer on this host."""
        name = line_of(self._graph, trainer, refresh)
        at = {
            executor: self._address(name, executor)
            for executor in self._executors(trainer, refresh)
        }
        return WeightLine(host=self._settings.host, at=at)

    def _address(self, name: str, executor: str) -> str:
        if not self._has_hosts or executor not in COLLECTIVE:
            return self._beside(name, executor)
        listener = again_at(
            self._settings.listen,
            self._settings.at.get(f"{name}.{executor}", ""),
            lambda address: listen(address, self._settings.keys, self._settings.life.attempt),
        )
        self.listeners[listener.address] = listener
        return str(listener.address)

    def _beside(self, name: str, executor: str) -> str:
        """Where ends meet that are on one host."""
        return f"ipc://{self._settings.sockets}/weights.{name}.{executor}"

    def _site(
        self, trainer: str, executor: str, address: str, name: str = "", reader: str = ""
    ) -> WeightSite:
        """name: a replica's of a reader."""
        is_link = self._has_hosts and executor in COLLECTIVE
        return WeightSite(
            executor=executor,
            is_sharded=executor in COLLECTIVE or self._plan.placements[trainer].ranks > 1,
            address=address,
            folder=self._settings.sockets,
            name=name,
            link_bytes_per_s=self._plan.link(trainer, executor),
            zero_copy=self._plan.zero_copy(trainer, executor),
            in_host=bool(reader) and self._plan.placements[reader].arrives_in_host,
            host=self._settings.listen if is_link else "",
            keys=dict(self._settings.keys) if is_link else {},
        )

    def _executors(self, trainer: str, refresh: Refresh | None) -> list[str]:
        """Those that some reader of this line needs, or may come to need."""
        readers = [reader.name for reader in readers_of(self._graph, trainer, refresh)]
        pairs = [
            (name, replica)
            for name in readers
            for replica in range(self._plan.placements[name].replicas)
        ]
        executors = [self._executor(trainer, *pair) for pair in pairs]
        executors += [
            self._executor(trainer, *pair, apart=True) for pair in pairs if self._has_hosts
        ]
        return list(dict.fromkeys(executors))

    def _executor(
        self, trainer: str, reader: str, replica: int, *, apart: bool | None = None
    ) -> str:
        return (
            self._plan.executor(trainer, reader, replica, apart=apart)
            if self._settings.sockets
            else "local"
        )

    def _way(self, name: str, trainer: str, reader: str) -> str:
        """By which weights get here from where their trainer is now. Errors: RunError."""
        line = self._read[name]
        chosen = self._executor(
            trainer, reader, self._settings.replica, apart=line.host != self._settings.host
        )
        for executor in (chosen, *EXECUTORS):
            if executor in line.at and (executor in COLLECTIVE or line.host == self._settings.host):
                return executor
        raise RunError(
            f"the weights of '{name}' cannot be read on '{self._settings.host}': their trainer, on"
            f" '{line.host}', offers them by {sorted(line.at)}; plan the run over its hosts again"
        )


def _note(file: Path, address: str) -> None:
    write_atomically(file, lambda out: out.write(address.encode()), flush=False)
