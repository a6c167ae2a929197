"""Where one node of a graph runs: how often, on which devices, with how many threads."""

from dataclasses import dataclass

from dataflow.planning.memory_need import Need


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One node of the graph: how often it runs, where, with how much."""

    node: str
    worker: str
    """Workers are called `worker` or, with several replicas, `worker-0`, `worker-1`, ..."""
    replicas: int = 1
    ranks: int = 1
    """Processes that make up one replica."""
    dp_replicate: int = 1
    """Copies of the model among them."""
    tensor_parallel: int = 1
    """Of them that share out each layer."""
    gpus: tuple[int, ...] = ()
    """Accelerators, replica by replica, numbered over all hosts; empty: CPU."""
    hosts: tuple[str, ...] = ()
    """The host of each replica, all ranks of which are there; empty: this machine."""
    first_gpus: tuple[int, ...] = ()
    """By replica, the number of the first accelerator of its host."""
    threads: int = 1
    """CPU threads of each process; where hosts differ, the fewest."""
    threads_there: tuple[int, ...] = ()
    """By replica, those of each of its processes, where hosts differ."""
    need: Need | None = None
    """Memory that one process needs at least; None: unknown or small."""

    @property
    def memory_bytes(self) -> int | None:
        """Estimate for one process; None: unknown or small."""
        return None if self.need is None else self.need.total

    @property
    def devices(self) -> str:
        """For people: `gpu 0-5` or `cpu, 1 thread`."""
        if self.gpus:
            first, last = min(self.gpus), max(self.gpus)
            return f"gpu {first}" if first == last else f"gpu {first}-{last}"
        return f"cpu, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def mesh(self) -> str:
        """How ranks that do not all do the same share the model out: `2 x 2 (replicate x shard)`; else empty."""
        shards = self.ranks // (self.dp_replicate * self.tensor_parallel)
        axes = {"replicate": self.dp_replicate, "shard": shards, "tensor": self.tensor_parallel}
        used = {name: size for name, size in axes.items() if size > 1}
        if len(used) < 2 and self.dp_replicate == 1:
            return ""
        return f"{' x '.join(map(str, used.values()))} ({' x '.join(used)})"

    @property
    def share(self) -> str:
        """What one replica gets, for people: `1 GPU`, `2 threads`, `2 processes of 1 thread each`."""
        if self.gpus:
            return f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return threads if self.ranks == 1 else f"{self.ranks} processes of {threads} each"

    def gpus_of(self, replica: int) -> tuple[int, ...]:
        """The accelerators of one replica."""
        return self.gpus[replica * self.ranks : (replica + 1) * self.ranks]

    def host(self, replica: int) -> str:
        """The host of a replica; empty: this machine. One that the plan does not know yet has none here."""
        return self.hosts[replica] if self.hosts else ""

    def threads_of(self, replica: int) -> int:
        """CPU threads of each process of a replica, be it one that joins later."""
        return self.threads_there[replica] if replica < len(self.threads_there) else self.threads

    def device(self, replica: int, rank: int = 0) -> str:
        """Torch's name of the device of one rank of a replica, on its host."""
        if not self.gpus:
            return "cpu"
        first = self.first_gpus[replica] if self.first_gpus else 0
        return f"cuda:{self.gpus[replica * self.ranks + rank] - first}"
