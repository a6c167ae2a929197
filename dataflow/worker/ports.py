"""The transports of one process: data edges over ZeroMQ or within it, and ends of the weight
planes.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import Edge, edges, quantized_format
from dataflow.records import CAPACITY_BYTES, GROUP_ID, schema
from dataflow.structure import readers_of
from dataflow.system.security import RunKeys, again_at, reachable
from dataflow.weight_ends import OpensWeights, OpensWriter, Refresh, WeightsIn, WeightsOut, leave
from dataflow.worker.acknowledgements import replica_of
from dataflow.worker.host import NodeLoops, Settings
from dataflow.worker.kept_counts import CrossedByFile, KeptCounts, path_of
from dataflow.worker.messages import WeightLine
from dataflow.worker.weight_lines import WeightLines
from dataflow.worker.weight_ports import open_reader, open_writer
from transport.data import (
    AnswerSender,
    LocalInlet,
    LocalOutlet,
    Receiver,
    Sender,
    SocketNetwork,
    keep_freed_memory,
)

if TYPE_CHECKING:
    from transport.weights.encoding import Encoding

_SENDERS = 64
"""The most replicas that may send to a trainer without a scorer between them: rows that it has not
trained stay on the edge."""


class Ports:
    """Opens what the plan says, closes all of it."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        nodes: list[str],
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: of this process, which stands still while it is stopped."""
        self._graph, self._plan, self._settings, self._clock = graph, plan, settings, clock
        self._nodes = set(nodes)
        self._lines = WeightLines(graph, plan, nodes, settings)
        self._edges = edges(graph)
        self._counts = KeptCounts(
            path_of(settings.sockets, settings.worker, settings.replica),
            [edge.name for edge in self._edges if {edge.producer, edge.consumer} & self._nodes],
        )
        self._receivers: dict[str, Receiver] = {}
        self._senders: dict[str, Sender | AnswerSender] = {}
        self._local: dict[str, tuple[LocalInlet, LocalOutlet]] = {}
        """Edges that begin or end here."""
        self._weights: list[Any] = []
        self._hubs: dict[str, Any] = {}
        keys = RunKeys.from_plain(settings.keys)
        self._to_receive = SocketNetwork(keys=keys.receivers if keys else None)
        self._to_send = SocketNetwork(keys=keys.senders if keys else None)

    def open_inlets(self, host: NodeLoops) -> dict[str, str]:
        """Bind the edges that end here; addresses of those that come from other processes, by
        edge.
        """
        addresses = {}
        if self._settings.sockets:
            keep_freed_memory()
        for edge in host.incoming():
            if edge.producer in self._nodes:
                inlet = LocalInlet(
                    edge=edge.name,
                    schema=schema(edge.columns),
                    sender=f"{edge.producer}-{self._settings.replica}",
                    capacity_rows=self._capacity(edge),
                    capacity_bytes=CAPACITY_BYTES,
                    counts=self._counts.edges[edge.name],
                )
                self._local[edge.name] = inlet, LocalOutlet(inlet, most_rows=edge.most_rows)
                continue
            receiver = self._receivers[edge.name] = self._listening(
                edge,
                functools.partial(
                    Receiver,
                    edge=edge.name,
                    schema=schema(edge.columns),
                    life=self._settings.life,
                    capacity_rows=self._capacity(edge),
                    capacity_bytes=CAPACITY_BYTES,
                    max_message_bytes=self._plan.message_bytes,
                    network=self._to_receive,
                    senders=self._settings.senders.get(
                        edge.name, self._plan.placements[edge.producer].replicas
                    ),
                    counts=self._counts.edges[edge.name],
                ),
            )
            addresses[edge.name] = reachable(receiver.address)
        return addresses

    def grow(self, edges: Iterable[Edge]) -> None:
        """Allow more rows under way from now on, as these edges say; never less."""
        for edge in edges:
            if edge.name in self.inlets:
                self.inlets[edge.name].grow(self._capacity(edge))
            if edge.name in self.outlets:
                self.outlets[edge.name].grow(edge.most_rows)

    @property
    def inlets(self) -> Mapping[str, Receiver | LocalInlet]:
        """By edge that ends here."""
        return {**self._receivers, **{edge: inlet for edge, (inlet, _) in self._local.items()}}

    @property
    def outlets(self) -> Mapping[str, Sender | AnswerSender | LocalOutlet]:
        """By edge that begins here."""
        return {**self._senders, **{edge: outlet for edge, (_, outlet) in self._local.items()}}

    def open_outlets(
        self, host: NodeLoops, addresses: Mapping[str, list[str]]
    ) -> Mapping[str, Any]:
        """Connect the edges that begin here."""
        for edge in host.outgoing():
            if edge.consumer not in self._nodes:
                sending = functools.partial(
                    Sender,
                    edge=edge.name,
                    sender_id=f"{edge.producer}-{self._settings.replica}",
                    life=self._settings.life,
                    schema=schema(edge.columns),
                    network=self._to_send,
                    most_rows=edge.most_rows,
                    slack_rows=edge.slack_rows,
                    peer_timeout_s=self._settings.run.limits.return_s,
                    clock=self._clock,
                    counts=self._counts.edges[edge.name],
                )
                self._senders[edge.name] = self._sending(edge, addresses[edge.name], sending, host)
        return self.outlets

    @property
    def lines(self) -> Mapping[str, WeightLine]:
        """The weight lines of trainers here, by name."""
        return self._lines.own if self._settings.sockets else {}

    def read_from(self, lines: Mapping[str, WeightLine]) -> None:
        """Learn where the weight lines are that operators here read."""
        self._lines.read_from(lines)

    def move(self, receivers: Mapping[str, str], before: Mapping[str, Sequence[str]]) -> None:
        """By edge that begins here, a receiver was started again, and listens elsewhere now than
        ever before.

        A scheduler that has taken over may have told of the new place alone, as of one that joins:
        then the old place is forgotten, and what it has not acknowledged goes to the others.
        """
        for edge, address in receivers.items():
            outlet = self._senders[edge]
            for old in set(before[edge]) & set(outlet.receivers):
                if address in outlet.receivers and isinstance(outlet, Sender):
                    outlet.forget_receiver(old)
                else:
                    outlet.move_receiver(old, address)

    def expect(self, senders: Mapping[str, int]) -> None:
        """By edge that ends here, how many senders it has had in all."""
        for edge, count in senders.items():
            self._receivers[edge].expect(count)

    def over(self, senders: Mapping[str, int]) -> None:
        """By edge that ends here, a replica whose stream the attempt before this one had to its
        end.
        """
        for edge in self._edges:
            if edge.name in senders:
                self._receivers[edge.name].over(f"{edge.producer}-{senders[edge.name]}")

    def add(self, receivers: Mapping[str, str]) -> None:
        """Send to another receiver too, by edge; one that is known is known."""
        for edge, address in receivers.items():
            if address not in self._senders[edge].receivers:
                self._senders[edge].add_receiver(address)

    def retire(self, receivers: Mapping[str, str]) -> None:
        """Send nothing new to a receiver, by edge; it hears that its stream has ended."""
        for edge, address in receivers.items():
            outlet = self._senders[edge]
            if address in outlet.receivers:
                assert isinstance(outlet, Sender), "those who ask do not leave while a run goes on"
                outlet.retire_receiver(address)

    def gone(self, receivers: Mapping[str, str]) -> bool:
        """Whether such receivers have acknowledged all, and know the end."""
        return not any(
            address in self._senders[edge].receivers for edge, address in receivers.items()
        )

    @property
    def drained(self) -> bool:
        """Whether all that was sent is acknowledged and, once finished, every receiver knows the
        end.
        """
        return all(outlet.drained for outlet in self.outlets.values())

    def writer_of(self, trainer: str, refresh: Refresh | None = None) -> OpensWriter:
        """Opens the trainer's end of one of its weight planes; of several ranks, that of the
        first.
        """
        ranks, settings = self._plan.placements[trainer].ranks, self._settings
        encoding = self._encoding(trainer, refresh).to_plain()
        sites = [
            replace(site, encoding=encoding) for site in self._lines.sites_of(trainer, refresh)
        ]

        def opened(
            tensors: Mapping[str, Any], largest: Callable[[Any], object] | None
        ) -> WeightsOut:
            assert ranks == 1 or largest is not None, "ranks agree on numbers"
            end = open_writer(
                sites,
                0,
                ranks,
                settings.device,
                tensors,
                largest=largest,
                limits=settings.run.limits,
                attempt=settings.life.attempt,
                hubs=self._hubs,
                listeners=self._lines.listeners,
            )
            self._weights.append(end)
            return end

        return OpensWriter(opened, tuple(sites) if ranks > 1 else ())

    def reader_of(self, trainer: str, reader: str) -> OpensWeights:
        """Opens a reader's end; of several ranks, that of the first."""
        site, settings = self._lines.site_of(trainer, reader), self._settings

        def opened(tensors: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]) -> WeightsIn:
            end: WeightsIn = open_reader(
                site,
                0,
                settings.device,
                tensors,
                slices,
                limits=settings.run.limits,
                attempt=settings.life.attempt,
                hubs=self._hubs,
            )
            self._weights.append(end)
            return end

        return OpensWeights(opened, None if site.executor == "local" else site)

    def poll(self) -> None:
        """Answer on the weight planes, whatever the operators are doing."""
        for end in self._weights:
            end.poll()

    def sockets(self) -> list[Any]:
        """Sockets that may become readable."""
        ends: list[Receiver | Sender | AnswerSender] = [
            *self._receivers.values(),
            *self._senders.values(),
        ]
        weights = [end.socket for end in self._weights if end.socket is not None]
        return [socket for end in ends for socket in end.sockets] + weights

    def depths(self) -> dict[str, tuple[int, int]]:
        """Rows received and not acknowledged, and the capacity, of the edges that end here."""
        inlets = self.inlets
        return {
            edge.name: (inlets[edge.name].depth[0], edge.most_rows or edge.capacity_rows)
            for edge in self._edges
            if edge.name in inlets
        }

    @property
    def crossed(self) -> CrossedByFile:
        """What has crossed the edges that begin or end here."""
        return self._counts.read()

    def close(self) -> None:
        """Close everything; what was sent but not acknowledged is lost with this process."""
        for end in self._weights:
            with contextlib.suppress(OSError):
                leave(end)
        self._lines.close()
        data: list[Any] = [*self._senders.values(), *self._receivers.values()]
        for edge in data:
            with contextlib.suppress(OSError):
                edge.close()

    def _sending(
        self, edge: Edge, addresses: list[str], sending: Callable[..., Sender], host: NodeLoops
    ) -> Sender | AnswerSender:
        """Rows go to any of the receivers, answers to the one that asked."""
        if edge.plane == "data" or edge.source != edge.consumer:
            return sending(receivers=addresses)

        def askers(numbers: Sequence[int]) -> list[set[int]]:
            acknowledgements = host.loops[edge.producer].acknowledgements
            senders = (acknowledgements.askers(edge.source, number) for number in numbers)
            return [set(map(replica_of, of_number)) for of_number in senders]

        answers = AnswerSender(
            [sending(receivers=[address]) for address in addresses], GROUP_ID, askers
        )
        host.repeated.setdefault(edge.producer, {})[edge.source] = lambda number, sender: (
            answers.send_again(number, replica_of(sender))
        )
        return answers

    def _capacity(self, edge: Edge) -> int:
        """Of a receiver, which its senders share: so that each of many replicas may send all that
        is in flight.
        """
        if edge.plane == "turns":
            return edge.capacity_rows * self._plan.placements[edge.producer].replicas
        producer = self._graph.operators[edge.producer]
        alone = producer.light or not self._graph.operators[edge.consumer].trains
        return edge.capacity_rows * (1 if alone else _SENDERS)

    def _listening(self, edge: Edge, receiving: Callable[..., Receiver]) -> Receiver:
        """Where the edge ends: there again after a restart, if possible. Short, for the path of an
        ipc socket may have 107 bytes.
        """
        if self._settings.listen:
            before = self._settings.at.get(edge.name, "")
            return again_at(
                self._settings.listen, before, lambda address: receiving(address=address)
            )
        number = [e.name for e in self._edges].index(edge.name)
        return receiving(
            address=f"ipc://{self._settings.sockets}/edge-{number}.{self._settings.replica}"
        )

    def _encoding(self, trainer: str, refresh: Refresh | None) -> "Encoding":
        """What travels in place of the trainer's tensors."""
        from transport.weights.encoding import Encoding

        model = self._graph.operators[trainer].uses
        assert model is not None, "a trainer has a model"
        quantized = None if refresh else quantized_format(self._graph, trainer)
        names = readers_of(self._graph, trainer)[0].quantized_tensors() if quantized else None
        return Encoding(dtype=model.dtype, quantized=quantized, names=names)
