"""What the ranks of every operator say to each other; each operator's protocol adds messages of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.system.messages import Codec

MESSAGE_BYTES = 1 << 36
"""A step's rows may be large; who holds the other end is a process of this run."""


@dataclass(frozen=True)
class Numbers:
    """An array of one dimension, as a field of a message."""

    dtype: str
    data: bytes

    @classmethod
    def of(cls, values: Any, dtype: Any = None) -> Numbers:
        """Its type (`dtype`, if given) and its bytes."""
        array = np.ascontiguousarray(values, dtype)
        return cls(array.dtype.str, array.tobytes())

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The numbers, writable."""
        return np.frombuffer(self.data, np.dtype(self.dtype)).copy()


@dataclass(frozen=True)
class Close:
    """Rank 0: all is over."""


@dataclass(frozen=True)
class Load:
    """Rank 0: it is your turn to read the model."""


@dataclass(frozen=True)
class Loaded:
    """Another rank: I have read it."""


@dataclass(frozen=True)
class Failed:
    """Another rank: this error ends me."""

    kind: str
    """The error's class."""
    text: str


def codec_of(protocol: str, *kinds: type[Any]) -> Codec[Any]:
    """The messages of the ranks of one operator."""
    return Codec(protocol, 1, Close, Load, Loaded, Failed, *kinds, max_bytes=MESSAGE_BYTES)
