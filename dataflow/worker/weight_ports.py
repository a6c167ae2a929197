"""Opens the ends of the weight planes: of any rank, at a site that the ports of its worker name."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dataflow.limits import Limits
from dataflow.planning.executors import ON_GPU
from dataflow.system.clocks import AwakeClock
from dataflow.system.security import RunKeys
from dataflow.weight_ends import SentVersion, WeightSite

if TYPE_CHECKING:
    from transport.weights.layout.layout import Layout
    from transport.weights.sharded.control import CoordinatorSocket, NetworkEnd
    from transport.weights.sharded.process_group import Backend

Slices = Sequence[Mapping[str, Any]]
"""Of each rank of a reader, as for `OpensWeights`."""


class FanOut:
    """The end of one rank of a trainer: offers every version, encoded, over each way to its
    readers.

    consumes: tensors of the trainer
    produces: the same version on every end
    waits for: nothing but what an end's `publish` waits for
    unblocked by: readers
    """

    def __init__(
        self,
        ends: Sequence[Any],
        encode: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        full_share: float,
    ) -> None:
        """ends: opened, at least one. encode: makes of a version what travels; where scales are of
        rows that are cut, on all ranks at once. full_share: as `WeightsOut` says.
        """
        self._ends, self._encode, self.full_share = ends, encode, full_share
        self.socket = ends[0].socket

    @property
    def pending(self) -> int | None:
        """The version that some end still has to offer."""
        waiting = (end.pending for end in self._ends)
        return next((version for version in waiting if version is not None), None)

    def publish(self, version: int, tensors: Mapping[str, Any]) -> bool:
        """False when some end offers it later."""
        travels = self._encode(tensors)
        offered = [end.publish(version, travels) for end in self._ends]
        return all(offered)

    def settle(self, timeout_s: float) -> bool:
        """The tensors are about to change: wait until no end reads them. False where an end has
        given transfers up, as the time was up; they may change all the same.
        """
        settled = [end.settle(timeout_s) for end in self._ends]
        return all(settled)

    def tell(self, note: dict[str, int | float | str]) -> None:
        """Send the same note on every end."""
        for end in self._ends:
            end.tell(note)

    @property
    def sent(self) -> Mapping[str, SentVersion]:
        """By reader, the version sent last; each reader has one end."""
        return {reader: sent for end in self._ends for reader, sent in end.sent.items()}

    @property
    def traffic(self) -> tuple[int, int] | None:
        """As `WeightsOut` says, over the ends that send over links, if any."""
        counts = [end.traffic for end in self._ends if end.traffic is not None]
        if not counts:
            return None
        return sum(sent for sent, _ in counts), sum(whole for _, whole in counts)

    def poll(self) -> None:
        """Answer all readers."""
        for end in self._ends:
            end.poll()

    def close(self) -> None:
        """Leave the weight plane."""
        for end in self._ends:
            end.close()


def listen(address: str, keys: Mapping[str, bytes], attempt: int) -> "CoordinatorSocket":
    """Where a trainer is heard by readers on other hosts, who have the keys of the run. attempt:
    the scheduler's, at this worker. Errors: TransportError.
    """
    from transport.weights.sharded.control import CoordinatorSocket

    return CoordinatorSocket(address, RunKeys.from_plain(keys), attempt)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """One rank that opens its end at a site, on `device`."""

    site: WeightSite
    rank: int
    ranks: int
    """Of its side."""
    device: str
    limits: Limits
    attempt: int
    """The scheduler's, at the worker of the first rank."""
    hubs: dict[str, Any] = field(default_factory=dict)
    """Of this process, by address."""
    listeners: "dict[str, CoordinatorSocket]" = field(default_factory=dict)
    """By address, of a trainer's rank 0; one that is taken is taken out."""

    @property
    def adopt(self) -> Literal["view", "copy"]:
        """How versions are adopted: on a GPU an engine's captured graphs keep pointers to its
        parameters, which must not move.
        """
        return "view" if self.device == "cpu" else "copy"

    @property
    def of_rounds(self) -> dict[str, Any]:
        """What both ends of rounds are told."""
        from transport.weights.protocol.membership import Deadlines

        return {
            "ranks": self.ranks,
            "device": self.device if self.site.executor in ON_GPU else "cpu",
            "deadlines": Deadlines(transfer_s=self.limits.transfer_s),
            "attempt": self.attempt,
            "clock": AwakeClock(),
            "host": _host(self.site),
        }


def _hub(opening: Opening) -> Any:
    from transport.weights import Hub

    return opening.hubs.setdefault(opening.site.address, Hub())


def _shared_memory(opening: Opening) -> Any:
    from transport.weights import SharedMemory

    return SharedMemory(opening.site.address, folder=opening.site.folder)


def _gpu_memory(opening: Opening) -> Any:
    from transport.weights import CudaIpc

    return CudaIpc(opening.site.address, opening.device, folder=opening.site.folder)


MEETING: Mapping[str, Callable[[Opening], Any]] = {
    "local": _hub,
    "shared_memory": _shared_memory,
    "cuda_ipc": _gpu_memory,
}
"""By executor: where a trainer of one rank and the readers of its machine meet, whose memory they
have in common."""


def _segment_writer(opening: Opening, layout: "Layout") -> Any:
    from transport.weights import WeightWriter

    return WeightWriter(layout.flat(0), MEETING[opening.site.executor](opening))


def _segment_reader(opening: Opening, tensors: Mapping[str, Any], slices: Slices) -> Any:
    from transport.weights import RankReader, WeightReader

    site, rank, place = opening.site, opening.rank, MEETING[opening.site.executor](opening)
    end: Any
    if rank:
        end = RankReader(place, f"{site.name}.{rank}", adopt=opening.adopt)
    else:
        end = WeightReader(
            place, site.name, adopt=opening.adopt, on_damage="keep", attempt=opening.attempt
        )
    end.attach(tensors, slices[rank])
    return end


def _rounds_writer(opening: Opening, layout: "Layout") -> Any:
    """Sends the shard that it has by `layout`, over a slow link what changed, from copies of the
    tensors or, where they are sent without one, from these.
    """
    from transport.weights import ShardedWriter

    site = opening.site
    return ShardedWriter(
        layout,
        opening.rank,
        site.address,
        backend=cast("Backend", site.executor),
        link_bytes_per_s=site.link_bytes_per_s,
        hold="until_settle" if site.zero_copy else "snapshot",
        listener=opening.listeners.pop(site.address, None),
        **opening.of_rounds,
    )


def _rounds_reader(opening: Opening, tensors: Mapping[str, Any], slices: Slices) -> Any:
    from transport.weights import FlatLayout, ShardedReader
    from transport.weights.layout.rank_slices import layout_of_slices

    site = opening.site
    end = ShardedReader(
        layout_of_slices(FlatLayout.of(tensors), slices),
        opening.rank,
        site.address,
        site.name,
        adopt=opening.adopt,
        in_host=site.in_host,
        seek=functools.partial(_noted, site.where),
        **opening.of_rounds,
    )
    end.attach(tensors)
    return end


_SEGMENTS = _segment_writer, _segment_reader
_ROUNDS = _rounds_writer, _rounds_reader
ENDS: Mapping[tuple[str, bool], tuple[Callable[..., Any], Callable[..., Any]]] = {
    ("local", False): _SEGMENTS,
    ("shared_memory", False): _SEGMENTS,
    ("cuda_ipc", False): _SEGMENTS,
    ("shared_memory", True): _ROUNDS,
    ("cuda_ipc", True): _ROUNDS,
    ("nccl", True): _ROUNDS,
    ("gloo", True): _ROUNDS,
}
"""By executor, and whether ranks send to ranks: what opens a writer of a layout, and what opens a
reader into tensors."""


def open_reader(
    site: WeightSite,
    rank: int,
    device: str,
    tensors: Mapping[str, Any],
    slices: Slices,
    *,
    limits: Limits,
    attempt: int,
    hubs: dict[str, Any] | None = None,
) -> Any:
    """The end of any rank of a reader, on `device`: a `WeightsIn`, or a `WeightsBeside`.

    attempt, hubs: as `Opening` has them.
    """
    opening = Opening(
        site=site,
        rank=rank,
        ranks=len(slices),
        device=device,
        limits=limits,
        attempt=attempt,
        hubs={} if hubs is None else hubs,
    )
    _, opens = ENDS[site.executor, site.is_sharded]
    return opens(opening, tensors, slices)


def open_writer(
    sites: Sequence[WeightSite],
    rank: int,
    ranks: int,
    device: str,
    tensors: Mapping[str, Any],
    *,
    largest: Callable[[Any], object] | None,
    limits: Limits,
    attempt: int,
    hubs: dict[str, Any] | None = None,
    listeners: "dict[str, CoordinatorSocket] | None" = None,
) -> FanOut:
    """The end of one rank of a trainer, on `device`, at each of these sites.

    tensors: DTensors of the whole mesh of `ranks` ranks, of which this one offers what it holds;
    whole tensors of a trainer of one rank. largest: as for `OpensWriter`. attempt, hubs, listeners:
    as `Opening` has them.
    """
    from transport.weights.encoding import Encoding
    from transport.weights.layout.from_torch import layout_of, local
    from transport.weights.tensor_encoder import Encoder

    assert sites[0].encoding is not None, "a trainer says what travels"
    encoder = Encoder(
        Encoding.from_plain(sites[0].encoding),
        layout_of(tensors, range(ranks)),
        rank,
        local(tensors),
        largest,
    )
    ends = []
    for site in sites:
        opens, _ = ENDS[site.executor, site.is_sharded]
        opening = Opening(
            site=site,
            rank=rank,
            ranks=ranks,
            device=device,
            limits=limits,
            attempt=attempt,
            hubs={} if hubs is None else hubs,
            listeners={} if listeners is None else listeners,
        )
        ends.append(opens(opening, encoder.layout))
    return FanOut(ends, lambda version: encoder.encode(local(version)), encoder.full_share)


def _host(site: WeightSite) -> "NetworkEnd | None":
    """The host of a site whose ends are on several hosts."""
    if not site.host:
        return None
    from transport.weights.sharded.control import NetworkEnd

    keys = RunKeys.from_plain(site.keys)
    assert keys is not None, "who listens at an address has keys"
    return NetworkEnd(site.host, keys)


def _noted(file: str) -> str:
    """The address in a file; empty where there is none."""
    try:
        return Path(file).read_text() if file else ""
    except OSError:
        return ""


def abort_gloo(group: Any, rank: int, size: int) -> None:
    """End all that is under way in a process group of gloo's, here and at the other ranks, from any
    thread.
    """
    from transport.weights.sharded.process_group import abort_gloo

    abort_gloo(group, rank, size)


def interface_of(host: str) -> str:
    """The network interface of this host that has an address; the loopback's for an empty one.
    Errors: WeightError.
    """
    from transport.weights.executors.address import interface_of

    return interface_of(host)


def preload() -> None:
    """Import what writers and readers of weights need, in the process that workers are forked
    from.
    """
    import transport.weights.encoding
    import transport.weights.layout.from_torch
    import transport.weights.reader
    import transport.weights.sharded.reader
    import transport.weights.sharded.writer
    import transport.weights.tensor_encoder  # noqa: F401
