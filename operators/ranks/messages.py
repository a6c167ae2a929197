"""What the ranks of every operator say to each other; each operator's protocol adds messages of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.system.messages import Codec
from dataflow.tokens.rollout_tokens import KINDS, RolloutTokens
from dataflow.tokens.sampling_mask import SamplingMask

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


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """`RolloutTokens`, as a field of a message."""

    ids: Numbers
    mask: Numbers
    logprobs: Numbers
    versions: Numbers
    sampling_mask: tuple[Numbers, Numbers] | None
    """Its ids and its offsets."""

    @classmethod
    def of(cls, tokens: RolloutTokens) -> Tokens:
        """The message of tokens."""
        mask = tokens.sampling_mask
        return cls(
            **{name: Numbers.of(getattr(tokens, name), kind) for name, kind in KINDS.items()},
            sampling_mask=None
            if mask is None
            else (Numbers.of(mask.ids, np.int32), Numbers.of(mask.offsets, np.int64)),
        )

    @property
    def tokens(self) -> RolloutTokens:
        """The tokens again, writable."""
        mask = (
            None
            if self.sampling_mask is None
            else SamplingMask(*(numbers.array for numbers in self.sampling_mask))
        )
        return RolloutTokens(
            **{name: getattr(self, name).array for name in KINDS}, sampling_mask=mask
        )


@dataclass(frozen=True)
class Close:
    """Rank 0: all is over."""


@dataclass(frozen=True)
class Load:
    """Rank 0: read the model."""


@dataclass(frozen=True)
class Loaded:
    """Another rank: I have read it."""


@dataclass(frozen=True)
class Build:
    """Rank 0: all have read the model."""


@dataclass(frozen=True)
class Sleep:
    """Rank 0: put your memory aside, as I do."""


@dataclass(frozen=True)
class Wake:
    """Rank 0: take it again."""


@dataclass(frozen=True)
class SleepDone:
    """Another rank: I have done so."""


@dataclass(frozen=True)
class Failed:
    """Another rank: this error ends me."""

    kind: str
    """The error's class."""
    text: str


def codec_of(protocol: str, *kinds: type[Any]) -> Codec[Any]:
    """The messages of the ranks of one operator."""
    return Codec(
        protocol,
        1,
        Close,
        Load,
        Loaded,
        Build,
        Sleep,
        Wake,
        SleepDone,
        Failed,
        *kinds,
        max_bytes=MESSAGE_BYTES,
    )
