"""Rank 0's hold on the other ranks: starts them, speaks to them, finds out which of them failed,
ends them.

The worker that the plan starts is rank 0, and it starts the others itself. They have no edges, no
ledger and no heartbeat of their own, so the scheduler need not know them: to it a replica is one
worker, which fails when one of its ranks does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.limits import Limits
from dataflow.system import child
from dataflow.system.channel import Channel
from dataflow.system.clocks import Countdown
from dataflow.system.messages import Codec
from dataflow.system.rank_places import RankPlaces
from operators.ranks import group
from operators.ranks.messages import Close, Failed

T = TypeVar("T")

Start = Callable[[socket.socket, int], child.Child]
"""Starts a rank of this number that talks over this end of a socket pair."""
BLAME_S = 3.0
"""For the cause of a broken exchange to show: an exit status, or a rank's last words."""
HURT = (WorkerDied.__name__, DeadlineError.__name__)
"""What a rank says of itself when another one broke the exchange."""
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
        for receiver in self._channels if rank is None else [rank]:
            self._channels[receiver].send(message)

    def answer(self, rank: int, kind: type[T], wait_s: float | None = None) -> T:
        """What a rank answers, a message of this kind, within `wait_s` seconds; None: as long as a
        start may take.

        Raises WorkerDied when it fails instead, DeadlineError when it is late.
        """
        wait_s, name = self.limits.start_s if wait_s is None else wait_s, kind.__name__.lower()
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
        for channel in self._channels.values():
            with contextlib.suppress(OSError, ValueError):  # the end is closed already
                channel.send(Close())
            channel.close()
        deadline = time.monotonic() + END_S
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
