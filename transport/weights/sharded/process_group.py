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
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from transport.errors import WaitTimeout
from transport.weights.executors.interface import interface_of
from transport.weights.sharded.rendezvous import Meeting

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
    if size > 1:
        # gloo closes every connection of a group once one of its waits has timed out.
        with contextlib.suppress(RuntimeError):
            nothing = group.recv([torch.empty(1)], (rank + 1) % size, UNUSED_TAG)
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
