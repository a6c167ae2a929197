"""Where the workers of one host speak: their agent passes on what they say, many messages in one
message of its own.

So a scheduler has one connection for each host. Of the heartbeats that a worker gives between two
messages only the last is passed on; everything else is, in order.
"""

from collections.abc import Iterable
from pathlib import Path

import zmq

from dataflow.agent.messages import FromWorkers
from dataflow.system.security import Listener
from dataflow.worker.messages import TO_SCHEDULER, TO_WORKER, Heard, Heartbeat

_FILE = "control"
"""In the host's folder of sockets."""
_HEARD = TO_WORKER.encode(Heard())
PROMPT_S = 0.02
"""Within which messages are passed on that are no heartbeats."""


def address(sockets: str) -> str:
    """Where the workers of a host speak, by its folder of sockets."""
    return f"ipc://{sockets}/{_FILE}"


class Relay:
    """Between the workers of a host and its agent's line.

    consumes: what workers say; what the scheduler says to them
    produces: both, passed on; an answer to each heartbeat, while the scheduler is heard
    waits for: nothing; its owner polls `socket`
    unblocked by: -
    """

    def __init__(self, sockets: Path) -> None:
        self._listener = Listener(
            "the agent", address(str(sockets)), None, {zmq.ROUTER_HANDOVER: 1}
        )
        self.socket = self._listener.socket
        self._messages: list[tuple[str, bytes]] = []
        self._beats: dict[str, bytes] = {}
        """By worker, its last heartbeat."""
        self.beat_s = 0.2
        """Between two messages that have nothing but heartbeats."""
        self._said = self._beaten = 0.0

    def hear(self, *, answers: bool) -> None:
        """Take in what workers say. answers: whether the scheduler is there."""
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            message, name = b"".join(frames), identity.decode(errors="backslashreplace")
            if not TO_SCHEDULER.is_a(Heartbeat, message):
                self._flush(name)
                self._messages.append((name, message))
                continue
            self._beats[name] = message
            if answers:
                self.socket.send_multipart([identity, _HEARD])

    @property
    def waits(self) -> bool:
        """Whether there are messages that are soon due."""
        return bool(self._messages)

    def due(self, now: float, *, last: bool = False) -> FromWorkers | None:
        """What is to be passed on now; None: nothing. last: all that there is, as a worker has
        ended.
        """
        if last or now - self._beaten >= self.beat_s:
            self._beaten = now
            for name in list(self._beats):
                self._flush(name)
        elif now - self._said < PROMPT_S:
            return None
        if not self._messages:
            return None
        messages, self._messages, self._said = self._messages, [], now
        return FromWorkers(
            names=[name for name, _ in messages], messages=[message for _, message in messages]
        )

    def say(self, names: Iterable[str], messages: Iterable[bytes]) -> None:
        """Pass on to workers; nobody hears it where one is not there."""
        for name, message in zip(names, messages, strict=True):
            self.socket.send_multipart([name.encode(), message])

    def close(self) -> None:
        """Let go of the socket."""
        self._listener.close()

    def _flush(self, name: str) -> None:
        """The heartbeat that a worker gave before what it says next."""
        message = self._beats.pop(name, None)
        if message is not None:
            self._messages.append((name, message))
