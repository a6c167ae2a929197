"""Weights between two processes that share a GPU: publishing, adopting, and how long until a
version is visible.

Models of 1.7 and 8 billion parameters in bfloat16, in 1 and in 300 tensors. Systems: ours_view, our
weight plane over CUDA IPC with parameters that become views of the published buffer; ours_copy,
with parameters that keep their memory; torch_shared, what a user would write: tensors shared once
through torch.multiprocessing, copied into and out of.

publish_ms: how long the trainer is held up. adopt_ms: how long the generator is. visible_ms: from
the start of the publish until the generator can compute with the version. floor_ms: the bytes once
read and once written, at the bandwidth of a device-to-device copy in the same run; over_floor:
visible_ms in units of it. Ours also proves each version by its checksum, on both sides. Medians;
every version's values are checked, outside of what is timed.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from bench.gpu.timing import clear, seconds_of, wait
from bench.report import Report

SIZES = {"1.7b": 1_700_000_000, "8b": 8_000_000_000}
TINY = {"tiny": 100_000}
"""Parameters of each model."""
COUNTS = (1, 300)
"""Tensors that they lie in."""
SYSTEMS = ("ours_view", "ours_copy", "torch_shared")
WARM, VERSIONS = 3, 10
"""Versions before the first that counts, which fill and map both buffers; and versions that
count."""
WEIGHTS_S, LEAST_S, ANSWER_S = 90.0, 12.0, 30.0
"""Most seconds for everything; no row is begun with less than LEAST_S; how long one answer may
take."""

Tensors = dict[str, torch.Tensor]
Timed = tuple[float, float]
"""When a version was adopted, by the clock that both processes share, and how long that took, in
seconds."""


def measure_weights(
    report: Report, seconds: float, device: torch.device, tiny: bool = False
) -> bool:
    """A row for each model, number of tensors and system; whether none failed."""
    until = time.monotonic() + seconds
    sizes, whole = TINY if tiny else SIZES, True
    bandwidth = copy_bandwidth(device, 1 << (24 if tiny else 32)) if seconds >= LEAST_S else 0.0
    with tempfile.TemporaryDirectory() as folder, _Generator(device) as generator:
        for name, parameters in sizes.items():
            for count in COUNTS:
                for system in SYSTEMS:
                    case = f"weights {name} x{count}"
                    if until - time.monotonic() < LEAST_S:
                        report.add(case=case, system=system, skipped="too little time is left")
                        continue
                    try:
                        shapes = split(parameters, count)
                        figures = _measure(
                            generator, system, shapes, device, Path(folder), bandwidth
                        )
                        report.add(case=case, system=system, tensors=count, **figures)
                    except Exception as error:
                        whole = False
                        traceback.print_exc()
                        text = f"failed: {type(error).__name__}: {str(error)[:200]}"
                        report.add(case=case, system=system, skipped=text)
                        generator.close()
                    finally:
                        clear(device)
    return whole


def split(parameters: int, count: int) -> list[int]:
    """Elements of each of `count` tensors that hold so many parameters, the last one what is left
    over; as those of models, all but that are multiples of 64.
    """
    elements = parameters // count // 64 * 64 or parameters // count
    return [*[elements] * (count - 1), parameters - elements * (count - 1)]


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes per second, read plus written, of a copy within the device."""
    source = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source), device, 10)


def figures_of(
    published: list[Timed], adopted: list[Timed], nbytes: int, bandwidth: float
) -> dict[str, float]:
    """The medians of a row; `published` holds when each publish began and how long it took."""
    visible = float(
        np.median([at - began for (at, _), (began, _) in zip(adopted, published, strict=True)])
    )
    floor = 2 * nbytes / bandwidth
    return {
        "mib": nbytes / 2**20,
        "publish_ms": 1e3 * float(np.median([took for _, took in published])),
        "adopt_ms": 1e3 * float(np.median([took for _, took in adopted])),
        "visible_ms": 1e3 * visible,
        "floor_ms": 1e3 * floor,
        "over_floor": visible / floor,
    }


class _Generator:
    """The other process, started when the first row needs it, and anew after one that failed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: Any = None
        self._pipe: Any = None
        self._context = torch.multiprocessing.get_context("spawn")

    def __enter__(self) -> _Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, message: Any) -> None:
        """Hand something over."""
        if self._pipe is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(
                target=generate, args=(theirs, str(self._device)), daemon=True
            )
            self._process.start()
            theirs.close()
        self._pipe.send(message)

    def hear(self, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """What it answers; RuntimeError with its error, when it is gone, or when it takes too
        long.
        """
        until = time.monotonic() + ANSWER_S
        while not self._pipe.poll(0.0002):
            meanwhile()
            if time.monotonic() > until or not self._process.is_alive():
                raise RuntimeError(
                    "the generator's process gave no answer; its exit code:"
                    f" {self._process.exitcode}"
                )
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._pipe.close()
        self._process = self._pipe = None


def _measure(
    generator: _Generator,
    system: str,
    shapes: list[int],
    device: torch.device,
    folder: Path,
    bandwidth: float,
) -> dict[str, float]:
    weights = make(shapes, device)
    published: list[Timed] = []
    adopted: list[Timed] = []
    with _trainer(generator, system, weights, device, folder) as (publish, meanwhile):
        for version in range(1, WARM + VERSIONS + 1):
            for tensor in weights.values():
                tensor.fill_(version)
            wait(device)
            began = time.monotonic()
            publish(version)
            published.append((began, time.monotonic() - began))
            adopted.append(generator.hear(meanwhile))
        generator.hear(meanwhile)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return figures_of(published[WARM:], adopted[WARM:], nbytes, bandwidth)


@contextmanager
def _trainer(
    generator: _Generator, system: str, weights: Tensors, device: torch.device, folder: Path
) -> Iterator[tuple[Callable[[int], object], Callable[[], None]]]:
    """(how to publish a version, what to do while the generator works), once the generator is
    ready.
    """
    shapes = [tensor.numel() for tensor in weights.values()]
    if system == "torch_shared":
        shared = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        if device.type == "cpu":
            for tensor in shared.values():
                tensor.share_memory_()
        generator.tell((system, shapes, shared))
        generator.hear()

        def publish(version: int) -> None:
            for name, tensor in weights.items():
                shared[name].copy_(tensor)
            wait(device)
            generator.tell(version)

        yield publish, lambda: None
        return
    from transport.weights import FlatLayout, WeightWriter

    site = place(folder, device)
    with closing(WeightWriter(FlatLayout.of(weights), site, wait_s=ANSWER_S)) as writer:
        generator.tell((system, shapes, site))
        generator.hear(writer.poll)
        while not writer.readers:
            writer.poll()
        yield lambda version: writer.publish(version, weights), writer.poll


def place(folder: Path, device: torch.device) -> Any:
    """Where trainer and generator meet; on a processor, files stand in for the GPU's memory."""
    from transport.weights.executors.cuda_ipc import CudaIpc
    from transport.weights.executors.peer_memory import HostMemory

    memory = None if device.type == "cuda" else HostMemory(folder)
    return CudaIpc(f"ipc://{folder}/weights.sock", device, memory=memory)


def make(shapes: list[int], device: torch.device) -> Tensors:
    """Zeros in bfloat16, by name."""
    return {
        f"w{index}": torch.zeros(numel, dtype=torch.bfloat16, device=device)
        for index, numel in enumerate(shapes)
    }


def generate(pipe: Connection, place: str) -> None:
    """The other process: a case arrives, then versions of it; each answer is a Timed, or the text
    of an error.
    """
    device = torch.device(place)
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            system, shapes, source = pipe.recv()
            try:
                take = _from_torch if system == "torch_shared" else _from_ours
                for answer in take(pipe, system, shapes, source, device):
                    pipe.send(answer)
                source = None
                clear(device)
                pipe.send(True)
            except Exception as error:
                traceback.print_exc()
                pipe.send(f"{type(error).__name__}: {error}")


def _from_torch(
    pipe: Connection, system: str, shapes: list[int], shared: Tensors, device: torch.device
) -> Iterator[Timed | bool]:
    mine = make(shapes, device)
    yield True
    for version in range(1, WARM + VERSIONS + 1):
        pipe.recv()
        began = time.monotonic()
        for name, tensor in mine.items():
            tensor.copy_(shared[name])
        wait(device)
        yield _timed(began, version, mine)


def _from_ours(
    pipe: Connection, system: str, shapes: list[int], site: Any, device: torch.device
) -> Iterator[Any]:
    from transport.weights import WeightReader

    mine = {
        name: torch.nn.Parameter(tensor, requires_grad=False)
        for name, tensor in make(shapes, device).items()
    }
    with closing(
        WeightReader(site, "generator", adopt="view" if system == "ours_view" else "copy")
    ) as reader:
        reader.attach(mine)
        reader.poll()
        yield True
        for version in range(1, WARM + VERSIONS + 1):
            until = time.monotonic() + ANSWER_S
            while not (offer := reader.poll()) or offer.version != version:
                if time.monotonic() > until:
                    raise TimeoutError(f"version {version} was never offered")
                assert reader.socket is not None, "it is open"
                reader.socket.poll(10)
            began = time.monotonic()
            reader.adopt()
            wait(device)
            yield _timed(began, version, mine)


def _timed(began: float, version: int, weights: Mapping[str, torch.Tensor]) -> Timed:
    """When and how long, now that it is done; ValueError when an element is not of that version."""
    ended = time.monotonic()
    wrong = [
        name
        for name, tensor in weights.items()
        if [float(v) for v in tensor.aminmax()] != [version] * 2
    ]
    if wrong:
        raise ValueError(f"version {version} is mixed or incomplete in {wrong[:3]}")
    return ended, ended - began
