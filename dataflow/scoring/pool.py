"""A pool of killable processes: each submitted call is answered once, by its value or by its
failure.

Over 600 lines: the pool and its view of each process are one state, which all its rules read.
"""

import contextlib
import mmap
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import WorkerDied
from dataflow.scoring.calls import (
    CALLS,
    Answers,
    CallAsks,
    CallHears,
    Calls,
    PoolCloses,
    PoolSettings,
)
from dataflow.scoring.failure import DIED
from dataflow.scoring.server import (
    PROGRESS_FIELDS,
    EndProcess,
    ForkProcess,
    ProcessEnded,
    Spawned,
    start_server,
)
from dataflow.system.messages import Channel, MessageError

# The owner's view of one process of a pool: its channel, its calls, and the call it is making.
# What runs in the process is `server.make_calls`.

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
class Answer:
    """Answers to some calls of a job."""

    job: int
    calls: list[int]
    failures: Mapping[int, str]
    """Failures, by call."""
    body: bytes
    """What those gave that did not fail, in their order, as `PoolSettings.pack` made it; not to be
    looked into where all failed."""


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
        self.post(Calls(number, len(calls)), encode(piece.start, piece.stop))

    def post(self, message: Any, body: bytes | None = None) -> None:
        """Send a message, if it is there."""
        if self.channel is not None:
            with contextlib.suppress(OSError):  # that it is gone shows when reading
                self.channel.post(message, body=body)

    def tell(self, job: int, call: int, number: int, body: bytes) -> None:
        """Answer a question; a call that does not wait for it hears nothing."""
        waiting = self.asking.get((job, call))
        if waiting is not None and waiting.number == number:
            del self.asking[job, call]
            self.post(waiting, body)

    def read(self) -> tuple[list[tuple[CallChunk, Answer | Asked]], bool]:
        """Answers and questions that came, by chunk, and whether it is gone or writes nonsense."""
        assert self.channel is not None
        frames: list[tuple[CallChunk, Answer | Asked]] = []
        try:
            frames.extend(map(self._frame, self.channel.arrived()))
        except (EOFError, OSError, KeyError, ValueError):
            return frames, True
        return frames, False

    def _frame(self, message: Any) -> tuple[CallChunk, Answer | Asked]:
        assert self.channel is not None
        if not isinstance(message, Answers | CallAsks) or not self.channel.bodies:
            raise ValueError("neither answers nor a question")
        chunk, body = self.chunks[message.chunk], self.channel.bodies.popleft()
        calls = message.calls if isinstance(message, Answers) else [message.call]
        calls = [call + chunk.start for call in calls]
        if not chunk.open.issuperset(calls):
            raise ValueError("of calls that are not open")
        self.idle_since = None
        if isinstance(message, CallAsks):
            self.asking[chunk.job, calls[0]] = CallHears(
                message.chunk, message.call, message.number
            )
            return chunk, Asked(chunk.job, calls[0], message.number, body)
        chunk.open.difference_update(calls)
        if not chunk.open:
            del self.chunks[message.chunk]
        for call in calls:
            self.asking.pop((chunk.job, call), None)
        failures = {call + chunk.start: text for call, text in message.failures.items()}
        return chunk, Answer(chunk.job, calls, failures, body)

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


# The pool itself.

_PATIENCE_S = 10.0
_STOPPED_S = 1.0
"""After so many seconds without an answer the server may have been stopped."""
_MEMORY_LOOK_S = 0.1
_CLOSE_S = 5.0
_DEATHS = 3
_QUICK_S, _SLOW_S = 0.02, 0.2
_LARGEST_WINDOW = 1024


@dataclass
class _Job:
    encode: Encode
    calls_left: int
    deaths: dict[int, int] = field(default_factory=dict)
    """Processes that ended during a call, by call."""


class Pool:
    """Makes calls in processes that can be killed, and forks others for those that end.

    consumes: jobs by `submit`; a job is a number of calls and a way to encode a range of them
    produces: answers from `poll`, in any order, each call once
    waits for: nothing; both return at once
    unblocked by: `fileno`, readable when `poll` has something to do, and the clock, for the limits
    """

    def __init__(self, settings: PoolSettings) -> None:
        """Fork the server and its processes; raises OSError when the machine has no room for
        them.
        """
        self.restarts = 0
        self._settings = settings
        words = settings.processes * settings.concurrency * PROGRESS_FIELDS
        self._progress = memoryview(mmap.mmap(-1, words * 8)).cast("q")
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        self._pending: deque[CallRange] = deque()
        self._answers: list[Answer] = []
        self._asked: list[Asked] = []
        self._orders: deque[float] = deque()
        self._next_job = self._next_chunk = self._deaths = self._blameless = 0
        self._memory_looked_s = 0.0
        self._window = (
            1 if settings.asks else 2
        ) * settings.concurrency  # else one may wait behind such as wait for it
        window = self._window if settings.processes > 1 else 1 << 30
        self._processes = [
            PoolProcess(number, self._progress, settings.concurrency, window)
            for number in range(settings.processes)
        ]
        self._start_server()

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""
        return sum(job.calls_left for job in self._jobs.values())

    @property
    def at_work(self) -> float:
        """The share of the calls that its processes could make at once which they are making, from
        0 to 1.
        """
        if not self._jobs:
            return 0.0
        most = self._settings.concurrency
        open_calls = sum(min(process.open_calls, most) for process in self._processes)
        return open_calls / (most * len(self._processes))

    @property
    def pids(self) -> list[int]:
        """Its processes, the server first."""
        return [self._server.pid, *(process.pid for process in self._processes if process.pid)]

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    def waits(self) -> Sequence[int]:
        """That descriptor."""
        return (self.fileno(),)

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job of so many calls; `encode(start, stop)` is the payload of some of them. Its
        number.
        """
        job = self._next_job
        self._next_job += 1
        if calls:
            self._jobs[job] = _Job(encode, calls)
            self._pending.append(CallRange(job, 0, calls))
            self._assign()
        return job

    def poll(self) -> list[Answer]:
        """Carry on, and return the answers that have come; WorkerDied when no process can be kept
        alive.
        """
        with contextlib.suppress(OSError):  # that the server is gone shows when reading
            self._control.flush()
        for key, events in self._selector.select(0):
            process: PoolProcess | None = key.data
            if process is None:
                self._read_replies()
            elif (channel := process.channel) is not None and channel is key.fileobj:
                if events & selectors.EVENT_WRITE:
                    with contextlib.suppress(OSError):
                        channel.flush()
                    self._listen(process)
                if events & selectors.EVENT_READ:
                    self._read(process)
        self._keep_limits()
        self._assign()
        answers, self._answers = self._answers, []
        return answers

    def asked(self) -> list[Asked]:
        """Questions that calls asked until the last `poll`, each once."""
        questions, self._asked = self._asked, []
        return questions

    def tell(self, question: Asked, body: bytes) -> None:
        """Answer a question. The process that asked may have ended meanwhile: then the call is made
        again, and asks anew.
        """
        for process in self._processes:
            process.tell(question.job, question.call, question.number, body)
            if process.channel is not None:
                self._listen(process)

    def close(self) -> None:
        """End every process, within 5 seconds; calls that ask give back what they hold before."""
        for process in self._processes:
            if self._settings.asks:
                process.post(PoolCloses())
            self._close_channel(process)
        self._control.close()
        self._server.let_go_on()
        self._server.end(_CLOSE_S)
        self._selector.close()

    # The server and its processes

    def _start_server(self) -> None:
        self._control, self._server = start_server(self._progress, self._settings)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        self._orders.clear()
        for process in self._processes:
            self._spawn(process)

    def _spawn(self, process: PoolProcess) -> None:
        channel, theirs = Channel.pair(CALLS)
        process.begin(channel)
        self._selector.register(channel, selectors.EVENT_READ, process)
        with theirs, contextlib.suppress(OSError):
            self._control.post(ForkProcess(process.number), [theirs.fileno()])
        self._orders.append(time.monotonic())

    def _end(self, process: PoolProcess, *, is_lost: bool = False) -> None:
        self.restarts += 1
        self._close_channel(process)
        with contextlib.suppress(OSError):
            self._control.post(EndProcess(process.number, is_lost))
        self._orders.append(time.monotonic())

    def _close_channel(self, process: PoolProcess) -> None:
        if process.channel is not None:
            self._selector.unregister(process.channel)
            process.channel.close()
            process.channel = None

    def _read_replies(self) -> None:
        try:
            replies = self._control.arrived()
        except (EOFError, OSError, MessageError):
            self._restart_server()
            return
        for reply in replies:
            self._orders.popleft()
            process = self._processes[reply.process]
            match reply:
                case Spawned():
                    process.pid, process.base_kb = reply.pid, memory_kb(reply.pid)
                case ProcessEnded():
                    self._bury([process], reply.status)
                    self._spawn(process)

    def _restart_server(self) -> None:
        self.restarts += 1
        self._deaths += 1
        self._selector.unregister(self._control)
        self._control.close()
        self._server.end(0.0)
        is_blameless = not any(process.running() for process in self._processes)
        self._blameless = self._blameless + 1 if is_blameless else 0
        if self._blameless > _DEATHS:
            raise WorkerDied(
                f"the server of a scorer's processes ended {self._blameless} times while no call"
                " was made; look in the system's log for what ends it (memory?), then run again"
            )
        for process in self._processes:
            self._close_channel(process)
        self._bury(self._processes, -signal.SIGKILL)
        self._start_server()

    # What goes out and comes back

    def _assign(self) -> None:
        while self._pending:
            piece = self._pending[0]
            process = self._taker(piece)
            if process is None:
                return
            self._pending.popleft()
            stop = min(piece.stop, piece.start + process.window - process.open_calls)
            if stop < piece.stop:
                self._pending.appendleft(CallRange(piece.job, stop, piece.stop))
            piece = CallRange(piece.job, piece.start, stop, piece.is_alone)
            process.send(self._next_chunk, piece, self._jobs[piece.job].encode)
            self._next_chunk += 1
            self._listen(process)

    def _taker(self, piece: CallRange) -> PoolProcess | None:
        """The process with the most room for it; none while a call is alone in the pool, or waits
        to be.
        """
        best, most = None, 0
        for process in self._processes:
            if process.has_alone or (piece.is_alone and process.chunks):
                return None
            room = process.window - process.open_calls
            if process.channel is not None and room > most:
                best, most = process, room
        return best

    def _listen(self, process: PoolProcess) -> None:
        assert process.channel is not None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.has_output else 0)
        if self._selector.get_key(process.channel).events != events:
            self._selector.modify(process.channel, events, process)

    def _read(self, process: PoolProcess) -> None:
        frames, is_over = process.read()
        for chunk, frame in frames:
            self._deaths = self._blameless = 0
            if isinstance(frame, Asked):
                self._asked.append(frame)
                continue
            self._answer(frame)
            if not chunk.open:
                self._pace(process, time.monotonic() - chunk.sent_s)
        if is_over and (self._control.is_abandoned or self._server.poll() is not None):
            self._restart_server()  # its processes have ended with it
        elif (
            is_over and process.pid
        ):  # else the server had its end, and is about to say that it started, or ends itself
            self._deaths += 1
            self._end(process, is_lost=True)

    def _pace(self, process: PoolProcess, took_s: float) -> None:
        """Several processes share the calls in pieces that grow while they come back quickly; where
        calls ask, each has as many as it makes at once.
        """
        if self._settings.asks:
            return
        if self._settings.processes > 1 and took_s < _QUICK_S:
            process.window = min(process.window * 2, max(_LARGEST_WINDOW, self._window))
        elif self._settings.processes > 1 and took_s > _SLOW_S:
            process.window = max(process.window // 2, self._window)

    def _answer(self, answer: Answer) -> None:
        job = self._jobs[answer.job]
        job.calls_left -= len(answer.calls)
        if not job.calls_left:
            del self._jobs[answer.job]
        self._answers.append(answer)

    # Limits and ends

    def _keep_limits(self) -> None:
        now = time.monotonic()
        if self._orders and now - self._orders[0] > _STOPPED_S:
            self._server.let_go_on()
        if self._orders and now - self._orders[0] > _PATIENCE_S:
            self._restart_server()
            return
        timeout_s = self._settings.timeout_s
        if self._settings.is_async:
            # the loop itself keeps the limit, unless it is blocked
            timeout_s += min(1.0, timeout_s)
        before_ns = int((now - timeout_s) * 1e9)
        looks = (
            self._settings.memory_mb is not None and now - self._memory_looked_s > _MEMORY_LOOK_S
        )
        if looks:
            self._memory_looked_s = now
        for process in self._processes:
            if process.channel is None or not process.chunks:
                continue
            process.late = process.running(before_ns)
            if process.late and (blocking := process.running(is_at=True)):
                process.late = blocking
            is_silent = process.is_silent(now, _PATIENCE_S + timeout_s)
            self._deaths += is_silent
            if process.late or is_silent or (looks and self._is_too_large(process)):
                self._end(process)

    def _is_too_large(self, process: PoolProcess) -> bool:
        limit_mb = self._settings.memory_mb
        if limit_mb is None or process.grown_kb() <= limit_mb << 10:
            return False
        process.cause = f"{DIED}: its process took more memory than its limit of {limit_mb} MB"
        return True

    def _bury(self, processes: list[PoolProcess], status: int | None) -> None:
        """Fail the calls that processes ended for, and have the rest made again.

        A call is to blame when it alone was being made, or its code was what the process was at;
        several are made again one at a time, to find out.
        A first SIGKILL is excused: it may have come from outside, or the memory may be that of
        earlier calls. Calls that ask would wait for their owner one at a time: they are made again
        beside each other, and are to blame once they have seen _DEATHS processes end.
        """
        chunks = [chunk for process in processes for chunk in process.chunks.values()]
        for process in processes:
            for chunk, call in process.late:
                self._fail(chunk, call, self._settings.late)
        at_work = [process for process in processes if not process.late and status is not None]
        accused = [
            call for process in at_work for call in process.running(is_at=True) or process.running()
        ]
        open_calls = [(chunk, call) for chunk in chunks for call in chunk.open]
        if not accused and len(open_calls) == 1 and not any(process.late for process in processes):
            accused = open_calls
        cause = "".join(process.cause for process in processes)
        apart: list[CallRange] = []
        for chunk, call in accused:
            deaths = self._jobs[chunk.job].deaths
            deaths[call] = deaths.get(call, 0) + 1
            if status == -signal.SIGKILL and deaths[call] == 1:
                continue
            if len(accused) == 1 or (self._settings.asks and deaths[call] >= _DEATHS):
                self._fail(chunk, call, cause or self._how_it_ended(status))
            elif not self._settings.asks:
                chunk.open.discard(call)
                apart.append(CallRange(chunk.job, call, call + 1, is_alone=True))
        if not accused and (self._deaths >= _DEATHS or status is None):
            for chunk in chunks:
                chunk.is_alone = not self._settings.asks
                for call in sorted(chunk.open) if self._settings.asks else ():
                    self._fail(chunk, call, cause or self._how_it_ended(status))
        self._pending.extendleft(reversed(apart + pieces_of(chunks)))
        for process in processes:
            process.chunks.clear()
            process.asking.clear()

    def _fail(self, chunk: CallChunk, call: int, text: str) -> None:
        chunk.open.discard(call)
        self._answer(Answer(chunk.job, [call], {call: text}, b""))

    def _how_it_ended(self, status: int | None) -> str:
        if status is None:
            return f"{DIED}: it closed the wire of its process"
        if status >= 0:
            return f"{DIED}: its process exited with status {status}"
        limit_mb = self._settings.memory_mb
        note = "" if limit_mb is None else f" (memory limit {limit_mb} MB)"
        return f"{DIED}: its process ended with signal {-status}{note}"
