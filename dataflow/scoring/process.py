"""The owner's view of one process of a pool: its channel, its calls, and the call it is making.

What runs in the process is `server.make_calls`.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.scoring.calls import Answers, CallAsks, CallHears, Calls, PoolCloses
from dataflow.scoring.server import PROGRESS_FIELDS
from dataflow.system.channel import Channel

Encode = Callable[[int, int], bytes]
"""Encodes the arguments of some calls of a job, from one to before another."""


@dataclass(frozen=True)
class CallRange:
    """Calls of a job that wait for a process."""

    job: int
    start: int
    stop: int
    is_alone: bool = False
    """Whether it must run alone, because it may have ended a process."""


@dataclass
class CallChunk:
    """Calls of a job that a process has."""

    job: int
    start: int
    open: set[int]
    """Numbers within the job of calls without an answer."""
    is_alone: bool
    sent_s: float


@dataclass(frozen=True)
class AnswerFrame:
    """Answers to some calls of a chunk, in the numbers of its job."""

    chunk: CallChunk
    calls: list[int]
    failures: dict[int, str]
    body: bytes = b""
    """Results of those that succeeded."""


@dataclass(frozen=True)
class Asked:
    """A call's question, by the call's number in its job."""

    job: int
    call: int
    number: int
    """Number of the question within the call, from 0: a call that is made again asks again."""
    body: bytes


class PoolProcess:
    """One process as its owner sees it; replaced in place when it ends and another is forked."""

    def __init__(self, number: int, progress: memoryview, concurrency: int, window: int) -> None:
        self.number = number
        width = concurrency * PROGRESS_FIELDS
        self._sources = range(number * width, (number + 1) * width, PROGRESS_FIELDS)
        self._progress = progress
        self.window = window
        self.channel: Channel[Any] | None = None
        self.begin(None)

    def begin(self, channel: Channel[Any] | None) -> None:
        """Start over with a new process at the other end."""
        for source in self._sources:
            self._progress[source] = -1
            self._progress[source + 3] = 0
        self.channel = channel
        self.pid = 0
        self.base_kb = 0
        self.cause = ""
        self.late: list[tuple[CallChunk, int]] = []
        self.idle_since: float | None = None
        self.chunks: dict[int, CallChunk] = {}
        self.asking: dict[tuple[int, int], CallHears] = {}
        """By job and call, the waiting question."""

    @property
    def open_calls(self) -> int:
        """Calls it has and has not answered."""
        return sum(len(chunk.open) for chunk in self.chunks.values())

    @property
    def has_alone(self) -> bool:
        """Whether it has a call that must stay alone."""
        return any(chunk.is_alone for chunk in self.chunks.values())

    def send(self, number: int, piece: CallRange, encode: Encode) -> None:
        """Give it calls; `encode` says with what they are made."""
        calls = set(range(piece.start, piece.stop))
        self.chunks[number] = CallChunk(
            piece.job, piece.start, calls, piece.is_alone, time.monotonic()
        )
        self.idle_since = None
        if self.channel is not None:
            with contextlib.suppress(OSError):  # that it is gone shows when reading
                self.channel.post(Calls(number, len(calls)), body=encode(piece.start, piece.stop))

    def flush(self) -> None:
        """Write as much as it takes."""
        assert self.channel is not None
        with contextlib.suppress(OSError):
            self.channel.flush()

    def tell(self, job: int, call: int, number: int, body: bytes) -> None:
        """Answer a question; a call that does not wait for it hears nothing."""
        waiting = self.asking.get((job, call))
        if waiting is None or waiting.number != number or self.channel is None:
            return
        del self.asking[job, call]
        with contextlib.suppress(OSError):
            self.channel.post(waiting, body=body)

    def dismiss(self) -> None:
        """Let its calls release what they hold; then it ends by itself."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.post(PoolCloses())

    def read(self) -> tuple[list[AnswerFrame | Asked], bool]:
        """Answers and questions that came, and whether it is gone or writes nonsense."""
        assert self.channel is not None
        frames: list[AnswerFrame | Asked] = []
        try:
            frames.extend(map(self._frame, self.channel.arrived()))
        except (EOFError, OSError, KeyError, ValueError):
            return frames, True
        return frames, False

    def _frame(self, answers: Any) -> AnswerFrame | Asked:
        assert self.channel is not None
        if isinstance(answers, CallAsks):
            return self._asked(answers)
        if not isinstance(answers, Answers) or not self.channel.bodies:
            raise ValueError("no answers")
        chunk, body = self.chunks[answers.chunk], self.channel.bodies.popleft()
        calls = [call + chunk.start for call in answers.calls]
        if not chunk.open.issuperset(calls):
            raise ValueError("answers to calls that are not open")
        chunk.open.difference_update(calls)
        if not chunk.open:
            del self.chunks[answers.chunk]
        self.idle_since = None
        for call in calls:
            self.asking.pop((chunk.job, call), None)
        return AnswerFrame(
            chunk,
            calls,
            {call + chunk.start: text for call, text in answers.failures.items()},
            body,
        )

    def _asked(self, question: CallAsks) -> Asked:
        assert self.channel is not None
        chunk, body = self.chunks[question.chunk], self.channel.bodies.popleft()
        call = question.call + chunk.start
        if call not in chunk.open:
            raise ValueError("a question of a call that is not open")
        self.asking[chunk.job, call] = CallHears(question.chunk, question.call, question.number)
        self.idle_since = None
        return Asked(chunk.job, call, question.number, body)

    def running(
        self, before_ns: int | None = None, *, is_at: bool = False
    ) -> list[tuple[CallChunk, int]]:
        """Calls that are being made; only those begun before a time of the monotonic clock, if
        given; is_at: only the one whose own code is what the process is at, where calls ask.
        """
        progress, running = self._progress, []
        for source in self._sources:
            number, call, since_ns, is_busy, *_ = fields = progress[
                source : source + PROGRESS_FIELDS
            ].tolist()
            if (
                number < 0
                or (before_ns is not None and since_ns >= before_ns)
                or (is_at and not is_busy)
            ):
                continue
            chunk = self.chunks.get(number)
            is_steady = fields == progress[source : source + PROGRESS_FIELDS].tolist()
            if is_steady and chunk is not None and chunk.start + call in chunk.open:
                running.append((chunk, chunk.start + call))
        return running

    def is_silent(self, now: float, patience_s: float) -> bool:
        """Whether it has had calls for a while and made none: stopped, or lost before the first."""
        if self.asking or any(self._progress[source] >= 0 for source in self._sources):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        return self.idle_since is not None and now - self.idle_since > patience_s

    def grown_kb(self) -> int:
        """Kilobytes it has taken since it began; 0 where that cannot be told."""
        return memory_kb(self.pid) - self.base_kb if self.pid else 0


def pieces_of(chunks: Iterable[CallChunk]) -> list[CallRange]:
    """The open calls of some chunks as pieces, neighbours together."""
    pieces: list[CallRange] = []
    for chunk in chunks:
        for call in sorted(chunk.open):
            last = pieces[-1] if pieces else None
            if (
                last
                and not chunk.is_alone
                and (last.job, last.stop, last.is_alone) == (chunk.job, call, False)
            ):
                pieces[-1] = CallRange(chunk.job, last.start, call + 1)
            else:
                pieces.append(CallRange(chunk.job, call, call + 1, chunk.is_alone))
    return pieces


def memory_kb(pid: int) -> int:
    """Kilobytes of memory that a process holds, mapped files left out; 0 where that cannot be
    told.
    """
    with contextlib.suppress(OSError, ValueError), Path(f"/proc/{pid}/status").open() as status:
        sizes = (line.split()[1] for line in status if line.startswith(("RssAnon:", "RssShmem:")))
        return sum(int(kb) for kb in sizes)
    return 0
