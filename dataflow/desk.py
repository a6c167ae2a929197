"""What the scheduler has in its hands: the socket to its workers, the forkserver, the folder of the run's sockets."""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import zmq

from dataflow import socket_folder
from dataflow.errors import RunError
from dataflow.forkserver import Main
from dataflow.nursery import Nursery, TakenOver
from dataflow.secure import MESSAGE_BYTES, Guard, RunKeys, endpoint, reachable, word
from dataflow.unheard import Unheard

log = logging.getLogger(__name__)

Message = tuple[str, Any]
"""Who said it, and what."""
_COMMAND = "?"
"""Before the name of somebody who gives commands: no worker is called so."""
_REMEMBERED = 100
_DECIDE_NOTHING = ("heard", "ask_stacks")
_DOOR = "door"
"""In the folder: where a successor of the scheduler asks for the workers."""


class Desk:
    """Messages and processes; decides nothing.

    consumes: messages of workers and of commands; events of the forkserver
    produces: both as plain values; words to workers, processes, signals: what was decided leaves with the next `wait`
    waits for: either, so long as it is told to
    unblocked by: either
    """

    def __init__(
        self, main: Main, environment: Mapping[str, str], preload: Callable[[], None], listen: str = "",
        keys: RunKeys | None = None, successor: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """Fork the forkserver, which runs `main` in every worker; call this before the process has threads.

        listen: where workers speak to the scheduler, with `keys`; empty: in the folder, as commands always do.
        successor: runs a scheduler in the place of this process when it has died.
        """
        folder = socket_folder.make()
        nursery = Nursery(
            main, environment, preload, clean_up=lambda: shutil.rmtree(folder, ignore_errors=True),
            door=str(folder / _DOOR), successor=successor,
        )  # fmt: skip
        self._open(folder, nursery, endpoint(listen) if listen else f"ipc://{folder}/control", keys)

    def _open(self, folder: Path, nursery: Nursery, address: str, keys: RunKeys | None) -> None:
        self.folder, self._nursery = folder, nursery
        self._outgoing: deque[Callable[[], object]] = deque()
        self.ahead: Callable[[], None] = lambda: None
        """Called before anything leaves that somebody decided."""
        self._unheard = Unheard()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = None if keys is None else Guard(keys.receivers)
        self._router = _router(self._zmq if self._guard is None else self._guard.context)
        self._router.set(zmq.ROUTER_HANDOVER, 1)  # an attempt takes the name over from the one before it
        if self._guard is not None:
            self._guard.protect(self._router)
        self._commands = _router(self._zmq)
        self._refused: set[str] = set()
        self.commands = f"ipc://{folder}/commands"
        """Where commands are taken."""
        self._commands.bind(self.commands)
        self.address = self._listen(address)
        """Where workers speak."""
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._nursery.fileno(), zmq.POLLIN)

    def wait(self, wait_s: float) -> tuple[list[Message], list[dict[str, Any]]]:
        """What has been said, and what the forkserver tells (as `Nursery.events`), within `wait_s`."""
        if self._outgoing:
            self.ahead()
        while self._outgoing:
            self._outgoing.popleft()()
        self._poller.poll(int(wait_s * 1000))
        said: list[Message] = []
        while self._router.poll(0):
            said += self._receive()
        while self._commands.poll(0):
            said += self._asked()
        return said, self._nursery.events()

    def last_words(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Message]:
        """What is said until nobody says anything for `pause_s`, or for `wait_s`."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._router.poll(int(pause_s * 1000)):
            yield from self._receive()

    def send(self, name: str, message: Mapping[str, Any]) -> None:
        """Say something to a worker or a command; nobody hears it where none of that name is there."""
        if name.startswith(_COMMAND):
            socket, to = self._commands, bytes.fromhex(name.removeprefix(_COMMAND))
        else:
            socket, to = self._router, name.encode()
        frames = [to, msgpack.packb(message)]
        if message.get("kind") in _DECIDE_NOTHING:
            socket.send_multipart(frames)
        else:
            self._outgoing.append(lambda: self._unheard.reach(name, lambda: socket.send_multipart(frames)))

    def spawn(self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False) -> None:
        """Ask for a process; as `Nursery.spawn`."""
        self._outgoing.append(lambda: self._unheard.forget(name))
        self._outgoing.append(lambda: self._nursery.spawn(name, settings, heavy, keeps))

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker."""
        self._outgoing.append(lambda: self._nursery.kill(name, number))

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on; at once, as nothing is decided by it."""
        self._nursery.pause(is_paused)

    def stay(self, wait_s: float, end_s: float) -> None:
        """From now on workers outlive this process; as `Nursery.stay`."""
        self._outgoing.append(lambda: self._nursery.stay(wait_s, end_s))

    def close(self) -> None:
        """End all processes; leave none, and no socket."""
        self._nursery.close()
        self._let_go()

    def _let_go(self) -> None:
        self._router.close(0)
        self._commands.close(0)
        if self._guard is not None:
            self._guard.close()
        self._zmq.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self, address: str) -> str:
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._nursery.close()
            self._let_go()
            raise RunError(
                f"the scheduler cannot listen at {address}: {error.strerror}; give an address of this machine"
            ) from None
        endpoint = self._router.last_endpoint
        assert isinstance(endpoint, bytes), "what ZeroMQ says of a bound socket"
        return reachable(endpoint.decode())

    def _receive(self) -> list[Message]:
        """What a worker said; nothing where it is no word."""
        frames = self._router.recv_multipart()
        name = frames[0].decode(errors="backslashreplace")
        found = word(frames[1]) if len(frames) == 2 else None
        if found is None:
            self._refuse(name)
            return []
        self._unheard.spoke(name)
        return [(name, found)]

    def _asked(self) -> list[Message]:
        """What somebody commands."""
        frames = self._commands.recv_multipart()
        found = word(frames[1]) if len(frames) == 2 else None
        if found is None:
            self._refuse("a command")
            return []
        return [(_COMMAND + frames[0].hex(), found)]

    def _refuse(self, who: str) -> None:
        """Say once of everybody that what he says is no word, and of so many only."""
        if who not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(who)
            log.warning("refused a message of %s at the scheduler's socket: it is no word of this protocol", who)


class TakenDesk(Desk):
    """The desk of a scheduler that has ended, with its workers."""

    def __init__(self, folder: Path) -> None:
        """Take the workers over that have their sockets in `folder`. Errors: RunError when there are none any more."""
        nursery = TakenOver(str(folder / _DOOR))
        self.handed, self.alone_s = nursery.handed, nursery.alone_s
        """As `TakenOver` says."""
        settings = self.handed[0]["settings"] if self.handed else {}
        address = settings.get("control", f"ipc://{folder}/control")
        self._open(folder, nursery, address, RunKeys.from_plain(settings.get("keys", {})))
        # Until a worker has found this socket, ZeroMQ lets what is sent to it fall without a word.
        self._unheard = Unheard(worker["name"] for worker in self.handed if worker["alive"])


def _router(context: "zmq.Context[Any]") -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    return socket
