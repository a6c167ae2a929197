"""The weight lines of one process, of its trainers and of those that it reads: as sites, for each rank."""

from collections.abc import Iterable, Mapping
from typing import Any

from dataflow.graph import Graph
from dataflow.planning.executors import COLLECTIVE
from dataflow.planning.plan import Plan
from dataflow.structure import line_of, readers_of, refresh_of, refreshes_of
from dataflow.weight_ends import Refresh
from dataflow.worker.host import Settings
from dataflow.worker.messages import WeightLine
from dataflow.worker.weight_ports import ROUNDS, SEGMENTS


class WeightLines:
    """Knows the addresses; `ports` opens the ends."""

    def __init__(self, graph: Graph, plan: Plan, nodes: Iterable[str], settings: Settings) -> None:
        self._graph, self._plan, self._settings = graph, plan, settings
        self.own = {
            line_of(graph, node, refresh): self._line(node, refresh)
            for node in nodes for refresh in (None, *refreshes_of(graph, node)) if readers_of(graph, node, refresh)
        }  # fmt: skip
        """Those of its trainers, by name."""
        self._read: dict[str, WeightLine] = {}

    def read_from(self, lines: Mapping[str, WeightLine]) -> None:
        """Where weight lines are that its operators read, from now on."""
        self._read |= lines

    def sites_of(self, trainer: str, refresh: Refresh | None) -> list[dict[str, Any]]:
        """Where a trainer of this process offers its weights, in plain values: a site for each executor."""
        line = self.own[line_of(self._graph, trainer, refresh)]
        return [self._site(trainer, executor, address) for executor, address in line.at.items()]

    def site_of(self, trainer: str, reader: str) -> dict[str, Any]:
        """Where the replica of a reader in this process finds a trainer's weights, in plain values."""
        refresh = refresh_of(self._graph, reader)
        line = self._read.get(line_of(self._graph, trainer, refresh)) or self._line(trainer, refresh)
        executor = self._executor(trainer, reader, self._settings.replica)
        name = f"{reader}-{self._settings.replica}"
        return self._site(trainer, executor, line.at[executor], name)

    def _line(self, trainer: str, refresh: Refresh | None) -> WeightLine:
        """Of a trainer on this host."""
        line = line_of(self._graph, trainer, refresh)
        at = {
            executor: f"ipc://{self._settings.sockets}/weights.{line}.{executor}"
            for executor in self._executors(trainer, refresh)
        }
        return WeightLine(host="", at=at)

    def _site(self, trainer: str, executor: str, address: str, name: str = "") -> dict[str, Any]:
        """name: a reader's."""
        shards = executor in COLLECTIVE or self._plan.placements[trainer].ranks > 1
        return {
            "protocol": ROUNDS if shards else SEGMENTS, "executor": executor, "folder": self._settings.sockets,
            "address": address, "name": name, "link_bytes_per_s": self._plan.link(trainer, executor),
        }  # fmt: skip

    def _executors(self, trainer: str, refresh: Refresh | None) -> list[str]:
        """Those that some reader of this line needs."""
        readers = [reader.name for reader in readers_of(self._graph, trainer, refresh)]
        pairs = [(name, replica) for name in readers for replica in range(self._plan.placements[name].replicas)]
        return list(dict.fromkeys(self._executor(trainer, name, replica) for name, replica in pairs))

    def _executor(self, trainer: str, reader: str, replica: int) -> str:
        return self._plan.executor(trainer, reader, replica) if self._settings.sockets else "local"
