"""The weight plane: one model's tensors, version by version, from a trainer's memory into its
generators'.

Layouts and the protocol never import torch; what moves bytes does, and is imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from transport.errors import MessageError
from transport.weights.errors import (
    AddressTaken,
    ChecksumMismatch,
    LayoutMismatch,
    SegmentError,
    WeightError,
)
from transport.weights.layout.flat import FlatLayout, TensorSpec
from transport.weights.layout.layout import Layout, Mesh, Shards, TensorLayout
from transport.weights.layout.plan import CopyPlan
from transport.weights.layout.reshard import reshard
from transport.weights.protocol.membership import Deadlines, Timing
from transport.weights.protocol.messages import Note, Offer
from transport.weights.protocol.roster import ReaderStatus

if TYPE_CHECKING:
    from transport.weights.executors.cuda_ipc import CudaIpc
    from transport.weights.executors.local import Hub
    from transport.weights.executors.shared_memory import SharedMemory
    from transport.weights.reader import RankReader, WeightReader
    from transport.weights.sharded.reader import ShardedReader
    from transport.weights.sharded.writer import ShardedWriter
    from transport.weights.writer import WeightWriter

__all__ = [
    "AddressTaken",
    "ChecksumMismatch",
    "CopyPlan",
    "CudaIpc",
    "Deadlines",
    "FlatLayout",
    "Hub",
    "Layout",
    "LayoutMismatch",
    "Mesh",
    "MessageError",
    "Note",
    "Offer",
    "RankReader",
    "ReaderStatus",
    "SegmentError",
    "ShardedReader",
    "ShardedWriter",
    "Shards",
    "SharedMemory",
    "TensorLayout",
    "TensorSpec",
    "Timing",
    "WeightError",
    "WeightReader",
    "WeightWriter",
    "reshard",
]

_HEAVY = {
    "CudaIpc": "executors.cuda_ipc",
    "Hub": "executors.local",
    "SharedMemory": "executors.shared_memory",
    "RankReader": "reader",
    "ShardedReader": "sharded.reader",
    "ShardedWriter": "sharded.writer",
    "WeightReader": "reader",
    "WeightWriter": "writer",
}


def __getattr__(name: str) -> object:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
