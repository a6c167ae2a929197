"""The socket at which agents speak to a scheduler; it decides nothing."""

import time
from collections.abc import Callable
from contextlib import closing

import zmq

from dataflow.agent.messages import FROM_AGENT, TO_AGENT, FromAgent, ToAgent, is_repeated
from dataflow.errors import RunError
from dataflow.system.messages import MESSAGE_BYTES, Frames, MessageError, Numbered, first_session
from dataflow.system.security import Guard, RunKeys, endpoint

_AT_ONCE = 64
"""Messages to read between two looks at other work."""


class AgentsSocket:
    """For holders of the run's keys alone.

    consumes: messages of agents
    produces: messages to them, by the identity of each
    waits for: nothing; its owner polls `socket`
    unblocked by: -
    """

    def __init__(
        self,
        listen: str,
        keys: RunKeys,
        number: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """listen: an address of this machine, with a port or without. number: how many schedulers
        there were before. Errors: RunError where it cannot listen there.
        """
        self._clock, self._first_session = clock, first_session(number)
        self._peers: dict[bytes, Numbered] = {}
        self._guard = Guard(keys.receivers)
        self.socket: zmq.Socket[bytes] = self._guard.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.IPV6, int(listen.count(":") > 1)),
        ):
            self.socket.set(option, value)
        self._guard.protect(self.socket)
        try:
            self.socket.bind(f"tcp://{listen}" if listen.count(":") == 1 else endpoint(listen))
        except zmq.ZMQError as error:
            self.close()
            raise RunError(
                f"the scheduler cannot listen for agents at {listen}: {error.strerror}; give an"
                " address of this machine (and no port, or one that nobody has)"
            ) from None
        bound = self.socket.last_endpoint
        assert isinstance(bound, bytes), "what ZeroMQ says of a bound socket"
        self.address = bound.decode()

    def send(self, identity: bytes, message: ToAgent) -> bool:
        """Send a message; whether a connection takes it. Without one, it waits for the next."""
        peer = self._peer(identity)
        return self._send(
            identity,
            peer.frames(TO_AGENT.encode(message), self._clock(), is_kept=not is_repeated(message)),
        )

    def forget(self, identity: bytes) -> None:
        """Drop what an agent has not received."""
        self._peer(identity).begin_anew()

    def remove(self, identity: bytes) -> None:
        """Another agent of the same host follows this one."""
        self._peers.pop(identity, None)

    def received(self, refused: Callable[[str, str], object]) -> list[tuple[bytes, FromAgent]]:
        """The messages that have come, as many as can be handled soon. refused: is told who sent an
        invalid message, and why it is invalid.
        """
        messages: list[tuple[bytes, FromAgent]] = []
        while len(messages) < _AT_ONCE and self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            peer, now = self._peer(identity), self._clock()
            try:
                message = peer.take(frames, now)
                if message is not None:
                    messages.append((identity, FROM_AGENT.decode(message)))
            except MessageError as error:
                refused(identity.decode(errors="backslashreplace"), str(error))
            for missing in peer.missing(now):
                self._send(identity, missing)
        return messages

    def close(self) -> None:
        """Close the socket."""
        with closing(self._guard):
            self.socket.close(0)

    def _peer(self, identity: bytes) -> Numbered:
        return self._peers.setdefault(identity, Numbered(self._first_session))

    def _send(self, identity: bytes, frames: Frames) -> bool:
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True
