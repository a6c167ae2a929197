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
from transport.life import Life, Refused, Said, replaced
from transport.numbered import Frames, Numbered

__all__ = [
    "MESSAGE_BYTES",
    "Codec",
    "Frames",
    "Life",
    "Message",
    "MessageError",
    "Natural",
    "Numbered",
    "Plain",
    "Refused",
    "Said",
    "Secret",
    "field",
    "replaced",
]
