"""Builds the operators of one process and wires them: shared by a worker and by the inline
runner.
"""

import collections
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dataflow.errors import boundary
from dataflow.folder.copies.store import Copies
from dataflow.folder.finished import Finished, take_out_abandoned
from dataflow.folder.ledger import HOME, BaseLedger, Ledger
from dataflow.folder.ledger_service.client import LedgerClient
from dataflow.folder.live_changes import KnobChange, Swap, known_knobs, record_knobs, record_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import Whereabouts
from dataflow.folder.trace import Trace
from dataflow.graph import Graph
from dataflow.node import Generate
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import Edge, edges, graph_around, marks
from dataflow.runtime import Context, DeviceShare, RunSettings, Runtime, WeightEnds
from dataflow.scorer import Scorer
from dataflow.structure import readers_of, refreshes_of, sinks_of
from dataflow.system.log import node_log
from dataflow.system.messages import Life
from dataflow.system.rank_places import RankPlaces
from dataflow.system.security import RunKeys
from dataflow.weight_ends import Refresh, WeightsIn, WeightsOut
from dataflow.worker.changed_knobs import ChangedGraph, counts_itself
from dataflow.worker.loop import Inlet, NodeLoop, Outlet
from dataflow.worker.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process of a run is told: plain values, so that they travel as msgpack."""

    folder: str
    """The run folder; empty: keep no ledger, metrics or rollouts."""
    run: RunSettings = field(default_factory=RunSettings)
    copies: Copies | None = None
    """Where copies of checkpoints go; None: nowhere."""
    worker: str = "inline"
    replica: int = 0
    life: Life = Life()
    """Of this worker."""
    disk: str = ""
    """The host whose own the run folder is; empty: that of the scheduler."""
    ledger: str = ""
    """Address of the process that has the ledger open for all; empty: the file is opened here."""
    control: str = ""
    """The scheduler's address."""
    sockets: str = ""
    """Folder (mode 0700) of the run's ipc sockets."""
    host: str = ""
    """Name of its host; empty: the scheduler's own machine, in a run that has no other."""
    device: str = "cpu"
    """Torch's name of the first device of the process."""
    rank_hosts: tuple[str, ...] = ()
    """Hosts of the ranks of a worker whose ranks are spread over several; empty: all are here."""
    rank_devices: tuple[str, ...] = ()
    """Torch's name of each of these ranks' devices, on its host."""
    ranks_at: str = ""
    """For a process in which such ranks begin that are not on the host of the first: where that one
    listens."""
    senders: Mapping[str, int] = field(default_factory=dict)
    """By edge that ends here, how many senders to expect; where it says nothing, as many as the
    plan has."""
    listen: str = ""
    """Address of this machine at which edges and the scheduler listen; empty: ipc sockets in
    `sockets`."""
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Keys of the run, where it listens at an address (as `RunKeys.to_plain`); they are written
    nowhere."""
    at: Mapping[str, str] = field(default_factory=dict)
    """By edge that ends here, and by weight line and executor (`trainer.gloo`), where the attempt
    before listened."""
    swaps: tuple[Swap, ...] = ()
    """Operators of this worker that took the place of those in the graph, one of a node."""
    changes: tuple[KnobChange, ...] = ()
    """Knob changes made while the run went on, in order."""
    tries: Swap | None = None
    """The swap that the process only tries."""


WriterOf = Callable[[str, Refresh | None], Callable[[Mapping[str, Any]], WeightsOut]]
ReaderOf = Callable[[str, str], Callable[[Mapping[str, Any]], WeightsIn]]


class NodeLoops:
    """The node loops of one process.

    consumes: inlets and outlets by edge, made by its owner
    produces: node loops, in the graph's order
    waits for: nothing by itself; its owner calls `turn`
    unblocked by: -
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        nodes: Iterable[str],
        settings: Settings,
        *,
        writer_of: WriterOf,
        reader_of: ReaderOf,
        device: Callable[[str], str] = lambda node: "cpu",
        places: RankPlaces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """writer_of(trainer, refresh) and reader_of(trainer, reader) open the weight plane's ends
        for given tensors. places: of the ranks, where these are spread. clock: of the operators,
        which stands still while the process is stopped.
        """
        self.plan, self.settings = plan, settings
        self.nodes = [name for name in graph.operators if name in set(nodes)]
        self.folder = RunFolder.open(settings.folder) if settings.folder else None
        self.ledger = open_ledger(self.folder, settings) if self.folder else None
        if self.folder is not None and self.ledger is not None:
            self.folder = dataclasses.replace(self.folder, placing=self.ledger.placing)
        self._changed = ChangedGraph(
            declared=graph,
            plan=plan,
            changes=known_knobs(self.ledger, settings.changes),
            swaps=settings.swaps,
        )
        self.graph = self._changed.now()
        """The graph with the knobs in force."""
        self._counts = 0
        self.runtimes: dict[str, Runtime] = {}
        self.loops: dict[str, NodeLoop] = {}
        self.at = ""
        """The node that is being built, or whose turn it is; empty between turns."""
        self.at_since = time.monotonic()
        self.repeated: dict[str, dict[str, Callable[[int, str], None]]] = {}
        """By node, its `Acknowledgements.repeated`."""
        self._taking_turns: dict[str, Turns] = {}
        self._private: tempfile.TemporaryDirectory[str] | None = None
        """The folder for the locks of a run in one process, which has no folder of sockets."""
        self._trace = Trace(f"{settings.worker}-{settings.replica}")
        self._writer_of, self._reader_of, self._device, self._clock = (
            writer_of,
            reader_of,
            device,
            clock,
        )
        self._places = places

    def incoming(self) -> list[Edge]:
        """Edges that end here."""
        return [edge for edge in edges(self.graph) if edge.consumer in self.nodes]

    def outgoing(self) -> list[Edge]:
        """Edges that begin here."""
        return [edge for edge in edges(self.graph) if edge.producer in self.nodes]

    def build(self) -> None:
        """Make the heavy objects: `Trainer.build` makes a `TrainerRuntime`, and so on."""
        for name in self.nodes:
            self._enter(name)
            if (turns := self._turns(name)) is not None:
                self._taking_turns[name] = turns
            in_turn = (
                contextlib.nullcontext()
                if turns is None
                else turns.building(self.settings.run.limits.start_s)
            )
            with boundary(name, "starting"), in_turn:
                operator = self._changed.knobs(self.graph, name).operator
                self.runtimes[name] = operator.build(self._context(name))
            if turns is not None:
                turns.built(self.runtimes[name])
        self._enter("")

    def wire(self, inlets: Mapping[str, Inlet], outlets: Mapping[str, Outlet]) -> None:
        """Put a loop around every runtime; both mappings go by edge name."""
        for name in self.nodes:
            sources: dict[str, list[Outlet]] = collections.defaultdict(list)
            most_rows: dict[str, int] = {}
            for edge in self.outgoing():
                if edge.producer == name:
                    sources[edge.source].append(outlets[edge.name])
                    most_rows[edge.source] = min(
                        edge.batch_rows, most_rows.get(edge.source, edge.batch_rows)
                    )
            came = [edge for edge in self.incoming() if edge.consumer == name]
            asks = {edge.name for edge in came if edge.plane == "turns" and edge.source == name}
            ends = [(e.source, e.producer, inlets[e.name]) for e in came if e.name not in asks]
            answers = [(e.source, e.producer, inlets[e.name]) for e in came if e.name in asks]
            self.loops[name] = NodeLoop(
                name,
                self.runtimes[name],
                ends,
                dict(sources),
                most_rows=most_rows,
                most_bytes=self.plan.message_bytes,
                marks=self._marks(name, sources),
                finished=self._finished(name, sources),
                settled=self._settled(name, {source for source, _, _ in ends}),
                answers=answers,
                repeated=self.repeated.get(name),
                span=self._trace.add,
                turns=self._taking_turns.get(name),
            )

    def record_swaps(self) -> None:
        """Record which operators were swapped in here, before any of them does anything."""
        if self.ledger is not None and any(
            isinstance(self.graph.operators[node], Scorer) for node in self.nodes
        ):
            record_swaps(self.ledger, self.nodes, self.settings.swaps)

    def record_changes(self) -> None:
        """Record from which step on changed knobs count here, before anything uses them."""
        fresh = [
            dataclasses.replace(change, step=change.asked + 1)
            for change in self._changed.in_place
            if not change.step and change.node in self.nodes and not counts_itself(change)
        ]
        record_knobs(self.ledger, fresh)

    def change(self, changes: Sequence[KnobChange]) -> bool:
        """Knobs were changed: let each node go by them from its next boundary on. False: all are
        known.
        """
        if max((change.number for change in changes), default=0) <= self._changed.last:
            return False
        by_number = {change.number: change for change in self._changed.changes}
        fresh = [by_number.get(change.number, change) for change in changes]
        self._changed = dataclasses.replace(self._changed, changes=tuple(fresh))
        self.graph = self._changed.now()
        self.record_changes()
        for name, runtime in self.runtimes.items():
            with boundary(name, "changing its knobs"):
                runtime.change(self._changed.knobs(self.graph, name))
        return True

    @property
    def changed(self) -> int:
        """Number of the last change that counts here."""
        if not any(runtime.is_behind for runtime in self.runtimes.values()):
            self._counts = self._changed.last
        return self._counts

    def tell(self, node: str, message: Mapping[str, Any]) -> None:
        """Pass a command on."""
        if "pause" in message:
            self.loops[node].paused = bool(message["pause"])
        else:
            with boundary(node, f"hearing {dict(message)}"):
                self.runtimes[node].tell(message)

    def turn(self) -> bool:
        """One round of every loop, in the graph's order. True when anything moved."""
        moved = False
        for name, loop in self.loops.items():
            self._enter(name)
            moved |= loop.turn()
        self._enter("")
        return moved

    def keep_trace(self) -> None:
        """Write what the nodes did of late, when it is time."""
        if self.folder is not None and self._trace.recent.is_due:
            for loop in self.loops.values():
                loop.spans.rest(time.monotonic())
            self._trace.recent.write(self.folder)

    def report(self) -> dict[str, Any]:
        """What each node reports of itself and its time: plain values for the heartbeat."""
        return {
            node: {
                "status": self.runtimes[node].status(),
                **loop.report(),
                "pending": self.runtimes[node].pending(),
            }
            for node, loop in self.loops.items()
        }

    def close(self) -> None:
        """Close the runtimes and the ledger, each also where one before it fails."""
        with contextlib.ExitStack() as closing:
            if self.folder is not None:
                closing.callback(self._trace.write, self.folder)
            if self.ledger is not None:
                closing.callback(self.ledger.close)
            for loop in self.loops.values():
                closing.callback(loop.close)
            if self._private is not None:
                closing.callback(self._private.cleanup)
            for turns in self._taking_turns.values():
                closing.callback(turns.close)
            for runtime in self.runtimes.values():
                closing.callback(runtime.close)

    def _turns(self, name: str) -> Turns | None:
        """The process's part in the turns on devices that it shares."""
        if not (group := self.plan.turns_of(name)):
            return None
        if not (folder := self.settings.sockets):
            self._private = self._private or tempfile.TemporaryDirectory(prefix="dataflow-turns-")
            folder = self._private.name
        return Turns(Path(folder) / f"turns-{self.plan.turns.index(group)}", group, name)

    def _aside(self, name: str) -> Path | None:
        place = Path(tempfile.gettempdir()) if self.folder is None else self.folder.path
        return place if self.plan.turns_of(name) else None

    def _finished(self, name: str, sources: Iterable[str]) -> dict[str, Finished]:
        """The finished groups that a generator keeps, of the sources that are trained."""
        if (
            self.folder is None
            or self.ledger is None
            or not isinstance(self.graph.operators[name], Generate)
        ):
            return {}
        return {
            source: Finished(
                self.folder.finished(name),
                source,
                replica=self.settings.replica,
                attempt=self.settings.life.attempt,
                waited_for=partial(in_flight, self.ledger, source, self.folder),
            )
            for source in sources
            if any(sink.trains for sink in sinks_of(self.graph, source))
        }

    def _settled(
        self, name: str, sources: Iterable[str]
    ) -> Callable[[str, list[int]], Collection[int]] | None:
        """For a node that was started again: what comes to it once more may have been trained
        meanwhile.
        """
        if (
            self.ledger is None
            or not self.settings.life.attempt
            or self.graph.operators[name].kind == "sink"
        ):
            return None
        return settled_since(self.ledger, sources)

    def _enter(self, node: str) -> None:
        """Note whose slice of work begins; "" for nobody's."""
        self.at, self.at_since = node, time.monotonic()

    def _context(self, name: str) -> Context:
        settings, placement = self.settings, self.plan.placements[name]
        knobs = self._changed.knobs(self.graph, name)
        reads = [f for f in self.graph.feedbacks if f.reader.name == name]
        around = graph_around(self.graph, self.plan, name)
        return Context(
            node=name,
            replica=settings.replica,
            life=settings.life,
            run=settings.run,
            graph=dataclasses.replace(around, bounds=knobs.bounds),
            devices=DeviceShare(
                device=self._device(name),
                threads=placement.threads_of(settings.replica),
                ranks=placement.ranks,
                places=self._places,
                chosen=placement.chosen,
                aside=self._aside(name),
                turn_files=self._taking_turns[name].files if name in self._taking_turns else (),
            ),
            weights=WeightEnds(
                writer=self._writer_of(name, None) if readers_of(self.graph, name) else None,
                refreshers={
                    refresh: self._writer_of(name, refresh)
                    for refresh in refreshes_of(self.graph, name)
                },
                reader=self._reader_of(reads[0].weights.trainer.name, name) if reads else None,
            ),
            changes=knobs.changes,
            folder=self.folder,
            copies=settings.copies,
            ledger=self.ledger,
            clock=self._clock,
            spent=lambda: self.loops[name].spent()["seconds"] if name in self.loops else {},
            log=node_log(name),
            span=partial(self._trace.within, name),
        )

    def _marks(self, name: str, sources: Iterable[str]) -> dict[str, Callable[[list[int]], None]]:
        """By source, what records how far groups are that leave a node."""
        if self.ledger is None:
            return {}
        states = {source: marks(self.graph, name, source) for source in sources}
        return {
            source: partial(self.ledger.advance, source, state=state)
            for source, state in states.items()
            if state
        }


def open_ledger(folder: RunFolder, settings: Settings) -> BaseLedger:
    """The ledger of a run: its file, or the service that has it open. Errors: LedgerError;
    Replaced, where this worker was started again meanwhile; DeadlineError.
    """
    if not settings.ledger:
        return Ledger.open(folder.ledger)
    return LedgerClient(
        folder.ledger,
        settings.ledger,
        worker=f"{settings.worker}-{settings.replica}",
        life=settings.life,
        keys=RunKeys.from_plain(settings.keys),
        patience_s=settings.run.limits.adopt_s,
        seek=partial(_seek_ledger, settings.sockets),
        disk=settings.disk,
        copies=settings.copies,
    )


def _seek_ledger(sockets: str) -> str:
    """Where the ledger's service is now; empty where unknown."""
    whereabouts = Whereabouts.read(Path(sockets)) if sockets else None
    return whereabouts.ledger if whereabouts else ""


def in_flight(ledger: BaseLedger, source: str, folder: RunFolder) -> list[int]:
    """The groups of a source that some sink waits for. In a folder that is this host's own nobody
    else has forgotten what weights drew that a trainer has gone back behind: that is done here,
    before it is looked for.
    """
    if folder.placing.disk != HOME and (least := ledger.least_return()) is not None:
        take_out_abandoned(folder.path / "finished", source, least)
    return [group.group_id for group in ledger.in_flight(source)]


def settled_since(
    ledger: BaseLedger, sources: Iterable[str]
) -> Callable[[str, list[int]], list[int]]:
    """Which of some groups of a source have an outcome with every sink; of those alone that were
    issued before now.
    """
    issued = {source: ledger.next_group_id(source) for source in sources}

    def settled(source: str, groups: list[int]) -> list[int]:
        before = [group for group in groups if group < issued[source]]
        waiting = (
            {group.group_id for group in ledger.in_flight(source, among=before)}
            if before
            else set()
        )
        return [group for group in before if group not in waiting]

    return settled
