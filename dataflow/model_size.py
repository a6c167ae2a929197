"""How large a model is, read from the header of its safetensors files without loading a byte of it."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import ALL_LINEAR, LoRA

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model."""

    parameters: int
    linear: tuple[tuple[str, int, int], ...] = ()
    """(last name, outputs, inputs) of the layers that may have adapters."""

    def memory_bytes(self, dtype: str, trains: bool, lora: LoRA | None = None) -> int:
        """Estimate: weights alone to read; weights, gradients and two AdamW moments in float32 to train.

        With adapters these four are of them alone, beside weights in `dtype`; a reader has the adapted layers twice.
        """
        if lora is None:
            return self.parameters * (4 * 4 if trains else _BYTES[dtype])
        adapted = sum(rows * columns for _, rows, columns in self._adapted(lora))
        beside = 4 * 4 * self._adapters(lora) if trains else 4 * self._adapters(lora) + adapted * _BYTES[dtype]
        return self.parameters * _BYTES[dtype] + beside

    def sent_bytes(self, dtype: str, lora: LoRA | None = None) -> int:
        """Of a version on its way to a reader."""
        return _BYTES[dtype] * (self.parameters if lora is None else self._adapters(lora))

    def _adapted(self, lora: LoRA) -> list[tuple[str, int, int]]:
        return [layer for layer in self.linear if lora.targets == ALL_LINEAR or layer[0] in lora.targets]

    def _adapters(self, lora: LoRA) -> int:
        """Parameters of A and B."""
        return sum(lora.rank * (rows + columns) for _, rows, columns in self._adapted(lora))


def measure_models(graph: Graph) -> dict[str, ModelSize]:
    """Sizes by source, of those models whose folder is at hand."""
    sources = {operator.uses.source for operator in graph.operators.values() if operator.uses is not None}
    found = {source: _measure(Path(source)) for source in sorted(sources)}
    return {source: size for source, size in found.items() if size is not None}


def _measure(folder: Path) -> ModelSize | None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    layers = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    inner = {path: shape for path, shape in layers.items() if not _is_outer(path)}
    linear = tuple((path.rpartition(".")[2], rows, columns) for path, (rows, columns) in inner.items())
    return ModelSize(parameters=sum(map(math.prod, shapes.values())), linear=linear)


def _is_outer(path: str) -> bool:
    """Whether a matrix is an embedding or the output layer, or chooses experts."""
    last = path.rpartition(".")[2]
    return "embed" in last or last in ("lm_head", "wte", "wpe", "gate", "router")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name of a safetensors file: 8 bytes of length, then a JSON header with every tensor's."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 << 20:
            return {}
        header = json.loads(stream.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
