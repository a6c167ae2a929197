"""This process's end of a socket pair with a rank here, or with rank 0: bytes to it, and bytes from
it.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from dataflow.worker.rank_messages import CHUNK_BYTES


@dataclass
class RankPipe:
    """One end, which never blocks, and what is under way through it."""

    end: socket.socket
    out: bytearray = field(default_factory=bytearray)
    """Bytes that the other side has not taken yet."""
    speaks: bool = True
    """Whether the other side may still say something."""

    @property
    def wanted(self) -> int:
        """What a poller is to look for; 0: nothing."""
        return (zmq.POLLIN if self.speaks else 0) | (zmq.POLLOUT if self.out else 0)

    def give(self) -> None:
        """Hand over what the other side takes now; for one that is gone nothing stays."""
        try:
            while self.out:
                del self.out[: self.end.send(self.out[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()

    def take(self) -> Iterator[bytes]:
        """What the other side has sent; finally empty, once it will send no more."""
        with contextlib.suppress(BlockingIOError):
            while self.speaks:
                try:
                    data = self.end.recv(CHUNK_BYTES)
                except ConnectionResetError:
                    data = b""
                self.speaks = bool(data)
                yield data
