"""Opens the ends of the weight planes: of any rank, at a site that the ports of its worker name."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dataflow.limits import Limits
from dataflow.planning.executors import ON_GPU
from dataflow.system.clocks import AwakeClock
from dataflow.system.security import RunKeys
from dataflow.weight_ends import SentVersion, WeightSite

if TYPE_CHECKING:
    from transport.weights import ShardedWriter
    from transport.weights.layout.layout import Layout
    from transport.weights.protocol.pace import Deadlines
    from transport.weights.sharded.control import CoordinatorSocket, NetworkEnd
    from transport.weights.sharded.process_group import Backend


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


def open_reader(
    site: WeightSite,
    rank: int,
    device: str,
    tensors: Mapping[str, Any],
    slices: Sequence[Mapping[str, Any]],
    *,
    limits: Limits,
    attempt: int,
    hubs: dict[str, Any] | None = None,
) -> Any:
    """The end of any rank of a reader, on `device`: a `WeightsIn`, or a `WeightsBeside`.

    slices: of each rank, as for `OpensWeights`. attempt: the scheduler's, at the worker of the
    first rank. hubs: of this process, by address.
    """
    # On a GPU an engine's captured graphs keep pointers to its parameters, which must not move.
    adopt: Literal["view", "copy"] = "view" if device == "cpu" else "copy"
    if site.is_sharded:
        from transport.weights import FlatLayout, ShardedReader
        from transport.weights.layout.rank_slices import layout_of_slices

        end = ShardedReader(
            layout_of_slices(FlatLayout.of(tensors), slices),
            rank,
            site.address,
            site.name,
            ranks=len(slices),
            adopt=adopt,
            device=_memory(site, device),
            in_host=site.in_host,
            deadlines=_deadlines(limits),
            attempt=attempt,
            clock=AwakeClock(),
            host=_host(site),
            seek=functools.partial(_noted, site.where),
        )
        end.attach(tensors)
        return end
    place = segments_at(site, device, hubs)
    if rank:
        from transport.weights.rank_reader import RankReader

        other = RankReader(place, f"{site.name}.{rank}", adopt=adopt)
        other.attach(tensors, slices[rank])
        return other
    from transport.weights import WeightReader

    first = WeightReader(place, site.name, adopt=adopt, on_damage="keep", attempt=attempt)
    first.attach(tensors, slices[0])
    return first


def shards_writer(
    site: WeightSite,
    layout: "Layout",
    rank: int,
    ranks: int,
    device: str,
    *,
    limits: Limits,
    attempt: int,
    listeners: dict[str, "CoordinatorSocket"] | None = None,
) -> "ShardedWriter":
    """The end of one rank of a trainer: it sends the shard that it has by `layout`, over a slow
    link what changed, from copies of the tensors or, where they are sent without one, from these.

    listeners: by address, of rank 0; one that is taken is taken out.
    """
    from transport.weights import ShardedWriter

    return ShardedWriter(
        layout,
        rank,
        site.address,
        ranks=ranks,
        backend=cast("Backend", site.executor),
        link_bytes_per_s=site.link_bytes_per_s,
        device=_memory(site, device),
        hold="until_settle" if site.zero_copy else "snapshot",
        deadlines=_deadlines(limits),
        attempt=attempt,
        clock=AwakeClock(),
        host=_host(site),
        listener=(listeners or {}).pop(site.address, None),
    )


def offer_beside(
    sites: Sequence[WeightSite],
    rank: int,
    ranks: int,
    device: str,
    tensors: Mapping[str, Any],
    *,
    largest: Callable[[Any], object],
    limits: Limits,
    attempt: int,
    listeners: dict[str, "CoordinatorSocket"] | None = None,
) -> FanOut:
    """The end of one rank of a trainer, on `device`, at each of `OpensWriter.sites`.

    tensors: DTensors of the whole mesh of `ranks` ranks; this one offers what it holds of them.
    largest: as for `OpensWriter`. attempt: the scheduler's, at the worker of the first rank.
    """
    from transport.weights.encoding import Encoding
    from transport.weights.layout.from_torch import layout_of
    from transport.weights.tensor_encoder import ShardEncoder

    assert sites[0].encoding is not None, "ranks offer shards"
    encoding = Encoding.from_plain(sites[0].encoding)
    encoder = ShardEncoder(
        encoding, layout_of(tensors, range(ranks)), rank, _local(tensors), largest
    )
    return FanOut(
        [
            shards_writer(
                site,
                encoder.layout,
                rank,
                ranks,
                device,
                limits=limits,
                attempt=attempt,
                listeners=listeners,
            )
            for site in sites
        ],
        lambda version: encoder.encode(_local(version)),
        encoder.full_share,
    )


def _local(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank holds of each DTensor."""
    return {name: tensor.detach().to_local() for name, tensor in tensors.items()}


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


def _memory(site: WeightSite, device: str) -> str:
    return device if site.executor in ON_GPU else "cpu"


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


def _deadlines(limits: Limits) -> "Deadlines":
    """Deadlines of rounds: their own, and those of the run."""
    from transport.weights.protocol.pace import Deadlines

    return Deadlines(transfer_s=limits.transfer_s)


def segments_at(site: WeightSite, device: str, hubs: dict[str, Any] | None = None) -> Any:
    """Where a trainer of one rank and the readers of its machine meet, of which `device` is one's:
    a hub within a process, else memory that several have in common.
    """
    match site.executor:
        case "local":
            from transport.weights import Hub

            assert hubs is not None, "other ranks are other processes"
            return hubs.setdefault(site.address, Hub())
        case "cuda_ipc":
            from transport.weights.executors.cuda_ipc import CudaIpc

            return CudaIpc(site.address, device, folder=site.folder)
        case _:
            from transport.weights import SharedMemory

            return SharedMemory(site.address, folder=site.folder)


def preload() -> None:
    """Import what writers and readers of weights need, in the process that workers are forked
    from.
    """
    import transport.weights.encoding
    import transport.weights.layout.from_torch
    import transport.weights.rank_reader
    import transport.weights.sharded.reader
    import transport.weights.sharded.writer
    import transport.weights.tensor_encoder  # noqa: F401
