"""Messages between the processes of a run: their codec, and numbers that bring them over a network
that is cut.
"""

from transport.codec import MESSAGE_BYTES, Codec, MessageError, Natural, Plain
from transport.numbered import Frames, Numbered, first_session

__all__ = [
    "MESSAGE_BYTES",
    "Codec",
    "Frames",
    "MessageError",
    "Natural",
    "Numbered",
    "Plain",
    "first_session",
]
