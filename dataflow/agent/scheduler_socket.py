"""An agent's socket to the scheduler, which shows the run's key, and what is wrong with the
connection in plain text.

What is said arrives, though the connection may be lost and made again.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.agent.messages import FROM_AGENT, TO_AGENT, FromAgent, ToAgent, is_repeated
from dataflow.system.messages import MESSAGE_BYTES, Frames, MessageError, Numbered
from dataflow.system.security import RunKeys, give_up_soon, present

_KEPT = 4096
"""Messages that wait for a connection; those after them are sent when the scheduler is heard
again."""
_TROUBLE: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "who is there has this run's keys, and says nothing",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "who is there has other keys than this run's, or is no scheduler"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "who is there is no scheduler",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the scheduler there has other keys than this agent was given",
}


class SchedulerSocket:
    """To the one that leads the run now.

    consumes: messages of the scheduler
    produces: messages to it
    waits for: nothing; its owner polls `socket`
    unblocked by: -
    """

    def __init__(
        self, address: str, keys: RunKeys, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """name: of this agent's process, unique among all that ever join the run."""
        self.address, self.trouble = address, "nobody answers there"
        """Where it leads, and what is wrong with that as far as is known."""
        self._clock, self._numbered = clock, Numbered()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.SNDHWM, _KEPT),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES),
            (zmq.IPV6, "[" in address),
        ):
            self.socket.setsockopt(option, int(value))
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        present(self.socket, keys.senders)
        give_up_soon(self.socket, address)
        self._monitor: zmq.Socket[Any] = self.socket.get_monitor_socket()
        self.socket.connect(address)

    def say(self, message: FromAgent) -> None:
        """Send a message; never waits."""
        self._send(
            self._numbered.frames(
                FROM_AGENT.encode(message), self._clock(), is_kept=not is_repeated(message)
            )
        )

    def heard(self) -> list[ToAgent]:
        """What has come; what is no message is passed over."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            self.trouble = _TROUBLE.get(event, self.trouble)
        found: deque[ToAgent] = deque()
        while self.socket.poll(0):
            try:
                message = self._numbered.take(self.socket.recv_multipart(), self._clock())
                if message is not None:
                    found.append(TO_AGENT.decode(message))
            except MessageError as error:
                self.trouble = f"who is there speaks otherwise: {error}"
        for frames in self._numbered.missing(self._clock()):
            self._send(frames)
        return list(found)

    def turn_to(self, address: str) -> None:
        """Speak to another scheduler from now on."""
        self.socket.disconnect(self.address)
        self.socket.connect(address)
        self.address = address
        self._numbered.begin_anew(with_another=True)

    def close(self) -> None:
        """What was said leaves within a second."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()

    def _send(self, frames: Frames) -> None:
        if self.socket.poll(0, zmq.POLLOUT):
            self.socket.send_multipart(frames)
