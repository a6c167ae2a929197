"""A host's files for the others of its run: a socket in a thread of its agent."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import zmq

from dataflow.errors import RunError
from dataflow.folder.disks.messages import FROM_FILES, TO_FILES, Answered
from dataflow.folder.disks.reading import answer
from dataflow.system.messages import MessageError
from dataflow.system.security import Guard, RunKeys, endpoint

_TURN_MS = 100
_END_S = 5.0


class FileServer:
    """For holders of the run's keys alone.

    consumes: questions
    produces: an answer to each, in their order
    waits for: questions; the disk
    unblocked by: they; `close`
    """

    def __init__(self, folder: Path, address: str, keys: RunKeys) -> None:
        """folder: of the run, on this host. address: of this host. Errors: RunError where it cannot
        listen there.
        """
        self._folder, self._guard = folder, Guard(keys.receivers)
        self._socket: zmq.Socket[Any] = self._guard.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, TO_FILES.max_bytes),
            (zmq.IPV6, int(":" in address)),
        ):
            self._socket.set(option, value)
        self._guard.protect(self._socket)
        try:
            self._socket.bind(endpoint(address))
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._guard.close()
            raise RunError(
                f"this host gives its files at {address}, but cannot listen there:"
                f" {error.strerror}; name an address or an interface of this host"
                " (DATAFLOW_AGENT_ADDRESS)"
            ) from None
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        """The address at which it listens."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving files."""
        self._ends.set()
        self._thread.join(_END_S)
        if not self._thread.is_alive():  # else the disk hangs, and the process is about to end
            self._guard.close()

    def _run(self) -> None:
        with contextlib.closing(self._socket):
            while not self._ends.is_set():
                if self._socket.poll(_TURN_MS):
                    self._answer()

    def _answer(self) -> None:
        client, *frames = self._socket.recv_multipart()
        try:
            question = TO_FILES.decode(b"".join(frames))
        except MessageError:
            return  # of nobody that could be answered
        reply = Answered(question.ticket, answer(self._folder, question.what))
        self._socket.send_multipart([client, FROM_FILES.encode(reply)])
