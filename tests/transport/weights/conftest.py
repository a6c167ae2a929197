"""Where the contract of the weight plane is tested: in one process, and over shared memory."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import zmq

from transport.weights import (
    CudaIpc,
    FlatLayout,
    Hub,
    SharedMemory,
    Timing,
    WeightReader,
    WeightWriter,
)
from transport.weights.executors import address as addresses
from transport.weights.executors import shared_memory
from transport.weights.executors.peer_memory import HostMemory

PACE = Timing(heartbeat_s=0.5, silent_s=3.0, release_s=5.0, gone_s=60.0)


@dataclass
class Clock:
    """Time that passes when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Place:
    """One address with its writers and readers, all in this thread and on one fake clock."""

    address: object
    flip: Callable[[str, int], None]
    """Flips one bit of the given byte of a segment, by its key."""
    arrive: Callable[[WeightWriter | WeightReader], bool] = lambda end: False
    """Waits for a message that is on its way to this end; False if there is none."""
    clock: Clock = field(default_factory=Clock)
    opened: list[WeightWriter | WeightReader] = field(default_factory=list)

    def writer(self, layout: FlatLayout, **knobs) -> WeightWriter:
        self.opened.append(WeightWriter(layout, self.address, pace=PACE, clock=self.clock, **knobs))
        return self.opened[-1]

    def reader(self, name: str = "generator-0", attach=None, **knobs) -> WeightReader:
        self.opened.append(WeightReader(self.address, name, pace=PACE, clock=self.clock, **knobs))
        if attach is not None:
            self.opened[-1].attach(attach)
        return self.opened[-1]

    def settle(self, *ends: WeightWriter | WeightReader, adopt: bool = True) -> None:
        """Let these ends talk until nobody has more to say; readers adopt what they are offered."""
        quiet = 0
        while quiet < 4:
            quiet += 1
            for end in ends:
                if self.arrive(end):
                    quiet = 0
                offer = end.poll()
                if verifying(end):
                    quiet = 0
                if offer and adopt:
                    end.adopt()

    def close(self) -> None:
        for end in reversed(self.opened):
            end.close()


def parameters(
    value: float = 0.0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.nn.Parameter]:
    """A small model's parameters, every element of the same value."""
    shapes = {"embed": (11, 8), "up": (8, 24), "norm": (8,), "scale": ()}
    return {
        name: torch.nn.Parameter(
            torch.full(shape, value, dtype=dtype), requires_grad=dtype.is_floating_point
        )
        for name, shape in shapes.items()
    }


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    """The different values that occur in these tensors."""
    return {float(v) for tensor in tensors.values() for v in tensor.detach().flatten()}


def verifying(end: WeightWriter | WeightReader) -> bool:
    """Waits until a version that this end sums beside its loop is summed; False if there is
    none.
    """
    arrival = end._arrival if isinstance(end, WeightReader) else None
    if arrival is None or not arrival.running:
        return False
    deadline = time.monotonic() + 20
    while arrival.running:
        assert time.monotonic() < deadline
        time.sleep(0.0001)
    return True


def leftovers(address: str) -> set[str]:
    """What lies in shared memory for this address at this moment."""
    site = SharedMemory(address)
    return {path.name for path in site.place.folder.glob(f"{site.place.prefix}*")}


def _count_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[WeightWriter | WeightReader], bool]:
    """Counts the messages on their way to each socket, so that a test waits for those and no
    longer.
    """
    on_the_way: Counter[bytes] = Counter()

    def inbox(socket) -> bytes:
        return socket.get(zmq.IDENTITY) if socket.type == zmq.DEALER else b"writer"

    def count(kind, address):
        send = kind.send

        def counted(port, *message):
            on_the_way[address(message)] += 1
            return send(port, *message)

        monkeypatch.setattr(kind, "send", counted)

    count(shared_memory.FileWriterPort, lambda message: message[0])
    count(shared_memory.FileReaderPort, lambda message: b"writer")
    take = shared_memory.arrived

    def taken(socket):
        frames = take(socket)
        on_the_way[inbox(socket)] -= frames is not None
        return frames

    monkeypatch.setattr(shared_memory, "arrived", taken)

    def arrive(end: WeightWriter | WeightReader) -> bool:
        if on_the_way[inbox(end.socket)] <= 0:
            return False
        if not end.socket.poll(3000):
            on_the_way[inbox(end.socket)] = 0
        return True

    return arrive


@pytest.fixture(params=["local", "shared_memory", "cuda_ipc"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        hub = Hub()

        def flip(key: str, byte: int) -> None:
            hub.segments[key].buffer[byte] ^= 1

        place = Place(hub, flip)
    elif request.param == "cuda_ipc":
        site = CudaIpc(f"ipc://{tmp_path}/w.sock", "cpu", memory=HostMemory(tmp_path))

        def flip(key: str, byte: int) -> None:
            place.opened[0]._segments[key].buffer[byte] ^= 1

        place = Place(site, flip, _count_messages(request.getfixturevalue("monkeypatch")))
    else:
        site = SharedMemory(f"ipc://{tmp_path}/w.sock")

        def flip(key: str, byte: int) -> None:
            with (site.place.folder / key).open("r+b") as file:
                file.seek(shared_memory.HEADER_BYTES + byte)
                found = file.read(1)[0]
                file.seek(shared_memory.HEADER_BYTES + byte)
                file.write(bytes([found ^ 1]))

        place = Place(site, flip, _count_messages(request.getfixturevalue("monkeypatch")))
    yield place
    place.close()


@pytest.fixture
def clean_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may lie in shared memory afterwards, of any address that the test has used."""
    used = set()
    checked = addresses.checked

    def noted(address: str) -> str:
        used.add(checked(address))
        return checked(address)

    monkeypatch.setattr(addresses, "checked", noted)
    yield
    assert not [name for address in used for name in leftovers(address)]
    assert not [address for address in used if SharedMemory(address).place.lock_path.exists()]


@pytest.fixture(scope="session")
def processes() -> BaseContext:
    """Makes processes that have torch and the weight plane loaded; fresh ones where a GPU would not
    survive a fork.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    ends = ("reader", "writer", "sharded.reader", "sharded.writer")
    context.set_forkserver_preload(["torch", *(f"transport.weights.{end}" for end in ends)])
    return context


@pytest.fixture
def start(processes: BaseContext) -> Iterator[Callable[..., BaseProcess]]:
    """Starts a program in a process of its own, which ends with the test."""
    children = []

    def start(program: Callable[..., None], *arguments: object) -> BaseProcess:
        children.append(processes.Process(target=program, args=arguments, daemon=True))
        children[-1].start()
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.join(10)
