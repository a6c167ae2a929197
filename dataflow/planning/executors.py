"""How the weights get from a trainer's ranks to those of each reader: a pure function of where they
sit.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.errors import GraphError, nearest
from dataflow.planning.hosts import Devices
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Placement, amount
from dataflow.structure import Feedback, Structure
from dataflow.weight_ends import EXECUTORS, Refresh

COLLECTIVE = ("gloo", "nccl")
"""Executors that reach other machines."""
WITHIN = ("cuda_ipc", "shared_memory")
"""Executors that stay on one machine."""
ON_GPU = ("cuda_ipc", "nccl")
"""Executors that move a GPU's memory."""
SCAN_BYTES_PER_S = 0.8e9
"""The rate, in bytes per second, at which both ends find and apply deltas
(transport/weights/sharded/delta.py); a faster link carries all of a version sooner."""


@dataclass(frozen=True, kw_only=True)
class RankSeat:
    """Where one rank sits."""

    process: str
    """Name of the process."""
    device: str = "cpu"
    """cpu, or cuda:N of its machine."""
    machine: str = ""

    @property
    def gpu(self) -> bool:
        """Whether its tensors lie in an accelerator."""
        return self.device != "cpu"

    def __str__(self) -> str:
        return f"{self.device} of host '{self.machine}'" if self.machine else self.device


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPath:
    """How weights travel from every rank of a trainer to every rank of one replica of a reader."""

    trainer: str
    reader: str
    replica: int
    executor: str
    trainer_ranks: int = 1
    ranks: int = 1
    """Processes of the replica."""
    refresh: Refresh | None = None
    """The versions that take this way; None: all that the reader takes."""
    nbytes: int | None = None
    """Most bytes that each of its ranks takes of a version, from all trainer ranks together; None:
    unknown."""
    link_bytes_per_s: float | None = None
    """The rate of a link so slow that only changes are sent, where they are fewer; None: a faster
    or unknown link."""
    zero_copy: bool = False
    """Whether versions are sent from the trainer's weights themselves, which then change no earlier
    than readers have them."""


def choose(sources: Sequence[RankSeat], destinations: Sequence[RankSeat]) -> str:
    """The executor for all ranks of a trainer and all of a reader, by where they sit: one serves
    every pair.
    """
    return chosen(RankSeats(sources), RankSeats(destinations))


class RankSeats:
    """The ranks of one end, by what decides: of hundreds there are a hundred thousand pairs."""

    def __init__(self, seats: Sequence[RankSeat]) -> None:
        self.machines = {seat.machine for seat in seats}
        self.processes = {(seat.machine, seat.process) for seat in seats}
        self.devices = {(seat.machine, seat.device) for seat in seats}
        self.on_gpus = all(seat.gpu for seat in seats)


def chosen(sources: RankSeats, destinations: RankSeats) -> str:
    """As `choose`, of a trainer whose ranks are looked up once for all of its readers: the first
    for which no pair has an `obstacle`.
    """
    apart = sources.processes.isdisjoint(destinations.processes)
    within = apart and len(sources.machines | destinations.machines) == 1
    on_gpus = apart and sources.on_gpus and destinations.on_gpus
    serves = {
        "local": not apart and len(sources.processes | destinations.processes) == 1,
        "cuda_ipc": within and on_gpus,
        "shared_memory": within,
        "nccl": on_gpus and sources.devices.isdisjoint(destinations.devices),
        "gloo": apart,
    }
    return next(executor for executor in EXECUTORS if serves[executor])


def obstacle(executor: str, source: RankSeat, destination: RankSeat) -> str | None:
    """What two ranks lack for an executor; None when it can serve them."""
    together = (source.machine, source.process) == (destination.machine, destination.process)
    if executor == "local":
        return None if together else "both ends in one process"
    if together:
        return "two processes"
    if executor in WITHIN and source.machine != destination.machine:
        return "both ends on one machine"
    if executor in ("cuda_ipc", "nccl") and not (source.gpu and destination.gpu):
        return "both ends on GPUs"
    if executor == "nccl" and (source.machine, source.device) == (
        destination.machine,
        destination.device,
    ):
        return "a GPU of its own for each end"
    return None


def executor_between(trainer: Placement, reader: Placement, replica: int, *, apart: bool) -> str:
    """What is chosen for a replica that is on the trainer's host, or apart from it, wherever they
    were planned.

    The weights of a trainer whose ranks are spread go over the network to all: one executor serves
    every pair.
    """
    apart = apart or bool(trainer.rank_hosts)
    sources = [_seat(trainer, 0, rank, machine="trainer's") for rank in range(trainer.ranks)]
    machine = "another" if apart else "trainer's"
    return _received(
        choose(
            sources, [_seat(reader, replica, rank, machine=machine) for rank in range(reader.ranks)]
        ),
        reader,
    )


def _received(executor: str, reader: Placement) -> str:
    """The executor for a reader that may receive in main memory, where no other process writes."""
    return "nccl" if reader.arrives_in_host and executor == "cuda_ipc" else executor


def is_zero_copy(
    trainer: Placement, executor: str, *, link_bytes_per_s: float | None, copies: bool
) -> bool:
    """Whether a trainer's ranks send versions by an executor from its weights themselves, and not
    from copies of them.

    One rank that writes the memory in which its readers compute has copied them there. Deltas are
    of the version before. Where weights lie in another memory than they are sent from, they are
    copied once for all readers.
    """
    is_whole = trainer.ranks == 1 and executor not in COLLECTIVE
    is_there = bool(trainer.gpus) == (executor in ON_GPU)
    return not (is_whole or copies or link_bytes_per_s is not None) and is_there


def copies_of(
    graph: Structure, trainer: str, turns: Sequence[Sequence[str]], link_bytes_per_s: float | None
) -> bool:
    """Whether a trainer sends versions from copies of its weights wherever it could send these.
    GraphError where it cannot do without, and was told to.

    turns: nodes that take turns on devices. link_bytes_per_s: of slow links to some reader; None:
    there are none.
    """
    wish = graph.operators[trainer].traits.training.copies_weights
    mates = next((group for group in turns if trainer in group), ())
    why = ""
    if mates:
        readers = [name for name in mates if name != trainer]
        why = (
            f"takes turns on its devices with {readers}, and puts its weights away before they take"
            " them"
        )
    elif link_bytes_per_s is not None:
        why = (
            f"sends what changed over links of {link_bytes_per_s / 1e6:g} MB/s, which it tells by"
            " the version before"
        )
    if why and wish is False:
        raise GraphError(
            f"'{trainer}' has copy_weights=False, but it {why}; leave copy_weights out"
        )
    return bool(wish or mates)


def weight_paths(
    graph: Structure,
    placements: Mapping[str, Placement],
    sizes: Mapping[str, ModelSize],
    *,
    forced: str | None = None,
    one_process: bool = False,
    devices: Devices,
    turns: Sequence[Sequence[str]] = (),
) -> tuple[WeightPath, ...]:
    """Every replica that reads, of every feedback edge; `forced` names an executor to use instead
    of the best.

    The rate of the devices' link counts between machines, and for a forced executor as if it went
    between them. turns: nodes that take turns on devices.

    Raises GraphError when the forced one is unknown, or cannot serve some pair of ranks.
    """
    if forced is not None and forced not in EXECUTORS:
        raise GraphError(
            f"there is no weight executor '{forced}'; the run knows"
            f" {list(EXECUTORS)}{nearest(forced, EXECUTORS)}; name one of these, or leave weights="
            " out to have it chosen"
        )
    if forced in WITHIN and devices.hosts:
        raise GraphError(
            f"weights cannot be forced to go by {forced} in a run over hosts, whose workers may"
            f" move to another one when theirs is lost; found {len(devices.hosts)} hosts; leave"
            " weights= out, which takes what is fastest within a host and between two, or name one"
            f" of {list(COLLECTIVE)}"
        )
    paths: list[WeightPath] = []
    for feedback in graph.feedbacks:
        trainer, reader = (
            placements[feedback.weights.trainer.name],
            placements[feedback.reader.name],
        )
        is_apart = graph.operators[reader.node].traits.split.apart
        if one_process and (reader.ranks > 1 or is_apart):
            how = "in processes of its engine" if is_apart else f"on {reader.ranks} ranks"
            raise GraphError(
                f"'{reader.node}' is to take trained weights {how}, but a run in one process has"
                " one of everything; use one rank of this project's own engine, or run in processes"
            )
        model = graph.operators[trainer.node].uses
        size = sizes.get(model.source) if model else None
        nbytes = None
        if size and model:
            nbytes = size.sent_bytes(model.dtype, model.lora, reader.ranks)
        sources = [
            _seat(trainer, 0, rank, one_process=one_process) for rank in range(trainer.ranks)
        ]
        looked_up = RankSeats(sources)
        _check_alike(graph, feedback, sizes)
        for replica in range(reader.replicas):
            destinations = [
                _seat(reader, replica, rank, one_process=one_process)
                for rank in range(reader.ranks)
            ]
            executor = _received(chosen(looked_up, RankSeats(destinations)), reader)
            if forced is not None:
                _check_forced(forced, executor, trainer.node, sources, reader.node, destinations)
                executor = forced
            is_far = len(looked_up.machines | {seat.machine for seat in destinations}) > 1
            is_link = executor in COLLECTIVE and (forced or is_far)
            link = slow(devices.link_bytes_per_s) if is_link else None
            copies = copies_of(graph, trainer.node, turns, link)
            paths.append(
                WeightPath(
                    trainer=trainer.node,
                    trainer_ranks=trainer.ranks,
                    reader=reader.node,
                    replica=replica,
                    ranks=reader.ranks,
                    executor=executor,
                    refresh=feedback.refresh,
                    nbytes=nbytes,
                    link_bytes_per_s=link,
                    zero_copy=is_zero_copy(trainer, executor, link_bytes_per_s=link, copies=copies),
                )
            )
    return tuple(paths)


def explain(paths: tuple[WeightPath, ...]) -> list[str]:
    """A line per feedback edge: which executors, how many ranks on each side, how much each reader
    takes.
    """
    lines = []
    for trainer, reader in dict.fromkeys((path.trainer, path.reader) for path in paths):
        own = [path for path in paths if (path.trainer, path.reader) == (trainer, reader)]
        senders, readers, ranks = own[0].trainer_ranks, len(own), own[0].ranks
        text = (
            f"{senders} trainer rank{'s' if senders > 1 else ''} -> {readers}"
            f" reader{'s' if readers > 1 else ''}"
        )
        text += f" of {ranks} ranks" if ranks > 1 else ""
        text += f", up to {amount(own[0].nbytes)} each" if own[0].nbytes is not None else ""
        text += f", {own[0].refresh}" if own[0].refresh is not None else ""
        text += deltas(own) or from_where(own)
        lines.append(f"weights {trainer} -> {reader}: {summary(own)} ({text})")
    return lines


def deltas(paths: list[WeightPath]) -> str:
    """Text about some pairs: whether only changes travel; empty where no link is in between."""
    slow = [path.link_bytes_per_s for path in paths if path.link_bytes_per_s is not None]
    return (
        f", as deltas where these are shorter, over links of {min(slow) / 1e6:g} MB/s"
        if slow
        else ""
    )


def from_where(paths: list[WeightPath]) -> str:
    """Text about some pairs: whether versions are sent from the weights or from copies; empty where
    neither are.
    """
    if any(path.zero_copy for path in paths):
        return ", from the weights themselves: an update waits for who is taking them"
    copied = any(
        path.executor in COLLECTIVE or (path.trainer_ranks > 1 and path.executor in WITHIN)
        for path in paths
    )
    return ", from copies of the weights" if copied else ""


def slow(link_bytes_per_s: float | None) -> float | None:
    """The rate of a link on which finding what changed takes less time than sending what did
    not.
    """
    return (
        link_bytes_per_s
        if link_bytes_per_s is not None and link_bytes_per_s < SCAN_BYTES_PER_S
        else None
    )


def summary(paths: list[WeightPath]) -> str:
    """The executors of some replicas: one name, or several with the number of replicas of each."""
    counts = collections.Counter(path.executor for path in paths)
    return (
        next(iter(counts))
        if len(counts) == 1
        else ", ".join(f"{name} x{n}" for name, n in counts.items())
    )


def _seat(
    placement: Placement,
    replica: int,
    rank: int,
    *,
    one_process: bool = False,
    machine: str | None = None,
) -> RankSeat:
    """machine: where it is; None: where it is planned to be."""
    return RankSeat(
        process="" if one_process else f"{placement.worker}-{replica}.{rank}",
        device=placement.device(replica, rank),
        machine=placement.host(replica, rank) if machine is None else machine,
    )


def _check_alike(graph: Structure, feedback: Feedback, sizes: Mapping[str, ModelSize]) -> None:
    """Refuse to refresh a model of another architecture, as far as the folders of both tell."""
    models = feedback.weights.trainer.uses, feedback.reader.uses
    trained, read = (sizes.get(model.source) if model else None for model in models)
    if trained is not None and read is not None and trained.architecture != read.architecture:
        raise GraphError(
            f"'{feedback.reader.name}' cannot be refreshed with the weights of"
            f" '{feedback.weights.trainer.name}': it reads a model of {read.told}, and trained is"
            f" one of {trained.told}; give it a model of the same shapes"
        )


def _check_forced(
    forced: str,
    chosen: str,
    trainer: str,
    sources: Sequence[RankSeat],
    reader: str,
    destinations: Sequence[RankSeat],
) -> None:
    """Refuse an executor that cannot serve every pair of ranks."""
    for source, destination in itertools.product(sources, destinations):
        lacks = obstacle(forced, source, destination)
        if lacks is not None:
            of_one = " of one process" if source.process == destination.process else ""
            raise GraphError(
                f"weights cannot go from '{trainer}' to '{reader}' by {forced}, which needs"
                f" {lacks}; they sit on {source} and"
                f" {destination}{of_one}; leave weights= out to use {chosen}"
            )
