"""What the scheduler has in its hands: the socket to its workers, the forkserver, the folder of the run's sockets."""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq

from dataflow.errors import RunError
from dataflow.folder import socket_folder
from dataflow.folder.whereabouts import Whereabouts
from dataflow.scheduler.deferred_sends import Unheard
from dataflow.scheduler.forkserver import Main
from dataflow.scheduler.forkserver_client import Event, Nursery, TakenOver
from dataflow.system.security import MESSAGE_BYTES, Guard, RunKeys, endpoint, reachable, word

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asker:
    """Somebody who gives commands, at a socket of their own."""

    identity: bytes


Message = tuple[str | Asker, Any]
"""Who said it, a worker by its name, and what."""
_LIVES_S = 0.25
"""Between two signs of life for the forkserver."""
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

    number = 0
    """How many schedulers there were before."""

    def __init__(
        self, main: Main, environment: Mapping[str, str], preload: Callable[[], None], listen: str = "",
        keys: RunKeys | None = None, successor: Callable[[], int] | None = None, logs: str = "",
    ) -> None:  # fmt: skip
        """Fork the forkserver, which runs `main` in every worker; call this before the process has threads.

        listen: where workers speak to the scheduler, with `keys`; empty: in the folder, as commands always do.
        successor: runs a scheduler in the place of this process when it has died. logs: folder for the forkserver's.
        """
        folder = socket_folder.make()
        nursery = Nursery(
            main, environment, preload, clean_up=lambda: shutil.rmtree(folder, ignore_errors=True),
            door=str(folder / _DOOR), successor=successor, log=str(Path(logs) / "nursery.log") if logs else "",
        )  # fmt: skip
        control = endpoint(listen) if listen else f"ipc://{folder}/control"
        self._open(folder, nursery, Whereabouts(control=control, commands=f"ipc://{folder}/commands"), keys)

    def _open(self, folder: Path, nursery: Nursery, at: Whereabouts, keys: RunKeys | None) -> None:
        self.folder, self._nursery = folder, nursery
        self._lived = float("-inf")
        self._events: list[Event] = []
        self._outgoing: deque[Callable[[], object]] = deque()
        self.ahead: Callable[[], None] = lambda: None
        """Called before anything leaves that somebody decided."""
        self.told: Callable[[str], object] = log.warning
        """Hears what a user should know; a log may stand on a terminal that nobody reads."""
        self._unheard = Unheard()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = None if keys is None else Guard(keys.receivers)
        self._router = _router(self._zmq if self._guard is None else self._guard.context)
        self._router.set(zmq.ROUTER_HANDOVER, 1)  # an attempt takes the name over from the one before it
        if self._guard is not None:
            self._guard.protect(self._router)
        self._commands = _router(self._zmq)
        self._refused: set[str] = set()
        self.commands = at.commands
        """Where commands are taken."""
        self._commands.bind(self.commands)
        self.address = self._listen(at.control)
        """Where workers speak."""
        Whereabouts(control=self.address, commands=self.commands).write(folder)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._nursery.fileno(), zmq.POLLIN)

    def wait(self, wait_s: float) -> tuple[list[Message], list[dict[str, Any]]]:
        """What has been said, and what the forkserver tells (as `Nursery.events`), within `wait_s`.

        Errors: Replaced, before anything is sent or taken in."""
        if time.monotonic() - self._lived >= _LIVES_S:
            self._lived = time.monotonic()
            self._nursery.live()
        self.check()
        if self._outgoing:
            self.ahead()
        while self._outgoing:
            self._outgoing.popleft()()
        self._poller.poll(int(wait_s * 1000))
        self.check()
        said: list[Message] = []
        while self._router.poll(0):
            said += self._receive()
        while self._commands.poll(0):
            said += self._asked()
        events, self._events = self._events, []
        return said, events

    def check(self) -> None:
        """Whether this is still the scheduler's desk: it may have been stopped at any time, and for long. Errors:
        Replaced."""
        self._events += self._nursery.events()

    def last_words(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Message]:
        """What is said until nobody says anything for `pause_s`, or for `wait_s`."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._router.poll(int(pause_s * 1000)):
            yield from self._receive()

    def send(self, to: str | Asker, message: Mapping[str, Any]) -> None:
        """Say something to a worker, or to somebody who gave a command; nobody hears it where he is not there."""
        if isinstance(to, Asker):
            answer = [to.identity, msgpack.packb(message)]
            self._outgoing.append(lambda: self._commands.send_multipart(answer))
            return
        frames = [to.encode(), msgpack.packb(message)]
        if message.get("kind") in _DECIDE_NOTHING:
            self._router.send_multipart(frames)
        else:
            self._outgoing.append(lambda: self._unheard.reach(to, lambda: self._router.send_multipart(frames)))

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

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on workers outlive this process; as `Nursery.stay`."""
        self._outgoing.append(lambda: self._nursery.stay(wait_s, end_s, silent_s))

    def close(self) -> None:
        """End all processes; leave none, and no socket. Errors: Replaced."""
        self._nursery.close()
        self._let_go()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave(self) -> None:
        """Another one has the workers: let go of the sockets, and of nothing else."""
        self._nursery.leave()
        self._let_go()

    def _let_go(self) -> None:
        self._router.close(0)
        self._commands.close(0)
        if self._guard is not None:
            self._guard.close()
        self._zmq.term()

    def _listen(self, address: str) -> str:
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
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
            self.refuse(f"'{name}'")
            return []
        self._unheard.spoke(name)
        return [(name, found)]

    def _asked(self) -> list[Message]:
        """What somebody commands."""
        frames = self._commands.recv_multipart()
        found = word(frames[1]) if len(frames) == 2 else None
        if found is None:
            self.refuse("a command")
            return []
        return [(Asker(frames[0]), found)]

    def refuse(self, who: str) -> None:
        """Say once of everybody that what he says is no word, and of so many only."""
        if who not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(who)
            self.told(f"refused a message of {who} at the scheduler's socket: it is no word of this protocol")


class TakenDesk(Desk):
    """The desk of a scheduler that has ended, or was replaced, with its workers."""

    def __init__(self, folder: Path) -> None:
        """Take the workers over that have their sockets in `folder`. Errors: RunError when there are none any more."""
        nursery = TakenOver(str(folder / _DOOR))
        self.handed, self.alone_s = nursery.handed, nursery.alone_s
        self.number, self.lives = nursery.number, nursery.lives
        """As `TakenOver` says."""
        settings = self.handed[0]["settings"] if self.handed else {}
        self._open(folder, nursery, self._place(folder), RunKeys.from_plain(settings.get("keys", {})))
        # Until a worker has found this socket, ZeroMQ lets what is sent to it fall without a word.
        self._unheard = Unheard(worker["name"] for worker in self.handed if worker["alive"])

    def _place(self, folder: Path) -> Whereabouts:
        """That of the scheduler before, where everybody looks first; another one while it is there itself."""
        before = Whereabouts.read(folder)
        if before is not None and not self.lives:
            return before
        control, commands = (f"ipc://{folder}/{name}-{self.number}" for name in ("control", "commands"))
        if before is not None and before.control.startswith("tcp:"):
            control = f"{before.control.rpartition(':')[0]}:*"
        return Whereabouts(control=control, commands=commands)


def _router(context: "zmq.Context[Any]") -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    return socket
