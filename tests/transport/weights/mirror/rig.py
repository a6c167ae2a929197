"""Readers of one host beside each other, whose trainer is on another: two addresses of loopback act
as the hosts.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from transport.security import RunKeys
from transport.weights import Layout
from transport.weights.encoding import Encoding
from transport.weights.mirror.reader import MirroredReader, MirrorPlace, travelling
from transport.weights.mirror.receiver import MirrorReceiver
from transport.weights.sharded.control import CoordinatorSocket, NetworkEnd

from ..sharded_rig import FAST, Trainer, full

MODEL = {f"t{n}": ((24, 16), "float32") for n in range(4)}
WHOLE = Layout.whole(MODEL)
HERE, THERE = "127.0.0.1", "127.0.0.2"
DEADLINE_S = 30.0


@contextlib.contextmanager
def offered(
    keys: RunKeys, layout: Layout = WHOLE, **knobs: object
) -> Iterator[tuple[Trainer, str]]:
    """A trainer on the first host, at a free port."""
    listener = CoordinatorSocket(f"tcp://{HERE}:*", keys)
    trainer = Trainer(
        layout, listener.address, host=NetworkEnd(HERE, keys), listener=listener, **knobs
    )
    try:
        yield trainer, listener.address
    finally:
        trainer.close()


def place_of(folder: Path, name: str, order: int) -> MirrorPlace:
    return MirrorPlace(
        line=f"ipc://{folder}/m.trainer",
        own=f"ipc://{folder}/m.trainer.{name}",
        folder=str(folder),
        order=order,
    )


def neighbour(
    keys: RunKeys,
    address: str,
    folder: Path,
    number: int,
    *,
    attempt: int = 0,
    order: int | None = None,
    **knobs: object,
) -> tuple[MirroredReader, dict[str, torch.nn.Parameter]]:
    """The reader of a replica on the second host, with what it holds."""
    name, pace = f"generator-{number}", knobs.pop("deadlines", FAST)
    mine = {n: torch.nn.Parameter(torch.zeros(shape)) for n, (shape, _) in MODEL.items()}
    receive = functools.partial(
        MirrorReceiver,
        address=address,
        name=name,
        deadlines=pace,
        attempt=attempt,
        host=NetworkEnd(THERE, keys),
        seek=knobs.pop("seek", lambda: ""),
    )
    whole = travelling(Encoding(dtype="float32"), mine, ({},))
    place = place_of(folder, name, number if order is None else order)
    reader = MirroredReader(place, name, whole, receive, on_damage="keep", attempt=attempt, **knobs)
    reader.attach(mine)
    return reader, mine


def turn(*readers: MirroredReader) -> None:
    """A safe point of each."""
    for reader in readers:
        if reader.poll():
            reader.adopt()


def until(condition: object, *readers: MirroredReader) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, [
            (each.name, each.version, each.leads) for each in readers
        ]
        turn(*readers)
        time.sleep(0.005)


def holds(mine: dict[str, torch.nn.Parameter], version: int) -> bool:
    return all(torch.equal(mine[name], tensor) for name, tensor in full(WHOLE, version).items())
