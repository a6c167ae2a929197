"""The process on another host than rank 0's in which the ranks there begin: it forks them, and
passes on what they say.

The life of a rank belongs to its worker: this process ends when the connection to rank 0 does, and
its forks with it.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import context_facts
from dataflow.runtime import Context
from dataflow.system.child import Child, fork
from dataflow.system.log import node_log
from dataflow.system.rank_places import RankPlaces, Spreads
from dataflow.system.security import RunKeys, present
from dataflow.worker import rank_messages as messages
from dataflow.worker.host import Settings
from dataflow.worker.rank_pipe import RankPipe
from dataflow.worker.weight_ports import interface_of

_TURN_MS = 50


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
    facts: dict[str, Any] = context_facts(graph, plan, node, settings.replica)
    return Context(
        **facts,
        rank=settings.replica,
        attempt=settings.attempt,
        seed=settings.seed,
        steps=settings.steps,
        limits=settings.limits,
        log=node_log(node),
        places=places_of(settings),
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
        self._line: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 1000),
            (zmq.IPV6, "[" in settings.ranks_at),
        ):
            self._line.setsockopt(option, int(value))
        present(self._line, keys.senders)
        self._monitor: zmq.Socket[Any] = self._line.get_monitor_socket()
        self._line.connect(settings.ranks_at)
        self._follow: Callable[[int, int], int] | None = None
        self._ranks: dict[int, _Rank] = {}
        self._is_over = self._was_connected = False
        self._began = time.monotonic()

    def run(self) -> int:
        """Serve rank 0 until it ends; the exit status."""
        self._say(messages.Here(self._settings.host, self._settings.attempt))
        while not self._is_over:
            self._turn()
            if (
                not self._was_connected
                and time.monotonic() - self._began > self._settings.limits.start_s
            ):
                print(
                    f"rank 0 of '{self._settings.worker}' did not answer at"
                    f" {self._settings.ranks_at} within {self._settings.limits.start_s:.0f} s; see"
                    " that this host reaches that address",
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
        poller.poll(_TURN_MS)
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
