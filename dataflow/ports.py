"""The transports of one process: data edges over ZeroMQ or within it, and the ends of the weight planes."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from dataflow.graph import Graph
from dataflow.host import Host, Settings
from dataflow.node import WeightsIn, WeightsOut
from dataflow.plan import Plan
from dataflow.records import schema
from dataflow.wiring import CAPACITY_BYTES, Edge, edges
from transport.data import LocalNetwork, Receiver, Sender, keep_freed_memory


class Ports:
    """Opens what the plan says, closes all of it."""

    def __init__(self, graph: Graph, plan: Plan, nodes: list[str], settings: Settings) -> None:
        self._graph, self._plan, self._settings = graph, plan, settings
        self._nodes = set(nodes)
        self.inlets: dict[str, Receiver] = {}
        self._outlets: dict[str, Sender] = {}
        self._weights: list[Any] = []
        self._hubs: dict[str, Any] = {}
        self._local = LocalNetwork()

    def open_inlets(self, host: Host) -> dict[str, str]:
        """Bind the edges that end here; addresses of those that come from other processes, by edge."""
        addresses = {}
        if self._settings.sockets:
            keep_freed_memory()
        for edge in host.incoming():
            local = edge.producer in self._nodes
            receiver = Receiver(
                edge=edge.name, schema=schema(edge.columns), address=edge.name if local else self._address(edge),
                capacity_rows=edge.capacity_rows, capacity_bytes=CAPACITY_BYTES,
                senders=self._plan.placements[edge.producer].replicas, network=self._local if local else None,
            )  # fmt: skip
            self.inlets[edge.name] = receiver
            if not local:
                addresses[edge.name] = receiver.address
        return addresses

    def open_outlets(self, host: Host, addresses: Mapping[str, list[str]]) -> Mapping[str, Any]:
        """Connect the edges that begin here."""
        for edge in host.outgoing():
            local = edge.consumer in self._nodes
            self._outlets[edge.name] = Sender(
                edge=edge.name, sender_id=f"{edge.producer}-{self._settings.replica}", epoch=self._settings.attempt,
                schema=schema(edge.columns), receivers=[edge.name] if local else addresses[edge.name],
                network=self._local if local else None,
            )  # fmt: skip
        return self._outlets

    def writer_of(self, trainer: str) -> Callable[[Mapping[str, Any]], WeightsOut]:
        """Opens the trainer's end of its weight plane."""

        def open_writer(tensors: Mapping[str, Any]) -> WeightsOut:
            from transport.weights import FlatLayout, WeightWriter

            model = self._graph.operators[trainer].uses
            assert model is not None, "a trainer has a model"
            writer = WeightWriter(FlatLayout.of(tensors, dtype=model.dtype), self._site(trainer))
            self._weights.append(writer)
            return writer

        return open_writer

    def reader_of(self, trainer: str, reader: str) -> Callable[[Mapping[str, Any]], WeightsIn]:
        """Opens a reader's end."""

        def open_reader(tensors: Mapping[str, Any]) -> WeightsIn:
            from transport.weights import WeightReader

            end = WeightReader(self._site(trainer), f"{reader}-{self._settings.replica}")
            end.attach(tensors)
            self._weights.append(end)
            return end

        return open_reader

    def poll(self) -> None:
        """Answer on the weight planes, whatever the operators are doing."""
        for end in self._weights:
            end.poll()

    def sockets(self) -> list[Any]:
        """What may become readable."""
        ends: list[Receiver | Sender] = [*self.inlets.values(), *self._outlets.values()]
        weights = [end.socket for end in self._weights if end.socket is not None]
        return [socket for end in ends for socket in end.sockets] + weights

    def depths(self) -> dict[str, tuple[int, int]]:
        """Rows received and not acknowledged, and the capacity, of the edges that end here."""
        return {
            edge.name: (self.inlets[edge.name].depth[0], edge.capacity_rows)
            for edge in edges(self._graph) if edge.name in self.inlets
        }  # fmt: skip

    def close(self) -> None:
        """Close everything; what was sent but not acknowledged is lost with this process."""
        for end in [*self._weights, *self._outlets.values(), *self.inlets.values()]:
            with contextlib.suppress(OSError):
                end.close()

    def _address(self, edge: Edge) -> str:
        """Short, because the path of an ipc socket may have 107 bytes."""
        number = [e.name for e in edges(self._graph)].index(edge.name)
        return f"ipc://{self._settings.sockets}/edge-{number}.{self._settings.replica}"

    def _site(self, trainer: str) -> Any:
        """Where a trainer and its readers meet: a socket between processes, a hub within one."""
        if self._settings.sockets:
            from transport.weights import SharedMemory

            folder = self._settings.sockets
            return SharedMemory(f"ipc://{folder}/weights.{trainer}", folder=folder)
        from transport.weights import Hub

        return self._hubs.setdefault(trainer, Hub())
