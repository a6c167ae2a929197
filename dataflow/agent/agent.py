"""The agent of one host: between its workers and a scheduler that may be anywhere, and come back as
another one.
"""

import os
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataflow.agent import run_disk
from dataflow.agent.digest import versions
from dataflow.agent.environment import AgentEnvironment
from dataflow.agent.forkserver_client import ForkserverClient
from dataflow.agent.messages import (
    FORKSERVER,
    FROM_AGENT,
    SEND_S,
    TO_AGENT,
    Alive,
    Begin,
    Built,
    Bye,
    End,
    Failed,
    FromAgent,
    Handed,
    HandedOver,
    HandOver,
    Join,
    Leaves,
    Notice,
    Pace,
    Pause,
    Paused,
    SendSignal,
    Spawn,
    Stay,
    ToAgent,
    ToWorkers,
    is_repeated,
)
from dataflow.agent.reach import ReachPort, check_reach
from dataflow.agent.relay import Relay, address
from dataflow.agent.rendezvous import Rendezvous, leave, take_back
from dataflow.errors import RunError
from dataflow.folder.socket_folder import Whereabouts
from dataflow.planning.hosts import Host
from dataflow.system.child import program
from dataflow.system.clocks import AwakeClock
from dataflow.system.interrupts import ECHO_S
from dataflow.system.messages import Channel, Frames, MessageError, Numbered, Refused
from dataflow.system.security import RunKeys, dealer_to, give_up_soon

# An agent's socket to the scheduler, which shows the run's key, and what is wrong with the
# connection in plain text.

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

    def __init__(self, address: str, keys: RunKeys, name: str) -> None:
        """name: of this agent's process, unique among all that ever join the run."""
        self.address, self.trouble = address, "nobody answers there"
        """Where it leads, and what is wrong with that as far as is known."""
        self._numbered = Numbered()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer_to(
            self._context,
            address,
            keys,
            {zmq.LINGER: 1000, zmq.SNDHWM: _KEPT, zmq.IDENTITY: name.encode()},
        )
        give_up_soon(self.socket, address)
        self._monitor: zmq.Socket[Any] = self.socket.get_monitor_socket()
        self.socket.connect(address)

    def say(self, message: FromAgent) -> None:
        """Send a message; never waits."""
        self._send(
            self._numbered.frames(
                FROM_AGENT.encode(message), time.monotonic(), is_kept=not is_repeated(message)
            )
        )

    def heard(self) -> list[ToAgent]:
        """What has come; what is no message is passed over."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            self.trouble = _TROUBLE.get(event, self.trouble)
        messages: deque[ToAgent] = deque()
        while self.socket.poll(0):
            try:
                message = self._numbered.take(self.socket.recv_multipart(), time.monotonic())
                if message is not None:
                    messages.append(TO_AGENT.decode(message))
            except MessageError as error:
                self.trouble = f"who is there speaks otherwise: {error}"
        for frames in self._numbered.missing(time.monotonic()):
            self._send(frames)
        return list(messages)

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


# An agent's handle on the forkserver of its host, which runs the user's program before it forks
# workers.

_PROGRAM = "dataflow.agent.program"


class HostForkserver(ForkserverClient):
    """A forkserver in the hands of its agent; a fresh process, as an agent has threads that no fork
    may inherit.

    consumes: as `ForkserverClient`, once `answer` was `Built`
    produces: what the program came to; events of the workers
    waits for: nothing
    unblocked by: its answers
    """

    def __init__(self, begin: Begin, sockets: Path) -> None:
        """Start it. sockets: the folder that it removes when all workers have ended."""
        connection, theirs = Channel.pair(FORKSERVER, SEND_S)
        process = program(_PROGRAM, str(sockets), end=theirs)
        theirs.close()
        self._hold(connection, process)
        connection.send(begin)

    def answer(self) -> Built | Failed | None:
        """What came of the program; None: nothing yet."""
        try:
            messages = self._connection.arrived()
        except (EOFError, OSError, MessageError) as error:
            status = self._process.poll()
            how = f"ended with status {status}" if status is not None else f"is gone ({error})"
            return Failed(
                f"the process that runs the program {how}; its agent's log in the run folder tells"
                " more"
            )
        assert len(messages) < 2, "it forks nobody before it is asked to"
        return messages[0] if messages else None


# What an agent does that does not hear its scheduler: a pure function of how long, and of what it
# was told before.

SEEK_S = 2.0
"""Without a word for so long it looks who leads the run, and asks to join again; and again after as
much."""
UNBEGUN_S = 30.0
"""A run that has not begun ends with its scheduler."""


def over(silent_s: float, stays: Stay | None, *, keeps: bool) -> bool:
    """Whether an agent ends that heard nothing for so long, though nobody stopped the run.

    stays: as it was told; None: the run has not begun. keeps: whether a worker is left that the
    others wait for.
    """
    if stays is None:
        return silent_s > UNBEGUN_S
    return silent_s > stays.wait_s + (stays.end_s if keeps else 0.0)


LEAVE_S = 5.0
"""From a SIGTERM on, for the scheduler to end the run, if it was asked too, or for trainers to
write a checkpoint."""
ALIVE_S = 0.5
"""Between two signs of life."""
_TURN_MS, _PROMPT_MS = 50, 10
_REACH_S, _AGAIN_S = 8.0, 1.0
"""For another host to be reached, longer than the scheduler takes one to be there that has died;
between two tries."""


@dataclass
class _Worker:
    """The last process of a worker here."""

    settings: Mapping[str, Any]
    keeps: bool
    pid: int = 0
    status: int | None = None
    has_ended: bool = False


class Agent:
    """One host of a run.

    consumes: what the scheduler asks of this host; events of the forkserver
    produces: that it is there, and a sign of life; events of the workers; to another scheduler all
        workers, as they are
    waits for: the scheduler; without one for the next one, for as long as it was told, then for the
        workers that have something to bring to an end
    unblocked by: either; its limit, after which it ends with all workers
    """

    def __init__(
        self,
        told: AgentEnvironment,
        keys: RunKeys,
        host: Host,
        address: str,
        sockets: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """address: at which the others reach this host. sockets: a private folder, which goes with
        the agent. Errors: RunError where it cannot listen at the address.
        """
        self._reach = ReachPort(address)
        self._told, self._host, self._address, self._sockets = told, host, address, sockets
        self._line = SchedulerSocket(told.scheduler, keys, f"{host.name}/{secrets.token_hex(8)}")
        self._clock = AwakeClock(clock)
        self._log = structlog.get_logger(host=host.name)
        self._relay = Relay(sockets)
        self._forkserver: HostForkserver | None = None
        self._workers: dict[str, _Worker] = {}
        self._built: Built | None = None
        self._stays: Stay | None = None
        self._is_paused = self._ends = False
        self._asked_at: float | None = None
        self._leaves_at = float("inf")
        self._heard = self._spoke = self._sought = self._clock()
        self._has_scheduler = False
        self.unheard = ""
        """Why it ended, where no scheduler heard of it; for whoever started it."""
        self._unreached_since: float | None = None
        """Since when it does not reach some host that the scheduler takes to be there."""
        self._joins_at: float | None = None
        """When it asks to join again, as it did not."""
        self._alone_s = 0.0
        """How long nobody was heard, the last time."""

    def run(self) -> int:
        """Be the host's agent until the run ends; the exit status."""
        take_back(Path(self._told.folder), self._host.name)
        self._join()
        try:
            while not self._ends:
                self._turn()
            return 0
        except RunError as error:
            self._line.say(Failed(str(error)))
            self._log.error("ends", error=str(error))
            print(str(error), file=sys.stderr)
            if not self._has_scheduler:
                leave(Path(self._told.folder), self._host.name, str(error))
                self.unheard = str(error)
            return 1
        finally:
            self._close()

    def leave(self) -> None:
        """End with all workers, after the scheduler has heard of it; asked again, end at once. May
        be called from a signal handler.
        """
        now = time.monotonic()
        self._ends |= self._asked_at is not None and now - self._asked_at > ECHO_S
        self._asked_at = self._asked_at or now

    def _part(self) -> None:
        """Say once that it leaves, and end when it is time."""
        if self._asked_at is not None and self._leaves_at == float("inf"):
            self._line.say(Leaves())
            is_heard = self._has_scheduler and self._clock() - self._heard < SEEK_S
            self._leaves_at = self._asked_at + (LEAVE_S if is_heard else 0.0)
        self._ends |= time.monotonic() >= self._leaves_at

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._line.socket, zmq.POLLIN)
        poller.register(self._relay.socket, zmq.POLLIN)
        if self._forkserver is not None:
            poller.register(self._forkserver.fileno(), zmq.POLLIN)
        poller.poll(_PROMPT_MS if self._relay.waits else _TURN_MS)
        for message in self._line.heard():
            now = self._clock()
            if now - self._heard > SEEK_S:
                self._alone_s = now - self._heard
            self._heard, self._has_scheduler = now, True
            self._apply(message)
        self._reach.answer()
        self._pass_messages()
        if self._forkserver is not None:
            self._look_at(self._forkserver)
        if self._clock() - self._spoke >= ALIVE_S:
            self._spoke = self._clock()
            self._line.say(Alive())
        self._seek()
        self._part()

    def _pass_messages(self, *, last: bool = False) -> None:
        """What workers say; without a scheduler it waits for the next one."""
        now = self._clock()
        is_heard = now - self._heard < SEEK_S
        self._relay.hear(answers=is_heard)
        frames = self._relay.due(now, last=last) if is_heard else None
        if frames is not None:
            self._spoke = now
            self._line.say(frames)

    def _apply(self, message: ToAgent) -> None:
        match message:
            case ToWorkers():
                self._relay.say(message.names, message.messages)
            case Pace():
                self._relay.beat_s = message.beat_s
            case Begin():
                if self._forkserver is None and self._reaches(message):
                    if self._host.own_folder:
                        run_disk.take_up(self._host.name, Path(self._told.folder), message.part)
                    self._show_workers(message.whereabouts)
                    self._forkserver = HostForkserver(message, self._sockets)
            case HandOver():
                self._show_workers(message.whereabouts)
                self._hand_over(message.question)
            case Refused():
                raise RunError(f"the scheduler refuses host '{self._host.name}': {message.error}")
            case End():
                self._ends = True
            case Stay():
                self._stays = message
            case Spawn() | SendSignal() | Pause():
                self._pass_on(message)
            case Alive():
                pass

    def _reaches(self, begin: Begin) -> bool:
        """Whether all others are reached; one that has just died the scheduler leaves out when it
        is asked again.
        """
        try:
            check_reach(self._host.name, begin.reach_addresses)
            return True
        except RunError:
            now = self._clock()
            self._unreached_since = self._unreached_since or now
            if now - self._unreached_since > _REACH_S:
                raise
            self._joins_at = now + _AGAIN_S
            return False

    def _pass_on(self, message: Spawn | SendSignal | Pause) -> None:
        """To the forkserver."""
        if self._forkserver is None:
            return
        match message:
            case Spawn():
                self._workers[message.name] = _Worker(message.settings, message.keeps)
                self._forkserver.spawn(message.name, message.settings, message.heavy, message.keeps)
            case SendSignal():
                self._forkserver.kill(message.name, message.number)
            case Pause():
                self._is_paused = message.is_paused
                self._forkserver.pause(message.is_paused)
                self._line.say(Paused(message.is_paused))

    def _look_at(self, forkserver: HostForkserver) -> None:
        """Pass on what the forkserver tells."""
        if self._built is None:
            answer = forkserver.answer()
            if isinstance(answer, Failed):
                raise RunError(f"host '{self._host.name}': {answer.error}")
            if answer is not None:
                self._built = answer
                self._line.say(answer)
            return
        for event in forkserver.events():
            if event["event"] == "gone":
                raise RunError(
                    f"the forkserver of host '{self._host.name}' ended unexpectedly, and all its"
                    f" workers with it; see logs/{log_name(self._host.name)} in the run folder"
                )
            worker = self._workers[event["name"]]
            worker.pid, worker.status = event["pid"], event["status"]
            worker.has_ended = event["event"] == "exited"
            if worker.has_ended:
                self._pass_messages(last=True)
            self._line.say(Notice(**event))

    def _join(self) -> None:
        self._line.say(
            Join(
                host=self._host,
                address=self._address,
                sockets=str(self._sockets),
                folder=self._told.folder,
                pid=os.getpid(),
                versions=versions(),
                digest=self._built.digest if self._built else "",
                reach_address=self._reach.address,
            )
        )

    def _seek(self) -> None:
        """Look for the scheduler that leads the run now, where the one before says nothing."""
        now = self._clock()
        if self._is_paused:
            self._heard = now
        silent_s = now - self._heard
        if self._joins_at is not None and now > self._joins_at:
            self._joins_at = None
            self._join()
        if now - max(self._heard, self._sought) > SEEK_S:
            self._sought = now
            rendezvous = Rendezvous.read(Path(self._told.folder))
            if rendezvous is not None and rendezvous.address != self._line.address:
                self._log.warning(
                    "turns to another scheduler",
                    address=rendezvous.address,
                    silent_s=round(silent_s, 1),
                )
                self._line.turn_to(rendezvous.address)
            self._join()
        if over(
            silent_s,
            self._stays,
            keeps=any(worker.keeps and not worker.has_ended for worker in self._workers.values()),
        ):
            word = "has not been heard for" if self._has_scheduler else "has not answered for"
            raise RunError(
                f"the scheduler at {self._line.address} {word} {silent_s:.0f} s:"
                f" {self._line.trouble}; host '{self._host.name}' ends with its workers; see that"
                " the address is one that this host reaches"
            )

    def _hand_over(self, question: int) -> None:
        """The scheduler gets every worker as it is, also those that it has just asked for."""
        for name, worker in self._workers.items():
            self._line.say(
                Handed(name, worker.pid, worker.settings, worker.status, not worker.has_ended)
            )
        self._line.say(HandedOver(question=question, alone_s=self._alone_s))

    def _show_workers(self, whereabouts: Mapping[str, str]) -> None:
        """Where the scheduler is now: workers that hear nothing look there."""
        try:
            replace(Whereabouts(**whereabouts), control=address(str(self._sockets))).write(
                self._sockets
            )
        except RunError as error:
            raise RunError(f"host '{self._host.name}': {error}") from error

    def _close(self) -> None:
        if self._forkserver is not None:
            self._forkserver.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._reach.close()
        self._line.say(Bye())
        self._line.close()
        self._relay.close()


def log_name(host: str) -> str:
    """In logs/ of the run folder."""
    return f"agent-{host}.log"
