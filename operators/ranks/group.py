"""The process group of one worker's ranks, gloo between processors, NCCL between GPUs: where
they meet, and when a collective has waited for too long.

torch's own TCPStore listens to whoever connects; here only holders of the run's keys are heard.

Within a host they meet in a private file, and gloo listens on loopback; on several hosts they meet
at rank 0's line, where only holders of the run's keys are heard, and gloo listens at the address by
which the others find each host.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from dataflow.errors import RunError
from dataflow.system.clocks import LOOK_S, AwakeClock, Countdown
from dataflow.system.rank_places import RankPlaces
from dataflow.system.security import RunKeys, dealer_to
from dataflow.worker.cpu_watchdog import CpuWatchdog
from dataflow.worker.rank_messages import (
    FROM_RANK_ZERO,
    TO_RANK_ZERO,
    Delete,
    Get,
    Set,
    StoredValues,
)
from dataflow.worker.weight_ports import abort_gloo, interface_of


class ExchangeWatch:
    """The deadline of exchanges in which one thread takes part: gloo's and NCCL's own run on while
    nobody runs.

    consumes: when its thread enters an exchange and leaves it; the clock
    produces: the end of what the thread waits for, here and at the other ranks, as a TimeoutError
    waits for: its next look, several a second
    unblocked by: the time
    """

    def __init__(
        self,
        limit_s: float,
        end: Callable[[], None],
        *,
        computes: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """limit_s: of waiting without a break. end: breaks off what is waited for; called in
        another thread. computes: whether processor time of the thread says that it does not wait;
        False where a GPU does the work.
        """
        self._limit_s, self._end, self._computes, self._clock = (
            limit_s,
            end,
            computes,
            clock or AwakeClock(),
        )
        self._entered: tuple[float, CpuWatchdog] | None = None
        self._is_over = False
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="ranks-watch", daemon=True).start()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Raises TimeoutError where the calling thread has waited for too long. Not for two threads
        at once.
        """
        self._enter()
        try:
            yield
        except RuntimeError as error:
            if self._is_over:
                raise TimeoutError(f"timed out after {self._limit_s:g} s") from error
            raise
        finally:
            self._entered = None

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within an exchange: what is waited for now has a deadline of its own."""
        self._entered = None
        try:
            yield
        finally:
            self._enter()

    def close(self) -> None:
        """End the thread; may be called again."""
        self._closed.set()

    def _enter(self) -> None:
        self._entered = (
            self._clock(),
            CpuWatchdog(_used_by(threading.get_ident()) if self._computes else float),
        )

    def _serve(self) -> None:
        while not self._closed.wait(LOOK_S) and not self._is_over:
            now, entered = self._clock(), self._entered
            if entered is not None and entered[1].look(now - entered[0], now) > self._limit_s:
                self._is_over = True
                self._end()


def _used_by(thread: int) -> Callable[[], float]:
    """Processor time of a thread; where the system does not tell (macOS), none: all time in an
    exchange counts.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return float
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


class RankZeroStore(dist.Store):  # type: ignore[name-defined, misc]
    """See torch.distributed.Store; of one rank."""

    def __init__(self, address: str, keys: RunKeys, patience_s: float) -> None:
        """address: where rank 0 listens. patience_s: of every wait, after which it raises
        RuntimeError.
        """
        super().__init__()
        self._patience_s, self._address = patience_s, address
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        """gloo and NCCL ask in threads of their own."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._line = dealer_to(self._context, address, keys)
        self._line.connect(address)

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._ask(
            Set(
                next(self._tickets), key, value.encode() if isinstance(value, str) else bytes(value)
            )
        )

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return self._ask(Get(next(self._tickets), [key], waits=True)).values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; what it then is."""
        return int(self._ask(Set(next(self._tickets), key, b"", adds=int(amount))).values[key])

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return len(self._ask(Get(next(self._tickets), keys, waits=False)).values) == len(set(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all are there."""
        wait_s = self._patience_s if timeout is None else timeout.total_seconds()
        self._ask(Get(next(self._tickets), list(keys), waits=True), wait_s)

    def delete_key(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return bool(self._ask(Delete(next(self._tickets), key)).values)

    def has_extended_api(self) -> bool:
        """Only the methods needed here."""
        return False

    def close(self) -> None:
        """Hang up; later calls raise an error."""
        with self._lock:
            self._line.close()
            self._context.term()

    def _ask(self, message: Set | Get | Delete, wait_s: float | None = None) -> StoredValues:
        wait_s = self._patience_s if wait_s is None else wait_s
        with self._lock:
            self._line.send(TO_RANK_ZERO.encode(message))
            wait = Countdown(wait_s)
            while not wait.is_over:
                if not self._line.poll(max(1, int(1000 * wait.slice_s))):
                    continue
                reply = FROM_RANK_ZERO.decode(b"".join(self._line.recv_multipart()))
                if isinstance(reply, StoredValues) and reply.ticket == message.ticket:
                    return reply
        keys: Sequence[str] = message.keys if isinstance(message, Get) else [message.key]
        raise RuntimeError(
            f"timed out after {wait_s:.0f} s: rank 0 at {self._address} did not tell of"
            f" {', '.join(keys)}; another rank has not come there, see their logs"
        )


NEVER = datetime.timedelta(days=365)
_MEETINGS: list[Any] = []
"""Where the groups of this process have met: torch keeps no reference to a store that is written in
Python."""


def join(
    folder: Path,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    places: RankPlaces | None = None,
) -> None:
    """Meet the other ranks in `folder` (mode 0700), or where `places` says, within `timeout_s`;
    then call `watched`.

    Raises:
        RunError: this process is in a process group already.
        WeightError: this host has no such address as `places` says.
    """
    if dist.is_initialized():
        raise RunError(
            f"rank {rank} of {size} cannot join: this process is already in a torch.distributed"
            f" process group; found one of {dist.get_world_size()} ranks; run one operator of"
            " several ranks per process"
        )
    is_spread = places is not None and bool(places.meets_at)
    os.environ["GLOO_SOCKET_IFNAME"] = interface = interface_of(
        places.address if places and is_spread else ""
    )
    # a worker's is its host's, as NCCL takes one for all groups
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_meeting(places, timeout_s) if places and is_spread else _file(folder, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _file(folder: Path, size: int) -> Any:
    return dist.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]


def _meeting(places: RankPlaces, timeout_s: float) -> Any:

    assert places.keys is not None, "a run over hosts has keys"
    _MEETINGS.append(RankZeroStore(places.meets_at, places.keys, timeout_s))
    return _MEETINGS[-1]


def watched(limit_s: float) -> ExchangeWatch:
    """Bound the waits of all process groups that there are, in the place of their own time-outs,
    which run on while the run is stopped.
    """
    for process_group in _groups():
        dist.distributed_c10d._set_pg_timeout(NEVER, process_group)
    return ExchangeWatch(
        limit_s,
        _abort,
        computes=not any("cuda" in str(process_group._device_types) for process_group in _groups()),
    )


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _abort() -> None:
    """End all that is under way, here and at the other ranks."""
    for process_group in _groups():
        for device in process_group._device_types:
            backend = process_group._get_backend(device)
            with contextlib.suppress(RuntimeError):
                if device.type == "cuda":
                    backend.abort()
                else:
                    abort_gloo(backend, process_group.rank(), process_group.size())


def leave() -> None:
    """Leave the process group, whatever state it is in.

    With it goes what DTensor has cached of its meshes: a later mesh of the same shape, here or in a
    fork, would be given this rank's place and this group. No fork could clear that, as it has none
    of the group's threads.
    """
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        if dist.is_initialized():
            dist.destroy_process_group()
    while _MEETINGS:
        _MEETINGS.pop().close()
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()


def _forget_meshes() -> None:
    """As torch.distributed.tensor.debug does, whose import takes half a second; private: torch may
    rename it.
    """
    from torch.distributed.tensor import DTensor, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (
        propagator.propagate_op_sharding,
        getattr(_redistribute, "_gen_transform_infos", None),
    ):
        getattr(cached, "cache_clear", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
