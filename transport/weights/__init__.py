"""The weight plane: one model's tensors, version by version, from a trainer's memory into its generators'.

Layouts, messages and the handshake never import torch; what moves bytes does, and is imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from transport.weights.errors import (
    AddressTaken,
    ChecksumMismatch,
    LayoutMismatch,
    MessageError,
    SegmentError,
    WeightError,
)
from transport.weights.flat import FlatLayout, TensorSpec
from transport.weights.handshake import Pace, ReaderStatus
from transport.weights.layout import Held, Layout
from transport.weights.messages import Note, Offer
from transport.weights.plan import Plan
from transport.weights.reshard import reshard
from transport.weights.sharded.groups import Deadlines
from transport.weights.shards import Mesh, Shards

if TYPE_CHECKING:
    from transport.weights.cuda_ipc import CudaIpc
    from transport.weights.local import Hub
    from transport.weights.reader import WeightReader
    from transport.weights.sharded.reader import ShardedReader
    from transport.weights.sharded.writer import ShardedWriter
    from transport.weights.shared_memory import SharedMemory
    from transport.weights.writer import WeightWriter

__all__ = [
    "AddressTaken",
    "ChecksumMismatch",
    "CudaIpc",
    "Deadlines",
    "FlatLayout",
    "Held",
    "Hub",
    "Layout",
    "LayoutMismatch",
    "Mesh",
    "MessageError",
    "Note",
    "Offer",
    "Pace",
    "Plan",
    "ReaderStatus",
    "SegmentError",
    "ShardedReader",
    "ShardedWriter",
    "Shards",
    "SharedMemory",
    "TensorSpec",
    "WeightError",
    "WeightReader",
    "WeightWriter",
    "reshard",
]

_HEAVY = {
    "CudaIpc": "cuda_ipc",
    "Hub": "local",
    "SharedMemory": "shared_memory",
    "ShardedReader": "sharded.reader",
    "ShardedWriter": "sharded.writer",
    "WeightReader": "reader",
    "WeightWriter": "writer",
}


def __getattr__(name: str) -> object:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
