"""The codec of messages between the processes of a run, for this package and for the operators."""

from transport.codec import MESSAGE_BYTES, Codec, MessageError, Natural, Plain

__all__ = ["MESSAGE_BYTES", "Codec", "MessageError", "Natural", "Plain"]
