"""Trainers and generators that are killed at a named moment, and write down what they serve.

Elements of version v of a trainer's line n are LINE * n + v, so that it shows whose version
somebody has.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from transport.errors import PeerGone
from transport.weights import (
    AddressTaken,
    Deadlines,
    Layout,
    ShardedReader,
    ShardedWriter,
    WeightReader,
    WeightWriter,
)
from transport.weights import writer as writing
from transport.weights.executors import shared_memory
from transport.weights.memory import Attached
from transport.weights.protocol.messages import Offer, StartTransfer
from transport.weights.protocol.ranks import ReaderRank, SourceRank
from transport.weights.protocol.rounds import Coordinator
from transport.weights.protocol.segments import SegmentOffers
from transport.weights.sharded.steps import ChunkMessage

from .programs import DEADLINE_S, LATE, LAYOUT, MIXTURE, PACE, model
from .sharded_programs import BUCKET_BYTES, values

ROUNDS = Deadlines(heartbeat_s=0.05, gone_s=8.0, form_s=30.0, ready_s=6.0, transfer_s=6.0)


LINE = 1000


ALONE, REPLACED = 5, 6


"""How a trainer's rank ends that another one has left, and a generator whose name another one has
taken."""


NAP_S = 0.002


Serves = tuple[int, int]


"""(line, version)"""


When = Callable[..., bool]


def served(folder: Path, name: str) -> list[Serves]:
    """What generators of this name have served, in order."""
    log = folder / f"{name}.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(line), int(version)) for line, version in map(str.split, lines)]


def dies(owner: Any, method: str, when: When, *, first: bool = True) -> Callable[[], None]:
    """Makes this process die by SIGKILL in a call of the method: before it does anything, or (not
    `first`) after.
    """

    def arm() -> None:
        found = getattr(owner, method)

        def dying(*arguments: Any, **more: Any) -> Any:
            now = when(*arguments)
            result = None if first and now else found(*arguments, **more)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, method, dying)

    return arm


def nth(count: int) -> When:
    """In the call of that number."""
    calls: list[None] = []

    def when(*arguments: Any) -> bool:
        calls.append(None)
        return len(calls) == count

    return when


def _half_written(filler: Any, sources: list[torch.Tensor]) -> bool:
    """Write half of version 2, and say so, as far as readers can see."""
    if float(sources[0].flatten()[0]) % LINE != 2:
        return False
    for destination, source in list(zip(filler._destinations, sources, strict=True))[:4]:
        destination.copy_(source.detach())
    filler._progress[1] = LAYOUT.tensors[4].offset
    time.sleep(2 * PACE.heartbeat_s)
    return True


def _half_taken(attached: Attached, mapped: Any) -> bool:
    """Take half of the second version."""
    if attached._inside is None:
        return False
    for target, source in mapped.flips[:4]:
        target.data = source
    return True


def _offered(reader: WeightReader) -> int:
    return reader._member.offer.version if reader._member.offer else -1


def _hears_of(word: object, version: int) -> bool:
    """Whether this is the first that a rank of a reader hears of a version, ready ahead or not."""
    return isinstance(word, Offer | StartTransfer) and word.version == version


TRAINER_DIES = {
    "before it writes": dies(SegmentOffers, "upcoming", lambda _, key, version: version == 2),
    "half way": dies(writing, "fill", _half_written),
    "before the gate opens": dies(
        shared_memory._WriterSegment, "unseal", lambda _, version: version == 2
    ),
    "before it offers": dies(SegmentOffers, "written", lambda _, key, version, *rest: version == 2),
    "offered": dies(
        WeightWriter, "_write", lambda _, key, version, *rest: version == 2, first=False
    ),
}


"""At version 2; and "adopted", when all generators have it."""


GENERATOR_DIES = {
    "before it enters": dies(WeightReader, "_enter", lambda reader, *rest: _offered(reader) == 2),
    "ready": dies(WeightReader, "_enter", lambda reader, *rest: _offered(reader) == 2, first=False),
    "half taken": dies(Attached, "take", _half_taken),
    "before it commits": dies(Attached, "take", nth(2), first=False),
    "committed": dies(WeightReader, "adopt", nth(2), first=False),
}


"""At version 2."""


SHARDED_TRAINER_DIES = {
    "forming": dies(SourceRank, "formed", nth(1)),
    "all ready": dies(Coordinator, "_start", lambda _, epoch, version, *rest: version == 2),
    "sending": dies(ChunkMessage, "pack", nth(6)),
    "sent": dies(SourceRank, "transferred", nth(2)),
    "all verified": dies(Coordinator, "_verified", lambda _, group: group.offered == 2),
}


"""At version 1 or 2; and "adopted", when all groups have that."""


SHARDED_GENERATOR_DIES = {
    "forming": dies(ReaderRank, "formed", nth(1)),
    "offered": dies(ReaderRank, "receive", lambda _, word, now: _hears_of(word, 2)),
    "receiving": dies(ChunkMessage, "unpack", nth(6)),
    "verified": dies(ReaderRank, "transferred", nth(2), first=False),
    "before it adopts": dies(ShardedReader, "adopt", nth(2)),
    "adopted": dies(ShardedReader, "adopt", nth(2), first=False),
}


"""At version 2."""


def train(
    address: str, line: int, versions: Iterable[int], names: Collection[str], moment: str = ""
) -> None:
    """Publish each version when the generators of these names hold the one before; at the moment,
    if one is given, die.

    Without one it leaves in order once they hold the last.
    """
    torch.set_num_threads(1)
    TRAINER_DIES.get(moment, lambda: None)()
    writer = WeightWriter(LAYOUT, address, pace=PACE)
    _publish(writer, lambda version: model(LINE * line + version), versions, set(names))
    if moment:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.close()


def train_shard(
    address: str,
    layout: Layout,
    rank: int,
    line: int,
    versions: Iterable[int],
    names: Collection[str],
    moment: str = "",
) -> None:
    """As `train`, for one rank. Others than rank 0 stay until they find it gone."""
    torch.set_num_threads(1)
    SHARDED_TRAINER_DIES.get(moment, lambda: None)()
    writer = ShardedWriter(
        layout, rank, address, deadlines=ROUNDS, bucket_bytes=BUCKET_BYTES, attempt=int(not moment)
    )
    try:
        _publish(
            writer,
            lambda version: values(layout, rank, LINE * line + version),
            versions,
            set(names),
        )
        while rank > 0:
            writer.poll()
            time.sleep(NAP_S)
    except PeerGone as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(ALONE)
    if moment:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.close()


def generate(
    address: str, name: str, adopt: str, last: Serves, folder: Path, moment: str = ""
) -> None:
    """Serve until the last version; at the moment, if one is given, die."""
    torch.set_num_threads(1)
    GENERATOR_DIES.get(moment, lambda: None)()
    mine = model()
    reader = WeightReader(address, name, adopt=adopt, pace=PACE, attempt=int(not moment))
    reader.attach(mine)
    _serve(reader, mine, last, folder / f"{name}.log")


def generate_shard(
    address: str, name: str, layout: Layout, rank: int, last: Serves, folder: Path, moment: str = ""
) -> None:
    """As `generate`, for one rank of a group."""
    torch.set_num_threads(1)
    SHARDED_GENERATOR_DIES.get(moment, lambda: None)()
    mine = {name: torch.nn.Parameter(tensor) for name, tensor in values(layout, rank, 0).items()}
    reader = ShardedReader(layout, rank, address, name, deadlines=ROUNDS, attempt=int(not moment))
    reader.attach(mine)
    _serve(reader, mine, last, folder / f"{name}.{rank}.log")


def _publish(
    writer: Any, made: Callable[[int], Any], versions: Iterable[int], names: set[str]
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for version in versions:
        writer.publish(version, made(version))
        while not names <= {status.name for status in writer.readers if status.version == version}:
            if time.monotonic() > deadline:
                os._exit(LATE)
            writer.poll()
            time.sleep(NAP_S)


def _serve(reader: Any, mine: dict[str, torch.Tensor], last: Serves, log: Path) -> None:
    """Compute with the weights all the time, adopt what comes between two uses, and write it
    down.
    """
    serves: Serves = (-1, -1)
    deadline = time.monotonic() + DEADLINE_S
    ends = float("inf")
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while time.monotonic() < ends:
        if time.monotonic() > deadline:
            os._exit(LATE)
        try:
            offered = reader.poll() is not None
        except AddressTaken:
            os._exit(REPLACED)
        if offered:
            reader.adopt()
        found = _whole(mine)
        if found != serves and reader.version >= 0:
            if found < serves or found[1] != reader.version:
                os._exit(MIXTURE)
            serves = found
            os.write(file, f"{found[0]} {found[1]}\n".encode())
            # The trainer hears of the last one before this process goes.
            ends = time.monotonic() + 4 * PACE.heartbeat_s if serves == last else ends
        time.sleep(NAP_S)
    reader.close()


def _whole(mine: dict[str, torch.Tensor]) -> Serves:
    """The one version that all elements are of; else the process ends."""
    found = {float(end) for tensor in mine.values() for end in tensor.detach().aminmax()}
    if len(found) != 1:
        os._exit(MIXTURE)
    value = int(found.pop())
    return value // LINE, value % LINE
