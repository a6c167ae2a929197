"""An agent's line to the scheduler: one socket that shows the run's key, and what is wrong with it in words."""

from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.agent.messages import FROM_AGENT, TO_AGENT, FromAgent, ToAgent
from dataflow.system.messages import MESSAGE_BYTES, MessageError
from dataflow.system.security import RunKeys, present

_KEPT = 4096
"""Messages that wait for the scheduler; of what is said after them it hears when the agent joins again."""
_TROUBLE: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "who is there has this run's keys, and says nothing",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "who is there has other keys than this run's, or is no scheduler",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "who is there is no scheduler",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the scheduler there has other keys than this agent was given",
}


class Line:
    """To the one that leads the run now.

    consumes: messages of the scheduler
    produces: messages to it
    waits for: nothing; its owner polls `socket`
    unblocked by: -
    """

    def __init__(self, address: str, keys: RunKeys, name: str) -> None:
        """name: of this agent's process, unique among all that ever join the run."""
        self.address, self.trouble = address, "nobody answers there"
        """Where it leads, and what is wrong with that as far as is known."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 1000), (zmq.SNDHWM, _KEPT), (zmq.MAXMSGSIZE, MESSAGE_BYTES), (zmq.IPV6, "[" in address),
        ):  # fmt: skip
            self.socket.setsockopt(option, int(value))
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        present(self.socket, keys.senders)
        self._monitor: zmq.Socket[Any] = self.socket.get_monitor_socket()
        self.socket.connect(address)

    def say(self, message: FromAgent) -> None:
        """Send a message; never waits."""
        if self.socket.poll(0, zmq.POLLOUT):
            self.socket.send(FROM_AGENT.encode(message))

    def heard(self) -> list[ToAgent]:
        """What has come; what is no message is passed over."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            self.trouble = _TROUBLE.get(event, self.trouble)
        found: deque[ToAgent] = deque()
        while self.socket.poll(0):
            try:
                found.append(TO_AGENT.decode(b"".join(self.socket.recv_multipart())))
            except MessageError as error:
                self.trouble = f"who is there speaks otherwise: {error}"
        return list(found)

    def turn_to(self, address: str) -> None:
        """Speak to another scheduler from now on."""
        self.socket.disconnect(self.address)
        self.socket.connect(address)
        self.address = address

    def close(self) -> None:
        """What was said leaves within a second."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()
