"""Every error of the data plane, as one tree.

    TransportError
    ├── FrameError (ValueError)      bytes this project never sends; never taken, never a crash
    │   ├── MessageError             a message that its protocol does not have, or cannot carry
    │   └── SchemaMismatch           a batch, or a peer, with another schema than the edge's
    ├── BatchTooLarge (ValueError)   one batch that could never be sent, whatever the credit
    ├── AddressError (ValueError)    an address, folder or key that would open the channel to others
    ├── SenderRefused                the other side answered, and said no
    ├── PeerGone                     the other side vanished and is not back before the deadline
    └── WaitTimeout (TimeoutError)   a wait reached its deadline: who waited for whom, on which edge

Messages have three parts: what is wrong, what was found, what to do.
"""


class TransportError(Exception):
    """Anything the data plane raises on purpose."""


class FrameError(TransportError, ValueError):
    """Bytes that cannot be taken: damaged, oversized, or not of this protocol."""


class MessageError(FrameError):
    """A message of another protocol or version, of an unknown kind, or with a value that is not of
    its field's type.
    """


class SchemaMismatch(FrameError):
    """Columns that are not the columns of the edge."""


class BatchTooLarge(TransportError, ValueError):
    """A batch larger than the receiver would ever hold, or than it takes in one message."""


class AddressError(TransportError, ValueError):
    """An address that is malformed, or open to others than the processes of this run."""


class SenderRefused(TransportError):
    """The receiver refused this sender."""


class PeerGone(TransportError):
    """A peer vanished, and its deadline passed."""


class WaitTimeout(TransportError, TimeoutError):
    """A wait that reached its deadline."""
