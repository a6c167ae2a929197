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
from transport.weights.messages import Note, Offer

if TYPE_CHECKING:
    from transport.weights.local import Hub
    from transport.weights.reader import WeightReader
    from transport.weights.shared_memory import SharedMemory
    from transport.weights.writer import WeightWriter

__all__ = [
    "AddressTaken",
    "ChecksumMismatch",
    "FlatLayout",
    "Hub",
    "LayoutMismatch",
    "MessageError",
    "Note",
    "Offer",
    "Pace",
    "ReaderStatus",
    "SegmentError",
    "SharedMemory",
    "TensorSpec",
    "WeightError",
    "WeightReader",
    "WeightWriter",
]

_HEAVY = {"Hub": "local", "SharedMemory": "shared_memory", "WeightReader": "reader", "WeightWriter": "writer"}


def __getattr__(name: str) -> object:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
