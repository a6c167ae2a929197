"""Hosts that are played: agents and workers of one process, which speak to a real scheduler as real
ones do.

python -m bench.controller.played, with a `Call` on its standard input; ends when that is closed.
What it has measured it prints as a line of JSON at its end.
"""

import json
import os
import select
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from bench.controller.cast import EDGES, Call
from dataflow.agent.digest import versions
from dataflow.agent.messages import (
    FROM_AGENT,
    TO_AGENT,
    Alive,
    Begin,
    Built,
    Bye,
    End,
    FromWorkers,
    Handed,
    HandedOver,
    HandOver,
    Join,
    Notice,
    Pace,
    SendSignal,
    Spawn,
    ToWorkers,
    is_repeated,
)
from dataflow.planning.hosts import Host
from dataflow.system.messages import Frames, Numbered
from dataflow.system.security import RunKeys, present
from dataflow.worker.messages import (
    TO_SCHEDULER,
    TO_WORKER,
    FromWorker,
    Heartbeat,
    Hello,
    NodeCommand,
    NodeReport,
    Ready,
    Start,
    Stop,
    Wire,
)
from dataflow.worker.messages import (
    Bye as WorkerBye,
)
from transport.life import Life

ALIVE_S = 0.5
ASK_S = 0.25
"""Between two heartbeats of the trainer from which something follows."""


def dealer(context: Any, address: str, keys: RunKeys, name: str) -> Any:
    """A socket that shows the run's key."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.SNDHWM, 0)
    present(socket, keys.senders)
    socket.connect(address)
    return socket


@dataclass
class Worker:
    """One worker of a host."""

    name: str
    life: Life
    node: str
    runs: bool = False
    dropped: int = 0

    def beat(self) -> bytes:
        """Its heartbeat, encoded."""
        status = {
            "step": 1,
            "dropped": self.dropped,
            "version": 3,
            "tokens": 100_000,
            "queue": 3,
            "active": 4,
        }
        report = NodeReport(
            status=status,
            seconds={"busy": 12.5, "waiting": 1.5, "blocked": 0.25, "starved": 0.0},
            rows_in=1000,
            rows_out=1000,
            ended=False,
            blocked=False,
            pending=3,
            oldest={"prompts": 17},
        )
        heartbeat = Heartbeat(
            life=self.life,
            nodes={self.node: report},
            rss_bytes=1 << 30,
            edges={EDGES[self.node]: (3, 64)} if self.node in EDGES else {},
            at=self.node,
            at_s=0.1,
            turned_s=0.1,
        )
        return TO_SCHEDULER.encode(heartbeat)


@dataclass
class Delays:
    """From a trainer's heartbeat to what the source hears because of it."""

    asked_at: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def ask(self, number: int) -> None:
        """The trainer has said so many."""
        self.asked_at[number] = time.monotonic()

    def heard(self, number: int) -> None:
        """The source has heard so many."""
        if number in self.asked_at:
            self.seconds.append(time.monotonic() - self.asked_at.pop(number))


class PlayedHost:
    """An agent and its workers."""

    def __init__(self, name: str, call: Call, keys: RunKeys, context: Any, delays: Delays) -> None:
        self.name, self._call, self._keys, self._context, self._delays = (
            name,
            call,
            keys,
            context,
            delays,
        )
        self.workers: dict[str, Worker] = {}
        self._messages: list[tuple[str, bytes]] = []
        self._beat_s = 0.2
        self.line = dealer(context, call.address, keys, f"{name}/{os.getpid()}")
        self._numbered = Numbered()
        self.ends = False
        self._spoke = self._beaten = 0.0
        self._asked = 0.0
        self.say(
            Join(
                host=Host(name=name, cpus=8),
                address="127.0.0.1",
                sockets=f"/tmp/{name}",
                folder=call.folder,
                pid=os.getpid(),
                versions=versions(),
            )
        )

    def say(self, message: Any) -> None:
        """To the scheduler."""
        self._send(
            self._numbered.frames(
                FROM_AGENT.encode(message), time.monotonic(), is_kept=not is_repeated(message)
            )
        )

    def _send(self, frames: Frames) -> None:
        self.line.send_multipart(frames)

    def turn(self, now: float) -> None:
        """Take in what has come; say what is due."""
        while self.line.poll(0):
            message = self._numbered.take(self.line.recv_multipart(), now)
            if message is not None:
                self.take(TO_AGENT.decode(message))
        for frames in self._numbered.missing(now):
            self._send(frames)
        if now - self._spoke >= ALIVE_S:
            self._spoke = now
            self.say(Alive())
        if now - self._beaten >= self._beat_s:
            self._beaten = now
            for name, worker in self.workers.items():
                if worker.runs:
                    self.message(name, worker.beat())
        trainer = self.workers.get("trainer-0")
        if trainer is not None and trainer.runs and now - self._asked >= ASK_S:
            self._asked, trainer.dropped = now, trainer.dropped + 1
            self._delays.ask(trainer.dropped)
            self.message(trainer.name, trainer.beat())
        self._pass_on()

    def take(self, message: Any) -> None:
        """Do what the scheduler asks of the agent."""
        match message:
            case Begin():
                self.say(Built(**self._call.built))
            case HandOver():
                for name, worker in self.workers.items():
                    self.say(Handed(name, 1, {"life": worker.life}, None, True))
                self.say(HandedOver(question=message.question, alone_s=0.0))
            case Spawn():
                self.spawn(message)
            case SendSignal():
                self.exits(message.name, -9)
            case ToWorkers():
                for name, encoded in zip(message.names, message.messages, strict=True):
                    if name in self.workers:
                        self.hear(name, TO_WORKER.decode(encoded))
            case Pace():
                self._beat_s = message.beat_s
            case End():
                self.ends = True
                self.say(Bye())

    def spawn(self, message: Spawn) -> None:
        """A worker starts, and says hello."""
        settings = message.settings
        worker = Worker(message.name, Life(*settings["life"]), settings["worker"])
        self.workers[message.name] = worker
        self.say(Notice("started", message.name, 1, None))
        addresses = (
            {EDGES[worker.node]: f"tcp://127.0.0.1:{1024 + len(self.workers)}"}
            if worker.node in EDGES
            else {}
        )
        self.send(message.name, Hello(life=worker.life, pid=1, addresses=addresses))

    def exits(self, name: str, status: int) -> None:
        """A worker ends."""
        if self.workers.pop(name, None) is not None:
            self._pass_on()
            self.say(Notice("exited", name, 1, status))

    def send(self, name: str, message: FromWorker) -> None:
        """A worker says something."""
        self.message(name, TO_SCHEDULER.encode(message))

    def message(self, name: str, message: bytes) -> None:
        """As a worker says it; its agent passes it on."""
        self._messages.append((name, message))

    def _pass_on(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            self.say(
                FromWorkers(
                    names=[name for name, _ in messages],
                    messages=[message for _, message in messages],
                )
            )

    def hear(self, name: str, message: Any) -> None:
        """A worker hears something."""
        worker = self.workers[name]
        match message:
            case Wire():
                self.send(name, Ready(life=worker.life))
            case Start():
                worker.runs = True
            case NodeCommand():
                self._delays.heard(int(message.message.get("dropped", -1)))
            case Stop():
                self.send(name, WorkerBye(life=worker.life))
                self.exits(name, 0)


def main() -> None:
    """Play until the standard input is closed, or all were told to end."""
    call = Call(**json.loads(sys.stdin.readline()))
    keys = RunKeys.from_bytes(bytes.fromhex(call.keys))
    context: Any = zmq.Context(2)
    context.set(zmq.MAX_SOCKETS, 65536)
    delays = Delays()
    played = [PlayedHost(name, call, keys, context, delays) for name in call.hosts]
    while not all(host.ends for host in played):
        now = time.monotonic()
        for host in played:
            host.turn(now)
        time.sleep(0.002)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    seconds = sorted(delays.seconds)
    print(json.dumps({"delays": seconds}), flush=True)
    context.destroy(linger=200)


if __name__ == "__main__":
    main()
