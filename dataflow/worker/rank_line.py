"""A worker's ranks on several hosts: rank 0's line to those on other hosts, and the process there
in which these begin.

Nobody is timed: a host that ends, or its process there, closes the connection, and one that falls
silent is noticed by the scheduler, which ends this worker.
"""

import contextlib
import faulthandler
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import graph_around
from dataflow.runtime import Context, DeviceShare
from dataflow.system.child import Child, fork
from dataflow.system.log import node_log
from dataflow.system.messages import Life, MessageError
from dataflow.system.rank_places import RankPlaces, Spreads
from dataflow.system.security import Listener, RunKeys, dealer_to, endpoint
from dataflow.worker import rank_messages as messages
from dataflow.worker.host import Settings
from dataflow.worker.rank_messages import Delete, Get, RankPipe, Set, StoredValues
from dataflow.worker.weight_ports import interface_of

# What ranks put where they meet, and ask for: values by key, and who waits for which; without
# sockets.


@dataclass
class RankValues:
    """Of one worker's ranks; each message gives who is to be told what.

    >>> values = RankValues()
    >>> values.take("a", Get(1, ["x"], waits=True))
    []
    >>> values.take("b", Set(1, "x", b"5"))
    [('b', StoredValues(ticket=1, values={})), ('a', StoredValues(ticket=1, values={'x': b'5'}))]
    >>> values.take("b", Set(2, "x", b"", adds=2))
    [('b', StoredValues(ticket=2, values={'x': b'7'}))]
    """

    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[tuple[Hashable, Get]] = field(default_factory=list)

    def take(
        self, reader: Hashable, message: Set | Get | Delete
    ) -> list[tuple[Hashable, StoredValues]]:
        """A rank puts, asks for or deletes values."""
        match message:
            case Set(adds=None):
                self._values[message.key] = message.value
                return [(reader, StoredValues(message.ticket, {})), *self._served()]
            case Set():
                total = int(self._values.get(message.key, b"0")) + (message.adds or 0)
                self._values[message.key] = total_bytes = str(total).encode()
                return [
                    (reader, StoredValues(message.ticket, {message.key: total_bytes})),
                    *self._served(),
                ]
            case Delete():
                gone = self._values.pop(message.key, None)
                return [
                    (
                        reader,
                        StoredValues(message.ticket, {} if gone is None else {message.key: gone}),
                    )
                ]
            case Get():
                self._waiting.append((reader, message))
                return self._served()

    def _served(self) -> list[tuple[Hashable, StoredValues]]:
        """Replies to requests that need not wait any more."""
        replies: list[tuple[Hashable, StoredValues]] = []
        waiting, self._waiting = self._waiting, []
        for reader, request in waiting:
            values = {key: self._values[key] for key in request.keys if key in self._values}
            if request.waits and len(values) < len(set(request.keys)):
                self._waiting.append((reader, request))
            else:
                replies.append((reader, StoredValues(request.ticket, values)))
        return replies


_ALIVE_S = 0.2
"""Seconds between two checks that the other hosts are connected."""
_KILLED_S = 5.0
"""Seconds for the end of a killed rank to be reported."""
_TURN_MS = 100
_BACKLOG = 256


class FarRank(Child):
    """A rank on another host."""

    def __init__(
        self, rank: int, host: str, end: socket.socket, kill: Callable[[int], None]
    ) -> None:
        """end: of the socket pair, not blocking; this one's from now on."""
        super().__init__(0)
        self.rank, self.host = rank, host
        self.pipe: RankPipe | None = RankPipe(end)
        """Carries its bytes to rank 0; None: it has ended."""
        self.status: int | None = None
        """Its exit status, known once all its bytes are read."""
        self._kill, self._over = kill, threading.Event()

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds; None: what has
        been killed is taken to have ended after some, whether its host can say so or not.
        """
        if not self._over.wait(_KILLED_S if timeout is None else timeout):
            if timeout is not None:
                raise subprocess.TimeoutExpired(f"rank {self.rank}", timeout)
            self.over(-signal.SIGKILL)
        assert self.returncode is not None, "it is over"
        return self.returncode

    def signal(self, number: int, *, group: bool = False) -> None:
        """None reaches another host but that of `kill`; the pid 0 would be this process's group."""

    def kill(self) -> None:
        """SIGKILL, unless its end has been seen."""
        if self.returncode is None:
            self._kill(self.rank)

    def over(self, status: int) -> None:
        """It has ended."""
        if self.returncode is None:
            self.returncode = status
            self._over.set()


class RankLine:
    """In the worker that is rank 0: a thread that serves until `close`.

    consumes: what rank 0 says to ranks on other hosts, over socket pairs; what these say; values
        that ranks put
    produces: the same, to the other side; to each rank the values that it asks for; the ends of
        ranks
    waits for: its sockets
    unblocked by: what comes there, or `start`, `prepare`, `close`
    """

    def __init__(self, host: str, keys: RunKeys, hosts: Sequence[str], life: Life = Life()) -> None:
        """Listen at this host's address. hosts: of each rank. life: of the worker; ranks of
        another one are not let in. RunError where it cannot.
        """
        self._life = life
        self._hosts = tuple(hosts)
        self._listener = Listener(
            "the first of ranks on several hosts",
            endpoint(host),
            keys,
            {zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 1000},
        )
        self._router, self.address = self._listener.socket, self._listener.address
        """The address at which the others find it."""
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._there: dict[str, bytes] = {}
        """By connected host, its identity at the socket."""
        self._waiting: dict[str, list[messages.FromRankZero]] = {}
        self._ranks: dict[int, FarRank] = {}
        self._values = RankValues()
        self._looked = float("-inf")
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="rank-line", daemon=True)
        self._thread.start()

    def prepare(self, told: Mapping[str, Any]) -> None:
        for host in dict.fromkeys(self._hosts):
            if host != self._hosts[0]:
                self._have(functools.partial(self._say, host, messages.Prepare(dict(told))))

    def start(self, end: socket.socket, rank: int) -> Child:
        own = end.dup()
        own.setblocking(False)
        far = FarRank(
            rank,
            self._hosts[rank],
            own,
            lambda rank: self._have(functools.partial(self._kill, rank)),
        )

        def begin() -> None:
            self._ranks[rank] = far
            self._say(far.host, messages.Start(rank))

        self._have(begin)
        return far

    def close(self) -> None:
        """End all that is on other hosts; may be called again."""
        if not self._is_over:
            self._have(self._end)
            self._thread.join(_KILLED_S)
            for end in (self._woken, self._waker):
                end.close()

    def _serve(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        finally:
            for rank in self._ranks.values():
                self._lose(rank, -signal.SIGKILL)
            self._listener.close()

    def _have(self, done: Callable[[], None]) -> None:
        """Have it done in the thread."""
        self._asked.put(done)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        for rank in self._ranks.values():
            if rank.pipe is not None and rank.pipe.wanted:
                poller.register(rank.pipe.end.fileno(), rank.pipe.wanted)
        poller.poll(_TURN_MS)
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()
        for _ in range(_BACKLOG):
            if not self._router.poll(0):
                break
            sender, *frames = self._router.recv_multipart()
            try:
                self._hear(sender, messages.TO_RANK_ZERO.decode(b"".join(frames)))
            except MessageError as error:
                print(f"a message of the ranks was refused: {error}", file=sys.stderr)
        for rank in self._ranks.values():
            self._carry(rank)
        if time.monotonic() - self._looked >= _ALIVE_S:
            self._looked = time.monotonic()
            for host in list(self._there):
                self._say(host, messages.Alive())

    def _hear(self, sender: bytes, message: messages.ToRankZero) -> None:
        match message:
            case messages.Set() | messages.Get() | messages.Delete():
                for whom, reply in self._values.take(sender, message):
                    self._send(whom, reply)
            case messages.Here() if self._is_awaited(message):
                self._there[message.host] = sender
                for waiting in self._waiting.pop(message.host, []):
                    self._say(message.host, waiting)
            case _ if sender not in self._there.values():
                pass
            case messages.Failed():
                host = next(name for name, identity in self._there.items() if identity == sender)
                print(f"ranks cannot be started on host '{host}': {message.error}", file=sys.stderr)
                self._lose_host(host, 1)
            case messages.Started() | messages.Ended() | messages.Bytes() if (
                message.rank in self._ranks
            ):
                self._of_rank(self._ranks[message.rank], message)

    def _is_awaited(self, message: messages.Here) -> bool:
        return (
            message.life == self._life
            and message.host in self._hosts
            and message.host not in self._there
        )

    def _of_rank(
        self, far: FarRank, message: messages.Started | messages.Ended | messages.Bytes
    ) -> None:
        match message:
            case messages.Started():
                far.pid = message.pid
            case messages.Ended():
                far.status = message.status
            case messages.Bytes():
                if far.pipe is not None:
                    far.pipe.out += message.data

    def _carry(self, far: FarRank) -> None:
        """What a rank said to rank 0, and what that says."""
        if (pipe := far.pipe) is None:
            return
        pipe.give()
        if far.status is not None and not pipe.out:
            self._lose(far, far.status)
            return
        for data in pipe.take():
            self._say(
                far.host, messages.Bytes(far.rank, data) if data else messages.Hangup(far.rank)
            )

    def _say(self, host: str, message: messages.FromRankZero) -> None:
        """Send to the process on a host; queued until that process has come."""
        if host not in self._there:
            self._waiting.setdefault(host, []).append(message)
        elif not self._send(self._there[host], message):
            self._lose_host(host, -signal.SIGKILL)

    def _send(self, receiver: Any, message: messages.FromRankZero) -> bool:
        """False when nobody of that name is connected."""
        try:
            self._router.send_multipart([receiver, messages.FROM_RANK_ZERO.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _kill(self, rank: int) -> None:
        far = self._ranks.get(rank)
        if far is not None and far.returncode is None:
            if far.host in self._there:
                self._say(far.host, messages.Kill(rank))
            else:
                self._lose(far, -signal.SIGKILL)

    def _lose_host(self, host: str, status: int) -> None:
        """All ranks on a host have ended."""
        for far in self._ranks.values():
            if far.host == host:
                far.status = status if far.status is None else far.status

    def _lose(self, far: FarRank, status: int) -> None:
        """A rank has ended, and all that it said has been taken."""
        if far.pipe is not None:
            far.pipe.end.close()
            far.pipe = None
        far.over(status)

    def _end(self) -> None:
        for host in self._there:
            self._say(host, messages.Over())
        self._is_over = True


_HOST_TURN_MS = 50


@dataclass
class _Rank:
    """A fork of this process that is a rank."""

    process: Child
    pipe: RankPipe
    hangs_up: bool = False
    """Whether rank 0 will say nothing more."""
    is_told: bool = False
    """Whether its end was reported."""


def main(graph: Graph, plan: Plan, settings: Settings) -> int:
    """Run it, in a process that `worker.main` has set up; the exit status."""
    (node,) = plan.workers[settings.worker]
    if settings.rank_devices and settings.rank_devices[0] != "cpu":
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(settings.listen)}"

    def made(told: Mapping[str, Any]) -> Callable[[int, int], int]:
        operator = graph.operators[node]
        assert isinstance(operator, Spreads), "the plan spreads no others"
        return operator.follower(context_of(graph, plan, settings, node), told)

    host = RankHost(settings, made)
    try:
        return host.run()
    finally:
        host.close()


def places_of(settings: Settings, **given: Any) -> RankPlaces | None:
    """Places of the ranks of this process's worker; None: all are on the first one's host."""
    if not settings.rank_hosts:
        return None
    return RankPlaces(
        hosts=tuple(settings.rank_hosts),
        devices=tuple(settings.rank_devices),
        address=settings.listen,
        keys=RunKeys.from_plain(settings.keys),
        **{"meets_at": settings.ranks_at, **given},
    )


def context_of(graph: Graph, plan: Plan, settings: Settings, node: str) -> Context:
    """What a rank here may use: rank 0 has the ledger and all edges."""
    placement = plan.placements[node]
    return Context(
        node=node,
        replica=settings.replica,
        life=settings.life,
        run=settings.run,
        graph=graph_around(graph, plan, node),
        devices=DeviceShare(
            threads=placement.threads_of(settings.replica),
            ranks=placement.ranks,
            places=places_of(settings),
            chosen=placement.chosen,
        ),
        log=node_log(node),
    )


class RankHost:
    """The loop of the process.

    consumes: what rank 0 says, to it and to the ranks here
    produces: forks; what they say, and their ends
    waits for: rank 0, within `Limits.start_s`; then for its sockets
    unblocked by: what comes there; the end of the connection to rank 0, after which it ends
    """

    def __init__(
        self, settings: Settings, made: Callable[[Mapping[str, Any]], Callable[[int, int], int]]
    ) -> None:
        """made: what ranks run, from what rank 0 tells."""
        keys = RunKeys.from_plain(settings.keys)
        assert keys is not None, "a run over hosts has keys"
        self._settings, self._made = settings, made
        self._context: zmq.Context[Any] = zmq.Context()
        self._line = dealer_to(
            self._context,
            settings.ranks_at,
            keys,
            {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 1000},
        )
        self._monitor: zmq.Socket[Any] = self._line.get_monitor_socket()
        self._line.connect(settings.ranks_at)
        self._follow: Callable[[int, int], int] | None = None
        self._ranks: dict[int, _Rank] = {}
        self._is_over = self._was_connected = False
        self._began = time.monotonic()

    def run(self) -> int:
        """Serve rank 0 until it ends; the exit status."""
        start_s = self._settings.run.limits.start_s
        self._say(messages.Here(life=self._settings.life, host=self._settings.host))
        while not self._is_over:
            self._turn()
            if not self._was_connected and time.monotonic() - self._began > start_s:
                print(
                    f"rank 0 of '{self._settings.worker}' did not answer at"
                    f" {self._settings.ranks_at} within {start_s:.0f} s; see that this host reaches"
                    " that address",
                    file=sys.stderr,
                )
                return 1
        return 0

    def close(self) -> None:
        """End all ranks here."""
        for rank in self._ranks.values():
            rank.process.kill()
        self._line.disable_monitor()
        self._monitor.close(0)
        self._line.close()
        self._context.term()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._line, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        for rank_process in self._ranks.values():
            if rank_process.pipe.wanted:
                poller.register(rank_process.pipe.end.fileno(), rank_process.pipe.wanted)
        poller.poll(_HOST_TURN_MS)
        while self._line.poll(0):
            self._apply(messages.FROM_RANK_ZERO.decode(b"".join(self._line.recv_multipart())))
        for rank, rank_process in self._ranks.items():
            self._carry(rank, rank_process)
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            self._was_connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_DISCONNECTED and self._was_connected and not self._is_over:
                print(
                    "rank 0 has ended, or its connection did: all ranks here end with it",
                    file=sys.stderr,
                )
                self._is_over = True

    def _apply(self, message: messages.FromRankZero) -> None:
        match message:
            case messages.Prepare():
                try:
                    self._follow = self._made(message.told)
                except Exception as error:
                    traceback.print_exc()
                    self._say(messages.Failed(f"{type(error).__name__}: {error}"))
            case messages.Start() if self._follow is not None:
                self._start(message.rank, self._follow)
            case messages.Bytes() if message.rank in self._ranks:
                self._ranks[message.rank].pipe.out += message.data
            case messages.Hangup() if message.rank in self._ranks:
                self._ranks[message.rank].hangs_up = True
            case messages.Kill() if message.rank in self._ranks:
                self._ranks[message.rank].process.kill()
            case messages.Over():
                self._is_over = True

    def _start(self, rank: int, follow: Callable[[int, int], int]) -> None:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()

        def body() -> int:
            faulthandler.enable()
            return follow(number, rank)

        process = fork(body, keep=[number], ends_with_parent=signal.SIGKILL)
        theirs.close()
        ours.setblocking(False)
        self._ranks[rank] = _Rank(process, RankPipe(ours))
        self._say(messages.Started(rank, process.pid))

    def _carry(self, rank: int, rank_process: _Rank) -> None:
        """Pass on what rank 0 said to a rank, what that says, and whether it has ended."""
        pipe = rank_process.pipe
        pipe.give()
        if rank_process.hangs_up and not pipe.out:
            rank_process.hangs_up = False
            with contextlib.suppress(OSError):
                pipe.end.shutdown(socket.SHUT_WR)
        for data in pipe.take():
            if data:
                self._say(messages.Bytes(rank, data))
        if (
            not pipe.speaks
            and not rank_process.is_told
            and (status := rank_process.process.poll()) is not None
        ):
            rank_process.is_told = True
            pipe.end.close()
            pipe.out.clear()
            self._say(messages.Ended(rank, status))

    def _say(self, message: messages.ToRankZero) -> None:
        self._line.send(messages.TO_RANK_ZERO.encode(message))
