"""A process group of one epoch, apart from torch's default one: gloo between processors, NCCL
between GPUs.

Within a host a rank meets the others in a file of a private folder, and all listen on loopback
alone; between hosts they meet over the line, and listen at the address by which others find theirs.
The group can be aborted from another thread at any time, which ends what any rank of it is waiting
for.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from transport.errors import WaitTimeout
from transport.weights.executors.address import interface_of
from transport.weights.protocol.messages import GetValue, Put, StoredValue

NAP_S = 0.002
"""Between two looks whether another rank has come."""
AGAIN_S = 1.0
"""Until a value is asked for once more: a message may be lost."""


@dataclass(frozen=True)
class Meeting:
    """Of one rank in one epoch."""

    store: str = ""
    """The file, which is of this machine; empty where ranks meet over the line."""
    host: str = ""
    """The address by which the others find this host; empty: all are on one."""
    line: CoordinatorStore | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Set by whoever gives the epoch up: nobody waits any more."""

    def rendezvous(
        self, backend: str, size: int, patience_s: float, clock: Callable[[], float]
    ) -> Any:
        """A store for `size` ranks, each of whose waits lasts `patience_s` at most."""
        store: Any = self.line
        if store is None:
            store = dist.FileStore(self.store, size)  # type: ignore[attr-defined]
            store.set_timeout(datetime.timedelta(seconds=patience_s))
            if backend == "nccl":
                return store
        return StoppableStore(store, self.over, patience_s, clock)


class CoordinatorStore:
    """Values that ranks put and get over the line, which only members with the run's keys
    can use.
    """

    def __init__(self, epoch: int, send: Callable[[Put | GetValue], None]) -> None:
        self._epoch, self._send = epoch, send
        self._known: dict[str, bytes] = {}
        self._asked: dict[str, float] = {}

    def told(self, message: StoredValue) -> None:
        """Another rank's value has come."""
        self._known[message.key] = message.value

    def set(self, key: str, value: str | bytes) -> None:
        """Put it."""
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._send(Put(epoch=self._epoch, key=key, value=self._known[key]))

    def get(self, key: str) -> bytes:
        """One that is known."""
        return self._known[key]

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all are known; the others are asked for."""
        missing, now = [key for key in keys if key not in self._known], time.monotonic()
        for key in missing:
            if now - self._asked.get(key, float("-inf")) >= AGAIN_S:
                self._asked[key] = now
                self._send(GetValue(epoch=self._epoch, key=key))
        return not missing


class StoppableStore(dist.Store):  # type: ignore[name-defined, misc]
    """A store that ranks meet in, whose waits another thread can end: torch's own last their full
    time.
    """

    def __init__(
        self, store: Any, stop: threading.Event, patience_s: float, clock: Callable[[], float]
    ) -> None:
        """`patience_s`: of every wait."""
        super().__init__()
        self._store, self._stop, self._patience_s, self._clock = store, stop, patience_s, clock

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        self.wait([key])
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """See torch.distributed.Store."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._store.check(keys))

    def has_extended_api(self) -> bool:
        """Only the methods needed here."""
        return False

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all are there, however short gloo's own timeout is. RuntimeError when late, or
        `stop` is set.
        """
        until = self._clock() + self._patience_s
        while not self._store.check(list(keys)):
            if self._stop.wait(NAP_S) or self._clock() > until:
                raise RuntimeError(
                    f"other ranks have not come to the rendezvous; found no '{keys[0]}'"
                )


Backend = Literal["gloo", "nccl", "shared_memory", "cuda_ipc"]
ONE_SIDED = ("shared_memory", "cuda_ipc")
"""Within a machine: the sender writes into the receiver's memory, and gloo carries the few words
about it."""
CONNECT_S = 3.0
"""For connections to ranks that have come to the rendezvous: one that died since keeps gloo waiting
so long."""
NEVER = datetime.timedelta(days=365)
UNUSED_TAG = (1 << 30) + 1
"""Of messages that nobody sends."""


class ProcessGroup:
    """Point-to-point exchange between the ranks of one epoch."""

    def __init__(
        self,
        backend: str,
        meeting: Meeting,
        rank: int,
        size: int,
        *,
        connect_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Meets the other ranks, all of which do the same, within `connect_s`; RuntimeError if they
        do not.

        WeightError: this host has no such address as `meeting` says.
        """
        backend = "gloo" if backend in ONE_SIDED else backend
        self.rank, self.size, self.backend = rank, size, backend
        self._store = meeting.rendezvous(backend, size, connect_s, clock)
        """NCCL looks into it again when ranks meet."""
        if backend == "gloo":
            self._group = _gloo(self._store, rank, size, meeting.host)
        else:
            self._group = _nccl(
                self._store, rank, size, meeting.host, datetime.timedelta(seconds=connect_s)
            )

    def meet(self, device: torch.device, deadline: float, clock: Callable[[], float]) -> None:
        """All ranks do this first: NCCL makes the group's one communicator at a first operation in
        which all take part. RuntimeError or WaitTimeout when some do not.
        """
        if self.backend == "nccl":
            work = self._group.allreduce([torch.zeros(1, device=device)])
            self.wait(work, deadline, clock, is_watched=False)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Begin to send a dense tensor, which must keep its bytes until `wait` returns. Messages of
        NCCL go in the order in which they are begun, whoever they are for.
        """
        return self._batched(lambda: self._group.send([tensor], peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Begin to receive into a dense tensor."""
        return self._batched(lambda: self._group.recv([tensor], peer, tag))

    def _batched(self, begin: Callable[[], Any]) -> Any:
        """A message by itself would have NCCL make a communicator for its pair of ranks; one of a
        batch goes over the group's (as by torch's `batch_isend_irecv`).
        """
        if self.backend != "nccl":
            return begin()
        self._group._start_coalescing()
        begin()
        return self._group._end_coalescing()

    def wait(
        self, work: Any, deadline: float, clock: Callable[[], float], *, is_watched: bool
    ) -> None:
        """Until it is done. RuntimeError when a rank is gone, the group is aborted or the deadline
        passed.

        is_watched: another thread aborts the group at the deadline. gloo's own time-outs run on
        while the process is stopped, so where they are the only ones, a stop ends the group.
        """
        if self.backend == "gloo":
            work.wait(
                NEVER if is_watched else datetime.timedelta(seconds=max(0.001, deadline - clock()))
            )
            return
        while not work.is_completed():
            if clock() >= deadline:
                raise WaitTimeout(
                    f"a transfer of rank {self.rank} of {self.size} passed its deadline; found it"
                    " unfinished"
                )
            time.sleep(0.0002)
        work.wait()

    def order(self, work: Any, deadline: float, clock: Callable[[], float]) -> None:
        """Have what this thread asks for from now on come behind it: on a GPU its current stream
        waits, and the thread goes on; else as `wait`, watched.
        """
        if self.backend == "gloo":
            self.wait(work, deadline, clock, is_watched=True)
        else:
            work.wait()

    def abort(self) -> None:
        """End all that is under way, here and at the other ranks. From any thread; returns within
        milliseconds.
        """
        with contextlib.suppress(RuntimeError):
            if self.backend == "nccl":
                self._group.abort()
            else:
                abort_gloo(self._group, self.rank, self.size)


def abort_gloo(group: Any, rank: int, size: int) -> None:
    """End all that is under way in a group of gloo's, here and at the other ranks, from any
    thread.
    """
    # gloo closes every connection of a rank once one of its waits has timed out. No wait does where
    # the other rank has closed the connection before: that fails at once.
    for step in range(1, size):
        with contextlib.suppress(RuntimeError):
            nothing = group.recv([torch.empty(1)], (rank + step) % size, UNUSED_TAG)
            nothing.wait(datetime.timedelta(milliseconds=1))


def _gloo(store: Any, rank: int, size: int, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interface_of(host)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=CONNECT_S)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, host: str, timeout: datetime.timedelta) -> Any:
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(host)}"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
