"""What the other processes of the sharded tests do; each ends with 0, or with a number that tells
what went wrong.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from transport.weights import Deadlines, Layout, ShardedReader, ShardedWriter
from transport.weights.sharded.put import Deposit, DepositedChunk
from transport.weights.sharded.steps import ChunkMessage

from .programs import check, compute

QUICK = Deadlines(heartbeat_s=0.05, gone_s=1.0, form_s=10.0, ready_s=1.0, transfer_s=1.5)
DEADLINE_S = 40.0
BUCKET_BYTES = 1 << 14
MODEL = {f"t{n}": ((64, 64), "float32") for n in range(8)}
WHOLE, HALVES = Layout.whole(MODEL), Layout.fsdp(MODEL, 2)


def values(layout: Layout, rank: int, value: float) -> dict[str, torch.Tensor]:
    """A rank's local tensors, every element of the same value."""
    return {
        name: torch.full(shape, float(value)) for name, (shape, _) in layout.local(rank).items()
    }


def serve(address: str, name: str, layout: Layout, rank: int, last: int, **knobs: object) -> None:
    """A generator's rank: compute with the weights all the time, adopt what comes, until the last
    version.
    """
    torch.set_num_threads(1)
    mine = {name: torch.nn.Parameter(tensor) for name, tensor in values(layout, rank, 0).items()}
    reader = ShardedReader(layout, rank, address, name, deadlines=QUICK, **knobs)
    reader.attach(mine)
    compute(reader, mine, last)
    time.sleep(0.2)
    reader.close()
    check(mine, last)


def serve_and_stop_in_the_middle(
    address: str, name: str, layout: Layout, rank: int, last: int, how: int
) -> None:
    """As `serve`, but it gets signal `how` once, half way through its second transfer."""
    received = []

    def stopping(
        unpack: Callable[[ChunkMessage | DepositedChunk, torch.Tensor], bool],
    ) -> Callable[[ChunkMessage | DepositedChunk, torch.Tensor], bool]:
        def stop(step: ChunkMessage | DepositedChunk, sums: torch.Tensor) -> bool:
            received.append(step)
            if len(received) == 12 // layout.ranks:
                os.kill(os.getpid(), how)
            return unpack(step, sums)

        return stop

    for kind in (ChunkMessage, DepositedChunk):
        kind.unpack = stopping(kind.unpack)
    serve(address, name, layout, rank, last)


def train(
    address: str, layout: Layout, rank: int, versions: int, pause_s: float, hold: str = "snapshot"
) -> None:
    """A trainer's rank: publishes versions 1, 2, .. with a pause after each, and stays."""
    torch.set_num_threads(1)
    writer = ShardedWriter(
        layout, rank, address, deadlines=QUICK, bucket_bytes=BUCKET_BYTES, hold=hold
    )
    for version in range(1, versions + 1):
        writer.settle(10.0)
        writer.publish(version, values(layout, rank, version))
        idle(writer, pause_s)
    idle(writer, DEADLINE_S)


def train_and_stop_in_the_middle(address: str) -> None:
    """A trainer that is killed half way through sending version 2."""
    pack: Callable[[ChunkMessage, torch.Tensor], None] = ChunkMessage.pack
    sent = []

    def stopping(step: ChunkMessage, sums: torch.Tensor) -> None:
        sent.append(step)
        if len(sent) == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        pack(step, sums)

    ChunkMessage.pack = stopping
    train(address, WHOLE, 0, 2, 1.5)


def put_and_stop_in_a_chunk(address: str, rank: int | None, woken: Path) -> None:
    """A trainer's rank, or its only one, that stops in a chunk of version 2; awake, it writes
    nonsense.
    """
    pack: Callable[[Deposit, torch.Tensor], None] = Deposit.pack
    written = []

    def stopping(step: Deposit, sums: torch.Tensor) -> None:
        written.append(step)
        if len(written) == (6 if rank is not None else 12):
            half = len(step._copier._destinations) // 2
            for there, here in list(
                zip(step._copier._destinations, step._copier._sources, strict=True)
            )[:half]:
                there.copy_(here)
            # this thread first: it sends no more
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            for there in step._copier._destinations:
                there.fill_(77)
            woken.touch()
        pack(step, sums)

    Deposit.pack = stopping
    torch.set_num_threads(1)
    layout = WHOLE if rank is None else HALVES
    writer = ShardedWriter(
        layout,
        rank or 0,
        address,
        deadlines=QUICK,
        bucket_bytes=BUCKET_BYTES,
        backend="shared_memory",
    )
    writer.publish(1, values(layout, rank or 0, 1))
    while rank is None and not any(status.version == 1 for status in writer.readers):
        idle(writer, 0.01)
    writer.publish(2, values(layout, rank or 0, 2))
    idle(writer, DEADLINE_S)


def idle(writer: ShardedWriter, seconds: float) -> None:
    """Poll for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.poll()
        time.sleep(0.01)
