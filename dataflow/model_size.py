"""How large a model is, read from the header of its safetensors files without loading a byte of it."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from dataflow.graph import Graph

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters of a model."""

    parameters: int

    def memory_bytes(self, dtype: str, trains: bool) -> int:
        """Estimate: weights alone to read; weights, gradients and two AdamW moments in float32 to train."""
        return self.parameters * (4 * 4 if trains else _BYTES[dtype])


def measure_models(graph: Graph) -> dict[str, ModelSize]:
    """Sizes by source, of those models whose folder is at hand."""
    sources = {operator.uses.source for operator in graph.operators.values() if operator.uses is not None}
    found = {source: _measure(Path(source)) for source in sorted(sources)}
    return {source: size for source, size in found.items() if size is not None}


def _measure(folder: Path) -> ModelSize | None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    return ModelSize(parameters=sum(_parameters(file) for file in files))


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file: 8 bytes of length, then a JSON header with every tensor's shape."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 << 20:
            return 0
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
