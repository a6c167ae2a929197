"""The ranks of one worker: rank 0 starts the others, announces each exchange, and finds out
which of them failed; they load a model together.

The worker that the plan starts is rank 0, and it starts the others itself. They have no edges, no
ledger and no heartbeat of their own, so the scheduler need not know them: to it a replica is one
worker, which fails when one of its ranks does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.limits import Limits
from dataflow.system import child
from dataflow.system.clocks import Countdown
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Channel, Codec, Message, flush_all
from dataflow.system.rank_places import RankPlaces
from operators.ranks import group
from operators.ranks.group import ExchangeWatch

MESSAGE_BYTES = 1 << 36
"""A step's rows may be large; who holds the other end is a process of this run."""


class Close(Message):
    """Rank 0: all is over."""


class Load(Message):
    """Rank 0: read the model."""


class Loaded(Message):
    """Another rank: I have read it."""


class Build(Message):
    """Rank 0: all have read the model."""


class Sleep(Message):
    """Rank 0: put your memory aside, as I do."""


class Wake(Message):
    """Rank 0: take it again."""


class SleepDone(Message):
    """Another rank: I have done so."""


class Failed(Message):
    """Another rank: this error ends me."""

    kind: str
    """The error's class."""
    text: str


def codec_of(protocol: str, *kinds: type[Any]) -> Codec[Any]:
    """The messages of the ranks of one operator."""
    return Codec(
        protocol,
        1,
        Close,
        Load,
        Loaded,
        Build,
        Sleep,
        Wake,
        SleepDone,
        Failed,
        *kinds,
        max_bytes=MESSAGE_BYTES,
    )


T = TypeVar("T")

Start = Callable[[socket.socket, int], child.Child]
"""Starts a rank of this number that talks over this end of a socket pair."""
BLAME_S = 3.0
"""For the cause of a broken exchange to show: an exit status, or a rank's last words."""
HURT = (WorkerDied.__name__, DeadlineError.__name__)
"""What a rank says of itself when another one broke the exchange."""
FILES_OF_A_RANK = 4
"""That rank 0 holds open at most: of one on another host two sockets, and a share of its host's
connection."""
END_S = 5.0
"""For the other ranks to end before they are killed."""


def program(module: str, keep: Sequence[int] = ()) -> Start:
    """python -m MODULE FD: a fresh process, which may use CUDA whatever this one has done; it
    imports for seconds. keep: open files for it.
    """
    return lambda end, rank: child.program(module, end=end, keep=keep, stdin=subprocess.DEVNULL)


def forked(main: Callable[[int, int], int], keep: Sequence[int] = ()) -> Start:
    """A fork that runs main(FD, rank): the user's functions reach it by inheritance, as they reach
    the workers. keep: open files for it.

    To be started before this process has used a GPU. It ends with its parent.
    """

    def start(end: socket.socket, rank: int) -> child.Child:
        child.refuse_used_cuda(
            "a rank",
            "run the graph in processes, or make the ranks before anything touches the GPU",
        )
        number = end.fileno()

        def body() -> int:
            faulthandler.enable()
            return main(number, rank)

        return child.fork(body, keep=[number, *keep], ends_with_parent=signal.SIGKILL)

    return start


def in_words(kind: type[object]) -> str:
    """A kind of message, as people are told of it.

    >>> in_words(SleepDone)
    'sleep done'
    """
    return re.sub(r"\B(?=[A-Z])", " ", kind.__name__).lower()


def on_their_hosts(start: Start, places: RankPlaces | None) -> Start:
    """`start` for the ranks of this host; agents start those of other hosts."""
    if places is None or places.starts is None:
        return start
    far, starts = places.is_far, places.starts
    return lambda end, rank: starts.start(end, rank) if far(rank) else start(end, rank)


def timed_out(error: Exception) -> bool:
    """Whether an exchange reached its deadline; gloo and NCCL only say so in their text."""
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text


class Team:
    """The other ranks of one worker, seen from rank 0.

    consumes: their answers, their last words, their exit statuses
    produces: messages to them
    waits for: an answer, up to a deadline
    unblocked by: the answer, or the rank's end
    """

    def __init__(
        self, node: str, size: int, start: Start, limits: Limits, codec: Codec[Any]
    ) -> None:
        """Start ranks 1 to size - 1 of `node`, which speak `codec`; they wait for their first
        message.
        """
        self.node, self.size, self.limits = node, size, limits
        self.folder = Path(tempfile.mkdtemp(prefix="dataflow-ranks-"))
        self._channels: dict[int, Channel[Any]] = {}
        self._processes: dict[int, child.Child] = {}
        _allow_files(FILES_OF_A_RANK * size)
        for rank in range(1, size):
            channel, theirs = Channel.pair(codec, limits.exchange_s)
            with theirs:
                self._processes[rank] = start(theirs, rank)
            self._channels[rank] = channel

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """An error within ends all ranks and leaves their process group; it is re-raised with the
        failed rank's text.
        """
        try:
            yield
        except BaseException as error:
            cause = self.blame(error, "starting") if isinstance(error, Exception) else error
            self.close()
            group.leave()
            if cause is error:
                raise
            raise cause from error

    def tell(self, message: Any, rank: int | None = None) -> None:
        """Say something to one rank, or to all. Raises OSError when one does not take it."""
        self.deal(dict.fromkeys(self._channels if rank is None else [rank], message))

    def deal(self, messages: Mapping[int, Any]) -> None:
        """Say to each rank what is for it; they take it at the same time, however large. Raises
        OSError when one does not.
        """
        frames: dict[int, memoryview] = {}
        for rank, message in messages.items():
            channel = self._channels[rank]
            if id(message) not in frames:
                frames[id(message)] = channel.framed(message)
            channel.post_frame(frames[id(message)])
        flush_all([self._channels[rank] for rank in messages], self.limits.exchange_s)

    def answer(self, rank: int, kind: type[T], wait_s: float | None = None) -> T:
        """What a rank answers, a message of this kind, within `wait_s` seconds; None: as long as a
        start may take.

        Raises WorkerDied when it fails instead, DeadlineError when it is late.
        """
        wait_s, name = self.limits.start_s if wait_s is None else wait_s, in_words(kind)
        try:
            message = self._channels[rank].receive(wait_s)
        except EOFError:
            raise self._died(rank, "", f"its {name}") from None
        except TimeoutError:
            raise DeadlineError(
                f"rank 0 of '{self.node}' waited {wait_s:.0f} s for '{name}' of rank {rank}"
                f" ({self._who(rank)}) and did not get it; see this worker's log, or raise"
                " Limits.start_s"
            ) from None
        if not isinstance(message, kind):
            text = message.text if isinstance(message, Failed) else f"it said {message!r:.200}"
            raise self._died(rank, text, f"its {name}")
        return message

    def fallen(self) -> bool:
        """Whether some rank has ended."""
        return any(process.poll() is not None for process in self._processes.values())

    def blame(self, error: Exception, doing: str) -> Exception:
        """The cause of an error in an exchange: a rank that failed or ended, else one that was
        silent, or the error.
        """
        if not isinstance(error, RuntimeError | OSError) or isinstance(error, RunError):
            return error
        late = timed_out(error)
        hurt: dict[int, str] = {}
        failed: dict[int, str] = {}
        wait = Countdown(BLAME_S)
        while len(hurt) < len(self._channels) and not wait.is_over:
            for rank in self._channels.keys() - hurt.keys():
                if not self._channels[rank].readable(0.0):
                    continue
                kind, text = self._failure(rank)
                if kind not in HURT:
                    failed[rank] = text
                else:
                    hurt[rank], late = text, late or kind == DeadlineError.__name__
            # who was ended said nothing; others may speak of the connections that this broke
            if failed:
                rank = min(failed, key=lambda member: (bool(failed[member]), member))
                return self._died(rank, failed[rank], doing)
            if late and len(hurt) + 1 == len(self._channels):
                break
            time.sleep(0.02)
        silent = sorted(self._channels.keys() - hurt.keys())
        if late and silent:
            ranks = ", ".join(f"{rank} ({self._who(rank)})" for rank in silent)
            return DeadlineError(
                f"rank 0 of '{self.node}' waited {self.limits.exchange_s:.0f} s for rank {ranks} in"
                f" {doing} ({str(error)[:200]}); see whether that process hangs, or raise"
                " Limits.exchange_s"
            )
        return self._died(min(hurt), hurt[min(hurt)], doing) if hurt else error

    def close(self) -> None:
        """End the other ranks, by SIGKILL where a message does not do; may be called again."""
        deadline = time.monotonic() + END_S
        for channel in self._channels.values():
            with contextlib.suppress(OSError, ValueError):  # the end is closed already
                channel.post(Close())
        for channel in self._channels.values():
            with contextlib.suppress(OSError, ValueError):
                flush_all([channel], max(0.0, deadline - time.monotonic()))
            channel.close()
        for process in self._processes.values():
            process.end(deadline - time.monotonic())
        self._channels, self._processes = {}, {}
        shutil.rmtree(self.folder, ignore_errors=True)

    def _failure(self, rank: int) -> tuple[str, str]:
        """The error's type and text of a rank that has ended, or is about to; empty where it sent
        none.
        """
        try:
            message = self._channels[rank].receive(BLAME_S)
        except (EOFError, TimeoutError, OSError):
            return "", ""
        return (message.kind, message.text) if isinstance(message, Failed) else ("", "")

    def _who(self, rank: int) -> str:
        process = self._processes[rank]
        return (
            f"pid {process.pid} on host '{process.host}', which has a log of its own"
            if process.host
            else f"pid {process.pid}"
        )

    def _died(self, rank: int, reason: str, doing: str) -> WorkerDied:
        process = self._processes[rank]
        how = process.state if process.ended_within(BLAME_S) else "closed its channel"
        return WorkerDied(
            f"rank {rank} of '{self.node}' ({self._who(rank)}) {how} while rank 0 waited for it in"
            f" {doing}{': ' + reason if reason else ''}; see this worker's log"
        )


def _allow_files(more: int) -> None:
    """Let this process open so many files more than it may, as far as the system lets it: shells
    often allow 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else soft + more
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft + more), hard))


LOOK_S = 5.0
"""A rank that waits for a message looks this often whether rank 0 still lives."""


class Exchange:
    """Rank 0's side.

    consumes: what rank 0 wants done
    produces: messages to the other ranks
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of it, their end, or the time-out; after an error every call raises
    """

    def __init__(self, team: Team, watch: ExchangeWatch) -> None:
        self.team, self._watch = team, watch
        self._broken = ""

    def tell(self, message: Any) -> None:
        """Say what comes. Raises RunError when the ranks are not in step any more."""
        self.check()
        self.team.tell(message)

    def check(self) -> None:
        """Raise RunError when the ranks are not in step any more."""
        if self._broken:
            raise RunError(
                f"the ranks of '{self.team.node}' are not in step any more: {self._broken}; build"
                " it again"
            )

    def answers(self, kind: type[T], wait_s: float | None = None) -> list[T]:
        """What each of the other ranks answers, a message of this kind, in their order."""
        wait_s = self.team.limits.exchange_s if wait_s is None else wait_s
        with self._watch.lifted():
            return [self.team.answer(rank, kind, wait_s) for rank in range(1, self.team.size)]

    @contextlib.contextmanager
    def beside(self, message: Sleep | Wake) -> Iterator[None]:
        """Have the others put memory aside, or take it again, while rank 0 does so within; over
        when all have.
        """
        with self.together(f"a {in_words(type(message))}"):
            self.tell(message)
            with self._watch.lifted():
                yield
            self.answers(SleepDone, self.team.limits.checkpoint_s)

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """An error that another rank may have caused, as one that names it; the ranks end with
        it.
        """
        try:
            with self._watch.within():
                yield
        except Exception as error:
            if self._broken:
                raise
            cause = self.team.blame(error, doing)
            self._broken = str(cause)
            self.team.close()
            if cause is error:
                raise
            raise cause from error

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._watch.close()
        self.team.close()


def next_message(
    channel: Channel[Any],
    rank: int,
    parent: int,
    wait_s: float,
    *,
    look_s: float = LOOK_S,
    meanwhile: Callable[[], None] = lambda: None,
) -> Any:
    """Rank 0's next message; `wait_s` bounds a message that has begun; `meanwhile` is called every
    `look_s` seconds.

    Raises WorkerDied when rank 0 has ended.
    """
    while not channel.readable(look_s):
        meanwhile()
        if os.getppid() != parent:
            raise WorkerDied(
                f"rank {rank} waited for a word of rank 0 (pid {parent}), which has ended; see"
                " its log"
            )
    try:
        return channel.receive(wait_s)
    except EOFError:
        raise WorkerDied(
            f"rank {rank} waited for a word of rank 0 (pid {parent}), which ended without saying"
            " so; see its log"
        ) from None


def expected(kind: type[T], channel: Channel[Any], rank: int, parent: int, wait_s: float) -> T:
    """The next message of rank 0, which is of this kind. Raises RunError for another, and as
    `next_message`.
    """
    message = next_message(channel, rank, parent, wait_s)
    if not isinstance(message, kind):
        raise RunError(
            f"rank {rank} waited for '{kind.__name__}' of rank 0 (pid {parent}), but it said"
            f" {message!r:.200}"
        )
    return message


@contextlib.contextmanager
def named(
    channel: Channel[Any], rank: int, parent: int, doing: str, watch: ExchangeWatch
) -> Iterator[None]:
    """On another rank: turn a broken exchange into an error that names who waited for whom."""
    try:
        with watch.within():
            yield
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, RunError):
            raise
        waited = f"rank {rank} waited for the other ranks in {doing}"
        if timed_out(error):
            raise DeadlineError(
                f"{waited}, and one was silent ({error}); see rank 0's log (pid {parent})"
            ) from error
        if channel.readable(BLAME_S):
            raise WorkerDied(
                f"{waited}, and rank 0 (pid {parent}) or another ended ({error}); see its log"
            ) from error
        raise


def send_failure(channel: Channel[Any], error: Exception) -> None:
    """On another rank: send rank 0 the error that ends this rank."""
    with contextlib.suppress(OSError):
        channel.send(Failed(type(error).__name__, f"{type(error).__name__}: {error}"))


Loading = Callable[[bool], AbstractContextManager[None]]
"""Within it this rank reads the model; given True, it alone, since it holds the whole of it for a
moment. It ends when all ranks have read it, for which no exchange between ranks has to wait."""


def leading(team: Team, watch: ExchangeWatch) -> Loading:
    """Rank 0's."""

    @contextlib.contextmanager
    def loading(in_turn: bool) -> Iterator[None]:
        with watch.lifted():
            if not in_turn:
                team.tell(Load())
            yield
            for rank in range(1, team.size):
                if in_turn:
                    team.tell(Load(), rank)
                team.answer(rank, Loaded)
        team.tell(Build())

    return loading


def following(channel: Channel[Any], rank: int, wait_s: float, watch: ExchangeWatch) -> Loading:
    """The loading of another rank, in the turn that rank 0 gives it."""

    @contextlib.contextmanager
    def loading(_in_turn: bool) -> Iterator[None]:
        with watch.lifted():
            expected(Load, channel, rank, os.getppid(), wait_s)
            yield
            channel.send(Loaded())
            expected(Build, channel, rank, os.getppid(), wait_s)

    return loading


def run_rank(
    end: int, codec: Codec[Any], wait_s: float, work: Callable[[Channel[Any]], None]
) -> int:
    """Do this rank's work over the socket of this number; the exit status.

    wait_s: how long the other end may take to read. work: follows rank 0 to the end. What it raises
    is printed and told to rank 0, and the group is not left: the others may be gone, or wait in an
    exchange.
    """
    leave_to_leader()
    channel = Channel(socket.socket(fileno=end), codec, wait_s)
    try:
        work(channel)
    except Exception as error:
        traceback.print_exc()
        send_failure(channel, error)
        return 1
    finally:
        channel.close()
    group.leave()
    return 0
