"""How the weights get from each trainer rank to each reader rank: a pure function of where the two sit."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.errors import GraphError, nearest
from dataflow.node import Generate
from dataflow.planning.memory_need import amount
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placement import Placement
from dataflow.structure import Feedback, Structure
from dataflow.weight_ends import Refresh

EXECUTORS = ("local", "cuda_ipc", "shared_memory", "nccl", "gloo")
"""The one that is preferred stands first."""
COLLECTIVE = ("gloo", "nccl")
"""Those that reach other machines."""
SCAN_BYTES_PER_S = 0.8e9
"""At which both ends find and apply what changed (transport/weights/deltas); a faster link carries all of it sooner."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank sits."""

    process: str
    """Names the process."""
    device: str = "cpu"
    """cpu, or cuda:N of its machine."""
    machine: str = ""

    @property
    def gpu(self) -> bool:
        """Whether its tensors lie in an accelerator."""
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPath:
    """One pair of ranks that weights travel between."""

    trainer: str
    trainer_rank: int
    reader: str
    replica: int
    rank: int
    """Of the replica's processes."""
    executor: str
    refresh: Refresh | None = None
    """Which versions take this way; None: all that the reader takes."""
    nbytes: int | None = None
    """Most bytes that the reader's rank takes of a version, from all trainer ranks together; None: unknown."""
    link_bytes_per_s: float | None = None
    """Of a link so slow that what changed is sent in place of everything, where that is less; None: of a faster one, or
    unknown."""


def choose(sources: Sequence[Seat], destinations: Sequence[Seat]) -> str:
    """The executor for all ranks of a trainer and all of a reader, by where they sit: one serves every pair."""
    pairs = [(source, destination) for source in sources for destination in destinations]
    return next(each for each in EXECUTORS if all(obstacle(each, *pair) is None for pair in pairs))


def obstacle(executor: str, source: Seat, destination: Seat) -> str | None:
    """What two ranks lack for an executor; None when it can serve them."""
    together = (source.machine, source.process) == (destination.machine, destination.process)
    if executor == "local":
        return None if together else "both ends in one process"
    if together:
        return "two processes"
    if executor in ("shared_memory", "cuda_ipc") and source.machine != destination.machine:
        return "both ends on one machine"
    if executor in ("cuda_ipc", "nccl") and not (source.gpu and destination.gpu):
        return "both ends on GPUs"
    if executor == "nccl" and (source.machine, source.device) == (destination.machine, destination.device):
        return "a GPU of its own for each end"
    return None


def between_hosts(trainer: Placement, reader: Placement) -> str:
    """The executor for a trainer and a reader wherever their hosts are."""
    source, destination = _seat(trainer, 0, 0, False), _seat(reader, 0, 0, False)
    return choose([dataclasses.replace(source, machine="one")], [dataclasses.replace(destination, machine="another")])


def weight_paths(
    graph: Structure,
    placements: Mapping[str, Placement],
    sizes: Mapping[str, ModelSize],
    *,
    forced: str | None = None,
    one_process: bool = False,
    link_bytes_per_s: float | None = None,
) -> tuple[WeightPath, ...]:
    """Every pair of ranks of every feedback edge; `forced` names an executor to use instead of the best.

    link_bytes_per_s: between machines, and of a forced executor as if it went between them; None: unknown.

    Raises GraphError when the forced one is unknown, or cannot serve some pair.
    """
    if forced is not None and forced not in EXECUTORS:
        raise GraphError(
            f"there is no weight executor '{forced}'; the run knows {list(EXECUTORS)}{nearest(forced, EXECUTORS)}; "
            f"name one of these, or leave weights= out to have it chosen"
        )
    found: list[WeightPath] = []
    for feedback in graph.feedbacks:
        trainer, reader = placements[feedback.weights.trainer.name], placements[feedback.reader.name]
        if one_process and reader.ranks > 1:
            raise GraphError(
                f"'{reader.node}' is to take trained weights on {reader.ranks} ranks, but a run in one process has one "
                f"of everything; use tensor_parallel=1, or run in processes"
            )
        model = graph.operators[trainer.node].uses
        size = sizes.get(model.source) if model else None
        nbytes = None
        if size and model:
            has_ends = not isinstance(feedback.reader, Generate)
            nbytes = size.sent_bytes(model.dtype, model.lora, reader.ranks, has_ends=has_ends)
        sources = [_seat(trainer, 0, rank, one_process) for rank in range(trainer.ranks)]
        _check_alike(graph, feedback, sizes)
        for replica in range(reader.replicas):
            destinations = [_seat(reader, replica, rank, one_process) for rank in range(reader.ranks)]
            chosen = choose(sources, destinations)
            for rank, destination in enumerate(destinations):
                for number, source in enumerate(sources):
                    executor = _executor(forced, chosen, trainer.node, source, reader.node, destination)
                    is_link = executor in COLLECTIVE and (forced or source.machine != destination.machine)
                    found.append(
                        WeightPath(
                            trainer=trainer.node, trainer_rank=number, reader=reader.node, replica=replica, rank=rank,
                            executor=executor, refresh=feedback.refresh, nbytes=nbytes,
                            link_bytes_per_s=_slow(link_bytes_per_s) if is_link else None,
                        )
                    )  # fmt: skip
    return tuple(found)


def explain(paths: tuple[WeightPath, ...]) -> list[str]:
    """A line per feedback edge: which executors, how many ranks on each side, how much each reader takes."""
    lines = []
    for trainer, reader in dict.fromkeys((path.trainer, path.reader) for path in paths):
        own = [path for path in paths if (path.trainer, path.reader) == (trainer, reader)]
        senders = len({path.trainer_rank for path in own})
        readers = len({path.replica for path in own})
        ranks = len({path.rank for path in own})
        text = f"{senders} trainer rank{'s' if senders > 1 else ''} -> {readers} reader{'s' if readers > 1 else ''}"
        text += f" of {ranks} ranks" if ranks > 1 else ""
        text += f", up to {amount(own[0].nbytes)} each" if own[0].nbytes is not None else ""
        text += f", {own[0].refresh}" if own[0].refresh is not None else ""
        text += deltas(own)
        lines.append(f"weights {trainer} -> {reader}: {summary(own)} ({text})")
    return lines


def deltas(paths: list[WeightPath]) -> str:
    """Of some pairs: whether what changed travels in place of everything; nothing where no link is in between."""
    slow = [path.link_bytes_per_s for path in paths if path.link_bytes_per_s is not None]
    return f", as deltas where these are shorter, over links of {min(slow) / 1e6:g} MB/s" if slow else ""


def _slow(link_bytes_per_s: float | None) -> float | None:
    """The rate of a link on which finding what changed takes less time than sending what did not."""
    return link_bytes_per_s if link_bytes_per_s is not None and link_bytes_per_s < SCAN_BYTES_PER_S else None


def summary(paths: list[WeightPath]) -> str:
    """The executors of some pairs: one name, or several with the number of pairs of each."""
    counts = collections.Counter(path.executor for path in paths)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} x{n}" for name, n in counts.items())


def _seat(placement: Placement, replica: int, rank: int, one_process: bool) -> Seat:
    process = "" if one_process else f"{placement.worker}-{replica}.{rank}"
    return Seat(process=process, device=placement.device(replica, rank))


def _check_alike(graph: Structure, feedback: Feedback, sizes: Mapping[str, ModelSize]) -> None:
    """Refuse to refresh a model of another architecture, as far as the folders of both tell."""
    models = feedback.weights.trainer.uses, feedback.reader.uses
    trained, read = (sizes.get(model.source) if model else None for model in models)
    if trained is not None and read is not None and trained.architecture != read.architecture:
        raise GraphError(
            f"'{feedback.reader.name}' cannot be refreshed with the weights of '{feedback.weights.trainer.name}': it "
            f"reads a model of {read.told}, and trained is one of {trained.told}; give it a model of the same shapes"
        )


def _executor(forced: str | None, chosen: str, trainer: str, source: Seat, reader: str, destination: Seat) -> str:
    if forced is None:
        return chosen
    lacks = obstacle(forced, source, destination)
    if lacks is not None:
        raise GraphError(
            f"weights cannot go from '{trainer}' to '{reader}' by {forced}, which needs {lacks}; "
            f"they sit on {source.device} and {destination.device}"
            f"{' of one process' if source.process == destination.process else ''}; "
            f"leave weights= out to use {chosen}"
        )
    return forced
