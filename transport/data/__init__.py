"""The data plane: record batches between workers, in order, bounded by credit, acknowledged."""

from transport.data.answers import AnswerSender
from transport.data.channel import Network
from transport.data.counts import EdgeCounts, EndCounts
from transport.data.delivery import Delivery
from transport.data.local import LocalInlet, LocalOutlet
from transport.data.memory import keep_freed_memory
from transport.data.receiver import Receiver
from transport.data.sender import Sender
from transport.data.sockets import SocketNetwork
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
