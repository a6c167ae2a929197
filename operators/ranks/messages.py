"""What the ranks of every operator say to each other; each operator's protocol adds messages of its
own.
"""

from __future__ import annotations

from typing import Any

from dataflow.system.messages import Codec, Message

MESSAGE_BYTES = 1 << 36
"""A step's rows may be large; who holds the other end is a process of this run."""


class Close(Message):
    """Rank 0: all is over."""


class Load(Message):
    """Rank 0: read the model."""


class Loaded(Message):
    """Another rank: I have read it."""


class Build(Message):
    """Rank 0: all have read the model."""


class Sleep(Message):
    """Rank 0: put your memory aside, as I do."""


class Wake(Message):
    """Rank 0: take it again."""


class SleepDone(Message):
    """Another rank: I have done so."""


class Failed(Message):
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
