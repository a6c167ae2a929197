"""The data plane: record batches between workers, in order, bounded by credit, acknowledged."""

from transport.data.counts import EdgeCounts, EndCounts
from transport.data.local import Delivery, LocalInlet, LocalOutlet
from transport.data.receiver import Receiver
from transport.data.sender import AnswerSender, Sender
from transport.data.sockets import Network, SocketNetwork, keep_freed_memory
from transport.security import Keys, make_keys

__all__ = [
    "AnswerSender",
    "Delivery",
    "EdgeCounts",
    "EndCounts",
    "Keys",
    "LocalInlet",
    "LocalOutlet",
    "Network",
    "Receiver",
    "Sender",
    "SocketNetwork",
    "keep_freed_memory",
    "make_keys",
]
