"""The thread of a reader that takes versions for its whole host: from the network into segments,
which it offers.
"""

from __future__ import annotations

import threading

import zmq

from transport.weights.mirror.receiver import MirrorReceiver
from transport.weights.mirror.writer import MirrorWriter
from transport.weights.protocol.messages import Note

LOOK_MS = 50
"""Between two looks at the deadlines."""


class Mirror(threading.Thread):
    """Goes on whatever the loop of its reader is at.

    Consumes: versions of a trainer on another host. Produces: the same versions, offered to the
    readers of this host. Waits for: messages of either side, at most `LOOK_MS`. Unblocked by:
    messages, the time.
    """

    def __init__(self, writer: MirrorWriter, receiver: MirrorReceiver) -> None:
        """Both ends are its own from now on."""
        super().__init__(name="weights-mirror", daemon=True)
        self.error: BaseException | None = None
        """What ended it."""
        self._writer, self._receiver = writer, receiver
        self._ending = threading.Event()
        self._note: Note = {}

    def run(self) -> None:
        """Serve until closed."""
        try:
            self._receiver.start()
            poller = zmq.Poller()
            poller.register(self._receiver.socket, zmq.POLLIN)
            if self._writer.socket is not None:
                poller.register(self._writer.socket, zmq.POLLIN)
            while not self._ending.is_set():
                self._turn()
                poller.poll(LOOK_MS)
        except BaseException as error:
            self.error = error
        finally:
            self._receiver.close()
            self._writer.close()

    def end(self) -> None:
        """Leave both sides, soon."""
        self._ending.set()

    def close(self, limit_s: float = 20.0) -> None:
        """The same, and wait for it."""
        self.end()
        if self.ident is not None:
            self.join(limit_s)

    def _turn(self) -> None:
        self._writer.poll()
        if (arrival := self._receiver.arrived()) is not None:
            self._pass_note()
            self._writer.hand_on(arrival.segment, arrival.version, arrival.line)
        self._receiver.go_on()
        self._pass_note()
        self._receiver.serves(*self._writer.taken)

    def _pass_note(self) -> None:
        if (note := self._receiver.note) != self._note:
            self._note = note
            self._writer.tell(note)
