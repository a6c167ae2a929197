"""The processes of a pool: what each runs (`make_calls`), and the small server that forks them
(`start_server`), of one thread, so that forking is always safe.

What a user's function raises is caught in `_outcome`, `_awaited_outcome` or `_Questions.awaited`,
and goes back as the text that `PoolSettings.describe` makes of it.
"""

import asyncio
import contextlib
import math
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from dataflow.scoring.calls import (
    CALLS,
    Answers,
    Call,
    CallAsks,
    CallHears,
    Calls,
    PoolCloses,
    PoolSettings,
    RestingLimit,
)
from dataflow.system.child import Child, fork
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Channel, Codec, Message, MessageError

# A pool's process at work: it makes the calls that it is sent, one by one, by threads or by
# tasks, and answers.

# words shared with the owner: chunk (-1: none), call, start in ns, whether its code is what runs
Source = memoryview

GATHER_NS = 5_000_000
SLOW_NS = 200_000


def make_calls(channel: Channel[Any], sources: list[Source], settings: PoolSettings) -> None:
    """Make calls until the owner is gone (EOFError or OSError), or has said that it closes the
    pool.

    consumes: calls (`Calls`), what calls that asked hear (`CallHears`), the end of the pool
        (`PoolCloses`)
    produces: answers (`Answers`), each call once; what calls ask (`CallAsks`)
    waits for: the next message, and the calls themselves, whose limit the owner keeps
    unblocked by: a message, or the end of the owner
    """
    if settings.is_async:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_by_tasks(channel, sources, settings))
    elif len(sources) > 1:
        _by_threads(channel, sources, settings)
    else:
        _one_by_one(channel, sources[0], settings)


def _one_by_one(channel: Channel[Any], source: Source, settings: PoolSettings) -> None:
    answers = _Gathered()
    clock = time.monotonic_ns
    for message in _messages(channel):
        call = _prepared(channel, settings)
        for index in range(message.calls):
            start = clock()
            _enter(source, message.chunk, index, start)
            answer = _outcome(call, index, settings)
            source[0] = -1
            answers.add(message.chunk, index, *answer)
            if answers.are_due(clock() - start):
                _send(channel, answers, settings)
        _send(channel, answers, settings)


def _by_threads(channel: Channel[Any], sources: list[Source], settings: PoolSettings) -> None:
    todo: queue.SimpleQueue[tuple[int, int, Call]] = queue.SimpleQueue()
    answers = _Gathered()
    lock = threading.Lock()

    def work(source: Source) -> None:
        while True:
            chunk, index, call = todo.get()
            start = time.monotonic_ns()
            _enter(source, chunk, index, start)
            answer = _outcome(call, index, settings)
            source[0] = -1
            with lock:
                answers.add(chunk, index, *answer)
                if todo.empty() or answers.are_due(time.monotonic_ns() - start):
                    try:
                        _send(channel, answers, settings)
                    except OSError:
                        os._exit(0)

    for source in sources:
        threading.Thread(target=work, args=(source,), daemon=True).start()
    for message in _messages(channel):
        call = _prepared(channel, settings)
        for index in range(message.calls):
            todo.put((message.chunk, index, call))


async def _by_tasks(channel: Channel[Any], sources: list[Source], settings: PoolSettings) -> None:
    loop, whole = asyncio.get_running_loop(), asyncio.current_task()
    todo: asyncio.Queue[tuple[int, int, Call]] = asyncio.Queue()
    answers, is_closing = _Gathered(), False

    def flush() -> None:
        with contextlib.suppress(OSError):  # that the owner is gone shows when reading
            channel.flush()
        if not channel.has_output:
            loop.remove_writer(channel.fileno())

    def send_all() -> None:
        with contextlib.suppress(OSError):
            for message, body in answers.take(settings):
                channel.post(message, body=body)
        if channel.has_output:
            loop.add_writer(channel.fileno(), flush)

    def read() -> None:
        nonlocal is_closing
        try:
            arrived = channel.arrived()
        except (EOFError, OSError, MessageError):
            os._exit(0)
        for message in arrived:
            if isinstance(message, PoolCloses):
                assert whole is not None, "this is a task"
                is_closing = True
                loop.remove_reader(channel.fileno())
                whole.cancel()
                return
            if isinstance(message, CallHears):
                questions.hear(message, channel.bodies.popleft())
                continue
            call = _prepared(channel, settings)
            for index in range(message.calls):
                todo.put_nowait((message.chunk, index, call))

    def post(message: CallAsks, body: bytes) -> None:
        with contextlib.suppress(OSError):
            channel.post(message, body=body)
        if channel.has_output:
            loop.add_writer(channel.fileno(), flush)

    questions = _Questions(post)

    async def work(source: Source) -> None:
        while not is_closing:
            chunk, index, call = await todo.get()
            _enter(source, chunk, index, time.monotonic_ns())
            if settings.asks:
                answer = await questions.awaited(call, source, chunk, index, settings)
            else:
                answer = await _awaited_outcome(call, index, settings)
            source[0] = -1
            answers.add(chunk, index, *answer)
            loop.call_soon(send_all)

    loop.add_reader(channel.fileno(), read)
    async with asyncio.TaskGroup() as workers:
        for source in sources:
            workers.create_task(work(source))


async def _awaited_outcome(
    call: Call, index: int, settings: PoolSettings
) -> tuple[Any, str | None]:
    """As `_outcome`, for a call that returns a coroutine."""
    limit = asyncio.timeout(settings.timeout_s)
    try:
        async with limit:
            return await call(index), None
    except BaseException as error:
        return None, settings.late if limit.expired() else settings.describe(error)


class _Questions:
    """The questions of calls that wait; the clock of a call stands still meanwhile."""

    def __init__(self, post: Callable[[CallAsks, bytes], None]) -> None:
        self._post = post
        self._open: dict[tuple[int, int, int], asyncio.Future[bytes]] = {}

    def hear(self, message: CallHears, body: bytes) -> None:
        """An answer to a call has come; a call that has ended ignores it."""
        future = self._open.get((message.chunk, message.call, message.number))
        if future is not None and not future.done():
            future.set_result(body)

    async def awaited(
        self, call: Call, source: Source, chunk: int, index: int, settings: PoolSettings
    ) -> tuple[Any, str | None]:
        """As `_awaited_outcome`, for a call that asks."""
        limit = asyncio.timeout(settings.timeout_s)
        ask = _Asking(self._post, self._open, limit, source, (chunk, index), settings.timeout_s)
        try:
            async with limit:
                return await _Stepped(call(index, ask), source), None
        except BaseException as error:
            return None, settings.late if limit.expired() else settings.describe(error)
        finally:
            ask.end()


class _Asking:
    """One call's access to its owner: `calls.Ask`."""

    def __init__(
        self,
        post: Callable[[CallAsks, bytes], None],
        waiting: dict[tuple[int, int, int], asyncio.Future[bytes]],
        limit: asyncio.Timeout,
        source: Source,
        call: tuple[int, int],
        timeout_s: float,
    ) -> None:
        self._post, self._waiting, self._call, self._asked = post, waiting, call, 0
        self._limit = RestingLimit(
            limit,
            timeout_s,
            rests=lambda: source.__setitem__(0, -1),
            works=lambda: _enter(source, *call, time.monotonic_ns()),
        )
        self.rest = self._limit.rest

    async def __call__(self, body: bytes) -> bytes:
        """As `Ask`; a task that outlives its call ends here."""
        if self._limit.is_over:
            raise asyncio.CancelledError
        key = *self._call, self._asked
        self._asked += 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        with self.rest():
            try:
                self._post(CallAsks(*key), body)
                return await future
            finally:
                del self._waiting[key]

    def end(self) -> None:
        """The call has ended: nobody answers the tasks that it left."""
        self._limit.is_over = True
        for key, future in list(self._waiting.items()):
            if key[:2] == self._call:
                future.cancel()


class _Stepped:
    """A coroutine that shows the owner while its own code runs: so a process that blocks or ends is
    traced to a call.
    """

    def __init__(self, coroutine: Any, source: Source) -> None:
        self._coroutine, self._source = coroutine, source

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            self._source[3] = 1
            try:
                awaited = steps.send(sent) if thrown is None else steps.throw(thrown)
            except StopIteration as over:
                return over.value
            finally:
                self._source[3] = 0
            sent = thrown = None
            try:
                sent = yield awaited
            except BaseException as error:
                thrown = error


class _Gathered:
    """Answers that gather until it is time to send them; not locked."""

    def __init__(self) -> None:
        self._sent_ns = time.monotonic_ns()
        self._gathered: dict[int, tuple[list[int], list[Any], dict[int, str]]] = {}

    def add(self, chunk: int, call: int, value: Any, failure: str | None) -> None:
        """Add an answer; for a failed call, the reason."""
        calls, values, failures = self._gathered.setdefault(chunk, ([], [], {}))
        calls.append(call)
        if failure is None:
            values.append(value)
        else:
            failures[call] = failure

    def are_due(self, took_ns: int) -> bool:
        """Whether to send them now, after a call that took so long."""
        return took_ns > SLOW_NS or time.monotonic_ns() - self._sent_ns > GATHER_NS

    def take(self, settings: PoolSettings) -> list[tuple[Answers, bytes]]:
        """All answers so far as messages and their bodies; they are removed."""
        gathered, self._gathered = self._gathered, {}
        self._sent_ns = time.monotonic_ns()
        return [
            (Answers(chunk, calls, failures), settings.pack(values))
            for chunk, (calls, values, failures) in gathered.items()
        ]


def _enter(source: Source, chunk: int, index: int, now_ns: int) -> None:
    """Show the owner which call begins; the chunk last, because it marks the entry as valid."""
    source[2] = now_ns
    source[1] = index
    source[0] = chunk


def _outcome(call: Call, index: int, settings: PoolSettings) -> tuple[Any, str | None]:
    """Make a call: its value, or why it failed."""
    try:
        return call(index), None
    except BaseException as error:
        return None, settings.describe(error)


def _prepared(channel: Channel[Any], settings: PoolSettings) -> Call:
    """Makes the calls of the next message; each fails where the body cannot be read."""
    try:
        return settings.prepare(channel.bodies.popleft())
    except Exception as error:
        failure = error

        def refuse(index: int) -> Any:
            raise failure

        return refuse


def _messages(channel: Channel[Any]) -> Iterator[Calls]:
    """What the owner sends, until it is gone. Raises EOFError then."""
    while channel.readable(None):
        yield from channel.arrived()


def _send(channel: Channel[Any], answers: _Gathered, settings: PoolSettings) -> None:
    """Send all answers so far."""
    for message, body in answers.take(settings):
        channel.send(message, body)


PROGRESS_FIELDS = 4
_SEND_S = 10.0
_LOOK_S = 1.0
_LAST_BREATH_S = 0.1
_GIVE_BACK_S = 2.0
"""Seconds for calls that ask to end, when the owner is gone or closes the pool."""
_RESERVE_MB = 1536


class ForkProcess(Message):
    """Fork a process; its end of a channel comes with it."""

    process: int


class EndProcess(Message):
    """End a process, and say how it ended."""

    process: int
    is_lost: bool
    """Whether it has closed its channel, and is about to end by itself."""


class Spawned(Message):
    """The process runs."""

    process: int
    pid: int


class ProcessEnded(Message):
    """The process has ended."""

    process: int
    status: int | None
    """None: it had closed its channel, and was still alive."""


SERVER: Codec[Any] = Codec("scorers-server", 1, ForkProcess, EndProcess, Spawned, ProcessEnded)


def start_server(progress: memoryview, settings: PoolSettings) -> tuple[Channel[Any], Child]:
    """Fork the server; our end of its channel, and its process.

    The kernel lets it go on when its owner ends: one that was stopped could not clean up.
    """
    control, theirs = Channel.pair(SERVER, _SEND_S)
    owner = os.getpid()

    def serve() -> int:
        _go_quiet()
        return _serve(Channel(theirs, SERVER, _SEND_S), owner, progress, settings)

    with theirs:
        return control, fork(serve, keep=[theirs.fileno()], ends_with_parent=signal.SIGCONT)


def _serve(control: Channel[Any], owner: int, progress: memoryview, settings: PoolSettings) -> int:
    """Fork and end processes as told; the exit status.

    consumes: orders to spawn a process (with its socket), to end one, or to say how a lost one
        ended
    produces: a reply to each, with its pid or its exit status
    waits for: an order, looking every second whether the owner still lives, and whether somebody
        stopped a process
    unblocked by: an order, or the end of the owner
    """
    processes: dict[int, Child] = {}
    try:
        while True:
            if not control.readable(_LOOK_S):
                if os.getppid() != owner:
                    break
                for process in processes.values():
                    process.let_go_on()
                continue
            for order in control.arrived():
                number = order.process
                match order:
                    case ForkProcess():
                        end = control.files.popleft()
                        processes[number] = _spawn(end, number, progress, settings)
                        os.close(end)
                        control.send(Spawned(number, processes[number].pid))
                    case EndProcess(is_lost=is_lost):
                        process = processes.pop(number)
                        lives = is_lost and not process.ended_within(_LAST_BREATH_S)
                        status = process.end(0.0)
                        control.send(ProcessEnded(number, None if lives else status))
    except (OSError, EOFError):
        pass
    finally:
        until_s = time.monotonic() + (_GIVE_BACK_S if settings.asks else 0.0)
        for process in processes.values():
            process.ended_within(until_s - time.monotonic())
        for process in processes.values():
            process.end(0.0)
    return 0


def _spawn(end: int, number: int, progress: memoryview, settings: PoolSettings) -> Child:
    def make() -> int:
        _limit_memory(settings.memory_mb)
        width = settings.concurrency * PROGRESS_FIELDS
        starts = range(number * width, (number + 1) * width, PROGRESS_FIELDS)
        sources = [progress[start : start + PROGRESS_FIELDS] for start in starts]
        with contextlib.suppress(OSError, EOFError):
            make_calls(Channel(socket.socket(fileno=end), CALLS, math.inf), sources, settings)
        return 0

    return fork(make, leads=True, keep=[end], ends_with_parent=signal.SIGKILL)


def _go_quiet() -> None:
    """Out of the terminal's group, deaf to Ctrl-C, and without the worker's handlers."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.set_wakeup_fd(-1)
    leave_to_leader()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _limit_memory(memory_mb: int | None) -> None:
    """Set a memory limit some way above the owner's: allocators reserve more than they use."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is None or sys.platform != "linux":
        return
    with Path("/proc/self/status").open() as status:
        used_kb = next((int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    limit = (used_kb << 10) + ((memory_mb + _RESERVE_MB) << 20)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
