"""Errors of the weight plane, each in three parts: what is wrong, what was found, what to do next.

TransportError
└── WeightError            misuse: wrong order of calls, a version that goes back
    ├── LayoutMismatch     two descriptions of one model differ
    │   └── ReaderMismatch     the trainer's, and that of one of its readers
    ├── ChecksumMismatch   the bytes of a version are not those that were published
    ├── AddressTaken       another writer, or another reader of this name, is alive here
    └── SegmentError       the memory for a version cannot be had
"""

from transport.errors import TransportError

__all__ = [
    "AddressTaken",
    "ChecksumMismatch",
    "LayoutMismatch",
    "ReaderMismatch",
    "SegmentError",
    "WeightError",
]


class WeightError(TransportError):
    """The weight plane was used in a way it cannot serve."""


class LayoutMismatch(WeightError):
    """Two layouts, or a layout and the tensors handed in, do not describe the same model."""


class ReaderMismatch(LayoutMismatch):
    """One reader cannot take what the trainer sends; others may."""

    def __init__(self, reader: str, why: str) -> None:
        super().__init__(why)
        self.reader = reader
        """Its name."""


class ChecksumMismatch(WeightError):
    """A version's bytes are damaged; the reader keeps the version it had."""


class AddressTaken(WeightError):
    """Another live process already owns the address or the reader's name."""


class SegmentError(WeightError):
    """A buffer for a version could not be allocated."""
