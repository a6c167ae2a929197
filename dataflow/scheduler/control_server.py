"""The scheduler's resources: the socket to its workers, the forkserver, the folder of the run's
sockets.
"""

import dataclasses
import logging
import math
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from dataflow.agent import relay
from dataflow.agent.forkserver import Main
from dataflow.agent.forkserver_client import Event, ForkserverClient, TakenOverForkserver
from dataflow.agent.messages import Begin, Built
from dataflow.errors import RunError
from dataflow.folder import socket_folder
from dataflow.folder.socket_folder import Whereabouts
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.events import Received
from dataflow.scheduler.requests import REPLIES, REQUESTS, Reply, Request
from dataflow.system.messages import MessageError, Refused
from dataflow.system.security import Listener, RunKeys, endpoint
from dataflow.worker.messages import DECIDE_NOTHING, TO_SCHEDULER, TO_WORKER, Heard, ToWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Client:
    """A client that makes requests, at a socket of its own."""

    identity: bytes


_LIVES_S = 0.25
"""Seconds between two signs of life to the forkserver."""
_REMEMBERED = 100
_LEFT = "left"
"""In the run folder, where the run has hosts: what a scheduler leaves for another one, be it on
another host."""
_TAKEOVER = "takeover"
"""In the folder: where the next scheduler asks for the workers."""


class ControlServer:
    """Messages and processes; decides nothing.

    consumes: messages of workers, requests; events of the forkserver
    produces: all of them as values; messages to workers, processes, signals: what was decided
        leaves with the next `wait`
    waits for: either, so long as it is told to
    unblocked by: either
    """

    number = 0
    """Number of the scheduler: a later one of the run has a larger."""
    handed: Sequence[Event] = ()
    alone_s, lives = 0.0, False
    """Of the workers that were taken over, as `TakenOverForkserver` says."""

    def __init__(
        self,
        main: Main,
        environment: Mapping[str, str],
        preload: Callable[[], None],
        listen: str = "",
        keys: RunKeys | None = None,
        standby: Callable[[], int] | None = None,
        logs: str = "",
    ) -> None:
        """Fork the forkserver, which runs `main` in every worker; call this before the process has
        threads.

        listen: where workers speak to the scheduler, with `keys`; empty: in the folder, as requests
        always are. standby: runs a scheduler in the place of this process when it has died. logs:
        folder for the forkserver's.
        """
        folder = socket_folder.make()
        forkserver = ForkserverClient(
            main,
            environment,
            preload,
            clean_up=lambda: shutil.rmtree(folder, ignore_errors=True),
            takeover=str(folder / _TAKEOVER),
            standby=standby,
            log=str(Path(logs) / "forkserver.log") if logs else "",
        )
        control = endpoint(listen) if listen else f"ipc://{folder}/control"
        self._open(
            folder,
            forkserver,
            Whereabouts(control=control, commands=f"ipc://{folder}/commands"),
            keys,
        )

    def _open(
        self,
        folder: Path,
        forkserver: ForkserverClient | Agents,
        at: Whereabouts,
        keys: RunKeys | None,
    ) -> None:
        self.folder, self._forkserver = folder, forkserver
        self.left = folder
        """Where the scheduler leaves what the next scheduler has to know."""
        self._lived = float("-inf")
        self._events: list[Event] = []
        self._outgoing: deque[Callable[[], object]] = deque()
        self.ahead: Callable[[], None] = lambda: None
        """Called before any decision leaves."""
        self.told: Callable[[str], object] = log.warning
        """Takes a sentence for the user; a log may stand on a terminal that nobody reads."""
        self.keys = keys
        """Keys of the run, where it listens at an address."""
        self._refused: set[str] = set()
        self._listeners: list[Listener] = []
        self._requests, self.requests = self._listen(at.commands)
        """The address for requests."""
        self.address = ""
        """The address for workers; empty: they speak to the agents of their hosts."""
        if at.control:
            # an attempt takes the name over from the one before it
            self._router, self.address = self._listen(at.control, {zmq.ROUTER_HANDOVER: 1})
        self.whereabouts = dataclasses.replace(at, control=self.address, commands=self.requests)
        self.whereabouts.write(folder)
        self._poller = zmq.Poller()
        for listener in self._listeners:
            self._poller.register(listener.socket, zmq.POLLIN)
        self._poller.register(self._forkserver.pollable, zmq.POLLIN)

    def wait(
        self, wait_s: float
    ) -> tuple[list[Received], list[tuple[Client, Request]], list[Event]]:
        """Messages of workers and clients, and the forkserver's events, within `wait_s`.

        Errors: Replaced, before anything is sent or taken in.
        """
        if time.monotonic() - self._lived >= _LIVES_S:
            self._lived = time.monotonic()
            self._forkserver.live()
        self.check()
        if self._outgoing:
            self.ahead()
        while self._outgoing:
            self._outgoing.popleft()()
        self._flush()
        self._poller.poll(int(wait_s * 1000))
        self.check()
        messages = list(self._heard())
        requests: list[tuple[Client, Request]] = []
        while self._requests.poll(0):
            requests += self._requested()
        events, self._events = self._events, []
        return messages, requests, events

    def check(self) -> None:
        """Check that this scheduler still leads the run: it may have been stopped at any time, and
        for long. Errors: Replaced.
        """
        self._events += self._forkserver.events()

    def drain(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Received]:
        """Messages of workers until none comes for `pause_s`, or for `wait_s`."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0 and self._router.poll(
            math.ceil(1000 * min(pause_s, left_s))
        ):
            yield from self._heard()

    def send(self, to: str, message: ToWorker, host: str = "") -> None:
        """Send a message to a worker on a host; it is lost where the worker does not run."""
        encoded = TO_WORKER.encode(message)
        if isinstance(message, DECIDE_NOTHING):
            self._say(to, host, encoded)
        else:
            self._outgoing.append(lambda: self._say(to, host, encoded))

    def reply(self, to: Client, reply: Reply) -> None:
        """Answer a request."""
        frames = [to.identity, REPLIES.encode(reply)]
        self._outgoing.append(lambda: self._requests.send_multipart(frames))

    def place(self, host: str) -> dict[str, Any]:
        """The settings of a worker that are particular to a host."""
        return {"control": self.address, "sockets": str(self.folder)}

    @property
    def sockets(self) -> list[Path]:
        """The folders of the workers' sockets and counts; those of other machines are not here."""
        return [self.folder]

    def clear(self, host: str) -> None:
        """End all workers that a host has; when they have ended, it is told as joined."""
        raise AssertionError("this machine is no host that could be lost")

    def seek(self, host: str) -> None:
        """Have a host that was given up say what it has, should it be there."""
        raise AssertionError("this machine is no host that could be lost")

    def spawn(
        self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False
    ) -> None:
        """Ask for a process; as `ForkserverClient.spawn`."""
        self._outgoing.append(lambda: self._forkserver.spawn(name, settings, heavy, keeps))

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker."""
        self._outgoing.append(lambda: self._forkserver.kill(name, number))

    def dismiss(self, name: str) -> None:
        """End a process that is no worker, and forget it."""
        self.kill(name, signal.SIGKILL)

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on; at once, as nothing is decided by it."""
        self._forkserver.pause(is_paused)

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on workers outlive this process; as `ForkserverClient.stay`."""
        self._outgoing.append(lambda: self._forkserver.stay(wait_s, end_s, silent_s))

    def close(self) -> None:
        """End all processes; leave none, and no socket. Errors: Replaced."""
        self._forkserver.close()
        self._let_go()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave(self) -> None:
        """Another one has the workers: let go of the sockets, and of nothing else."""
        self._forkserver.leave()
        self._let_go()

    def _let_go(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _listen(
        self, address: str, options: Mapping[int, int] = {}
    ) -> "tuple[zmq.Socket[bytes], str]":
        """For holders of the run's keys, where others than this user could connect."""
        keys = None if address.startswith("ipc:") else self.keys
        try:
            listener = Listener("the scheduler", address, keys, options)
        except RunError:
            self.close()
            raise
        self._listeners.append(listener)
        return listener.socket, listener.address

    def _say(self, to: str, host: str, encoded: bytes) -> None:
        self._router.send_multipart([to.encode(), encoded])

    def _flush(self) -> None:
        """Send what is queued."""

    def _heard(self) -> Iterator[Received]:
        """Messages of workers."""
        while self._router.poll(0):
            identity, *frames = self._router.recv_multipart()
            yield from self._read(identity.decode(errors="backslashreplace"), b"".join(frames))

    def _read(self, name: str, encoded: bytes, host: str = "") -> Iterator[Received]:
        """A worker's message; None where it is invalid."""
        try:
            yield Received(name, TO_SCHEDULER.decode(encoded), host)
        except MessageError as error:
            self.refuse(f"'{name}'", str(error))

    def _requested(self) -> list[tuple[Client, Request]]:
        """A client's request; a client whose request is invalid is told."""
        frames = self._requests.recv_multipart()
        client = Client(frames[0])
        try:
            return [(client, REQUESTS.decode(b"".join(frames[1:])))]
        except MessageError as error:
            self.refuse("a request", str(error))
            self.reply(client, Refused(str(error)))
            return []

    def refuse(self, name: str, why: str) -> None:
        """Report invalid messages once per sender, and for a limited number of senders."""
        if name not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(name)
            self.told(f"refused a message of {name} at the scheduler's socket: {why}")


class HostsControlServer(ControlServer):
    """Where the workers are on several hosts, with an agent on each; perhaps those of a scheduler
    that has ended.
    """

    def __init__(
        self,
        agents: Agents,
        folder: Path,
        ledger: str = "",
        holds: Callable[[], None] = lambda: None,
    ) -> None:
        """Speak to the workers of these agents. folder: of the run, which all hosts see. ledger:
        where its service is asked. holds: raises Replaced once somebody else holds the run.
        """
        self._agents, self.number, self._holds = agents, agents.number, holds
        self._sockets: set[Path] = set()
        agents.told = lambda text: self.told(text)
        counts_folder, anywhere = folder / _LEFT, endpoint(agents.host)
        counts_folder.mkdir(exist_ok=True)
        self._open(
            counts_folder,
            agents,
            Whereabouts(control="", commands=anywhere, ledger=ledger),
            agents.keys,
        )

    def check(self) -> None:
        self._holds()
        super().check()

    def take_over(
        self, begin: Begin, ours: Built | None, hosts: Collection[str], within_s: float
    ) -> bool:
        came = self._agents.take_over(begin, ours, hosts, within_s)
        self.alone_s = self._agents.alone_s
        return came

    @property
    def sockets(self) -> list[Path]:
        """As `ControlServer.sockets`; of hosts that were lost, too."""
        # a scheduler that has taken over may have placed nobody there
        for host in self._agents.hosts:
            self.place(host.name)
        return sorted(self._sockets)

    def clear(self, host: str) -> None:
        self._outgoing.append(lambda: self._agents.clear(host))

    def dismiss(self, name: str) -> None:
        self._outgoing.append(lambda: self._agents.kill(name, forget=True))

    def seek(self, host: str) -> None:
        self._agents.seek(host)

    def place(self, host: str) -> dict[str, Any]:
        place = self._agents.place(host)
        self._sockets.add(Path(place["sockets"]))
        return {
            "control": relay.address(place["sockets"]),
            "ledger": self.whereabouts.ledger,
            **place,
        }

    def send(self, to: str, message: ToWorker, host: str = "") -> None:
        """As `ControlServer.send`; heartbeats are answered by the agents."""
        if not isinstance(message, Heard):
            super().send(to, message, host)

    def drain(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Received]:
        """As `ControlServer.drain`; an agent tells of an end after what it has heard before."""
        yield from self._heard()

    def _say(self, to: str, host: str, encoded: bytes) -> None:
        self._agents.messages.say(to, host, encoded)

    def _flush(self) -> None:
        self._agents.flush()

    def _heard(self) -> Iterator[Received]:
        for host, name, encoded in self._agents.messages.heard():
            yield from self._read(name, encoded, host)


class TakenOverControlServer(ControlServer):
    """That of a scheduler that has ended, or was replaced, with its workers."""

    def __init__(self, folder: Path) -> None:
        """Take the workers over that have their sockets in `folder`. Errors: RunError when there
        are none any more.
        """
        forkserver = TakenOverForkserver(str(folder / _TAKEOVER))
        self.handed, self.alone_s = forkserver.handed, forkserver.alone_s
        self.number, self.lives = forkserver.number, forkserver.lives
        settings = self.handed[0]["settings"] if self.handed else {}
        self._open(
            folder, forkserver, self._place(folder), RunKeys.from_plain(settings.get("keys", {}))
        )

    def _place(self, folder: Path) -> Whereabouts:
        """The folder of the scheduler before, where everybody looks first; another one while that
        scheduler is still there.
        """
        before = Whereabouts.read(folder)
        if before is not None and not self.lives:
            return before
        control, commands = (
            f"ipc://{folder}/{name}-{self.number}" for name in ("control", "commands")
        )
        if before is not None and before.control.startswith("tcp:"):
            control = f"{before.control.rpartition(':')[0]}:*"
        return Whereabouts(control=control, commands=commands)
