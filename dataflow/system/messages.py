"""Messages between the processes of a run: their codec, and numbers that bring them over a network
that is cut.
"""

from transport.codec import (
    MESSAGE_BYTES,
    Codec,
    Message,
    MessageError,
    Natural,
    Plain,
    Secret,
    field,
)
from transport.numbered import Frames, Numbered, first_session

__all__ = [
    "MESSAGE_BYTES",
    "Codec",
    "Frames",
    "Message",
    "MessageError",
    "Natural",
    "Numbered",
    "Plain",
    "Secret",
    "field",
    "first_session",
]
