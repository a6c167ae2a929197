"""A trainer that publishes versions of a tiny model by shared memory, and how rank 0 opens its end of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from transport.weights import FlatLayout, SharedMemory, WeightReader, WeightWriter

Shapes = dict[str, tuple[int, ...]]


def values(shapes: Shapes, version: int) -> dict[str, torch.Tensor]:
    """Small numbers, others for each version."""
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}


@dataclass
class Opens:
    """OpensWeights, as the ports give it to a generator."""

    address: str
    folder: str
    end: list[WeightReader] = field(default_factory=list)

    meets: bool = True

    @property
    def site(self) -> dict[str, str] | None:
        """Where the other ranks find the same versions."""
        found = {"executor": "shared_memory", "address": self.address, "folder": self.folder}
        return found if self.meets else None

    def __call__(self, tensors: Mapping[str, Any], pieces: Mapping[str, Any] | None = None) -> WeightReader:
        self.end.append(WeightReader(SharedMemory(self.address, folder=self.folder), "generator-0"))
        self.end[-1].attach(tensors, pieces)
        return self.end[-1]


def writer(shapes: Shapes, opens: Opens) -> WeightWriter:
    """The trainer's end."""
    layout = FlatLayout.of(values(shapes, 0))
    return WeightWriter(layout, SharedMemory(opens.address, folder=opens.folder))


def publish(address: str, folder: str, shapes: Shapes, first: int, last: int, running: Any) -> None:
    """A trainer's process: a version after the other, as soon as there is room, and skipping some; then it waits."""
    torch.set_num_threads(1)
    end = writer(shapes, Opens(address, folder))
    deadline = time.monotonic() + 120
    for version in (number for number in range(first, last + 1) if number % 5 != 3):
        end.publish(version, values(shapes, version))
        while (end.pending or not end.readers) and time.monotonic() < deadline:
            end.poll()
            time.sleep(0.001)
        while version % 2 == 0 and end.readers[0].version < version and time.monotonic() < deadline:
            end.poll()
            time.sleep(0.001)
    running.set()
    while time.monotonic() < deadline:
        end.poll()
        time.sleep(0.001)
    sys.exit(1)
