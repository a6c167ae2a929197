"""What the other processes of the tests do; each ends with 0, or with a number that tells what went
wrong.
"""

import os
import time

import torch

from transport.weights import FlatLayout, ShardedReader, Timing, WeightReader, WeightWriter
from transport.weights import writer as writing
from transport.weights.memory import Arrival

MIXTURE, LATE = 3, 4
PACE = Timing(heartbeat_s=0.05, silent_s=0.5, release_s=0.3, gone_s=60.0)
DEADLINE_S = 40.0


def model(value: float = 0.0) -> dict[str, torch.nn.Parameter]:
    """Half a megabyte of parameters, every element of the same value."""
    return {f"t{n}": torch.nn.Parameter(torch.full((128, 128), float(value))) for n in range(8)}


LAYOUT = FlatLayout.of(model())


def check(tensors: dict[str, torch.nn.Parameter], version: int) -> None:
    """Leave the process at once if any element is of another version."""
    for tensor in tensors.values():
        if version >= 0 and not bool((tensor == version).all()):
            os._exit(MIXTURE)


def serve(address: str, name: str, adopt: str, last: int) -> None:
    """A generator: compute with the weights all the time, adopt what comes, until the last
    version.
    """
    torch.set_num_threads(1)
    mine = model()
    reader = WeightReader(address, name, adopt=adopt, pace=PACE)
    reader.attach(mine)
    compute(reader, mine, last)
    reader.close()
    check(mine, last)


def compute(reader: WeightReader | ShardedReader, mine: dict[str, torch.Tensor], last: int) -> None:
    """Use the weights all the time, and adopt what comes between two uses, until the last
    version.
    """
    deadline = time.monotonic() + DEADLINE_S
    while reader.version < last:
        if time.monotonic() > deadline:
            os._exit(LATE)
        check(mine, reader.version)
        if reader.poll():
            reader.adopt()
        check(mine, reader.version)


def linger(address: str, name: str, adopt: str, seconds: float) -> None:
    """A generator that stays in its first transfer for that long, then serves on until version
    9.
    """
    damage = Arrival.damage

    def slow(self, offer):
        Arrival.damage = damage
        time.sleep(seconds)
        return damage(self, offer)

    Arrival.damage = slow
    serve(address, name, adopt, 9)


def publish_and_stop_in_the_middle(address: str) -> None:
    """A trainer that publishes version 1, tells so, and stops half way through writing version
    2.
    """
    torch.set_num_threads(1)
    writer = WeightWriter(LAYOUT, address, pace=PACE)
    writer.publish(1, model(1))
    while not any(status.version == 1 for status in writer.readers):
        writer.poll()

    def half(filler, sources):
        for destination in filler._destinations[:4]:
            destination.fill_(2)
        filler._progress[1] = LAYOUT.tensors[4].offset
        writer.tell({"half": "way"})
        writer.poll()
        time.sleep(DEADLINE_S)

    writing.fill = half
    writer.publish(2, model(2))
