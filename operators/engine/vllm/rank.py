"""A rank of vLLM as a rank of a reader: what each of its workers does beside decoding.

vLLM mixes `RankExtension` into its worker and calls the methods by name, on all ranks at once, in
the order in which it is asked. A method that raised would shift all later answers by one, so that
each returns what it has come to, and what it could not do as text.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from dataflow.limits import Limits
from dataflow.weight_ends import WeightSite, leave
from dataflow.worker.weight_ports import open_reader
from operators.engine.vllm.adapter_weights import AdapterWeights
from operators.engine.vllm.internals import ModelWeights
from operators.engine.vllm.landing import Piece, local_shape, slices_of

EXTENSION = f"{__name__}.RankExtension"


def memory_unnamed() -> None:
    """Take the names of the shared memory that this process maps, and all others of vLLM's by now:
    so nothing of it is left behind, however they end.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        *_, file = line.split(maxsplit=5)
        if file.startswith("/dev/shm/"):
            Path(file.removesuffix(" (deleted)")).unlink(missing_ok=True)


class RankWeights:
    """This rank's slices, its end of the weight plane, and the model that computes with them."""

    def __init__(
        self,
        worker: Any,
        shapes: Mapping[str, Sequence[int]],
        layers: Mapping[str, Sequence[Any]],
        start: str | None,
    ) -> None:
        """Learn which slices these are, and see that the model computes with them. layers, start:
        as `messages.Adapters`, none where the model itself is sent.
        """
        self._device = torch.device(worker.device)
        self.rank = int(worker.rank)
        full = {name: tuple(shape) for name, shape in shapes.items()}
        self._model: ModelWeights | AdapterWeights
        if layers:
            self._model = AdapterWeights(worker, layers, full, start)
        else:
            config = worker.vllm_config.model_config
            self._model = ModelWeights(
                worker.model_runner.model, config, self._device, config.dtype, full
            )
        self.pieces = slices_of(full, self._model.recorded())
        self._tensors = {
            name: torch.nn.Parameter(
                torch.empty(local_shape(piece), dtype=self._model.dtype, device=self._device),
                requires_grad=False,
            )
            for name, piece in self.pieces.items()
        }
        self._model.attach(self.pieces, self._tensors)
        self._unseen = self._model.prove()
        self._end: Any = None

    def open(
        self,
        site: WeightSite,
        pieces: Sequence[Mapping[str, Piece]],
        limits: Limits,
        attempt: int,
    ) -> tuple[int, list[str]]:
        """Open this rank's end; the bytes of a version that it takes, and the kinds of layers that
        are not seen to compute with it. pieces: of each rank.
        """
        self._end = open_reader(
            site,
            self.rank,
            str(self._device),
            self._tensors,
            pieces,
            limits=limits,
            attempt=attempt,
        )
        return sum(tensor.nbytes for tensor in self._tensors.values()), self._unseen

    def offered(self) -> tuple[int, dict[str, Any]]:
        """Rank 0: the version that could be taken now, -1 for none, and the trainer's note."""
        if self.rank or self._end is None:
            return -1, {}
        offer = self._end.poll()
        return (-1 if offer is None else int(offer.version)), dict(self._end.note)

    def verify(self) -> dict[str, Any] | None:
        """Rank 0: hold what is offered, verified; what the others need to hold the same."""
        if self.rank:
            return None
        offer = self._end.verify()
        return offer and {
            "segment": offer.segment,
            "version": offer.version,
            "layout": offer.layout,
        }

    def enter(self, segment: str, version: int, layout: Mapping[str, Any] | None) -> bool:
        """Whether this rank holds the version that rank 0 holds."""
        return self.rank == 0 or self._end.enter(segment, version, layout)

    def decline(self) -> None:
        """Let go of it."""
        self._end.decline()

    def adopt(self) -> int:
        """Compute with it; its number."""
        version = self._end.adopt()
        self._model.load()
        return int(version)

    def close(self) -> None:
        """Leave the weight plane."""
        if self._end is not None:
            leave(self._end)
            self._end = None


def _told(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def told(*arguments: Any) -> dict[str, Any]:
        try:
            return {"done": method(*arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}

    return told


class RankExtension:
    """What vLLM's worker can be asked for besides; `self` is the worker. Plain values alone."""

    weights_of_run: RankWeights

    @_told
    def memory_unnamed(self) -> None:
        """As the function."""
        memory_unnamed()

    @_told
    def weights_record(
        self, shapes: dict[str, list[int]], layers: dict[str, list[Any]], start: str | None
    ) -> dict[str, Any]:
        """The slices that this rank takes, by the trainer's names; arguments as `RankWeights`."""
        self.weights_of_run = RankWeights(self, shapes, layers, start)
        return dict(self.weights_of_run.pieces)

    @_told
    def weights_open(
        self, site: bytes, pieces: list[dict[str, Any]], limits: bytes, attempt: int
    ) -> tuple[int, list[str]]:
        """As `RankWeights.open`; site and limits as MessagePack."""
        return self.weights_of_run.open(
            msgspec.msgpack.decode(site, type=WeightSite),
            pieces,
            msgspec.msgpack.decode(limits, type=Limits),
            attempt,
        )

    @_told
    def weights_offered(self) -> tuple[int, dict[str, Any]]:
        """As `RankWeights.offered`."""
        return self.weights_of_run.offered()

    @_told
    def weights_verify(self) -> dict[str, Any] | None:
        """As `RankWeights.verify`."""
        return self.weights_of_run.verify()

    @_told
    def weights_enter(self, segment: str, version: int, layout: dict[str, Any] | None) -> bool:
        """As `RankWeights.enter`."""
        return self.weights_of_run.enter(segment, version, layout)

    @_told
    def weights_decline(self) -> None:
        """As `RankWeights.decline`."""
        self.weights_of_run.decline()

    @_told
    def weights_adopt(self) -> int:
        """As `RankWeights.adopt`."""
        return self.weights_of_run.adopt()

    @_told
    def weights_close(self) -> None:
        """As `RankWeights.close`."""
        self.weights_of_run.close()
