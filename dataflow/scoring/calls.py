"""A pool's process at work: it makes the calls that it is sent and answers in frames."""

import asyncio
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

Call = Callable[[int], Any]
Lane = memoryview  # three words shared with the owner: chunk (-1: none), call, start in ns

HEADER = struct.Struct("<IqI")  # bytes that follow, number of the chunk, calls in it
LENGTH = struct.Struct("<I")
GATHER_NS = 5_000_000
SLOW_NS = 200_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every process of a pool needs to know; inherited by fork, never sent."""

    prepare: Callable[[bytes], Call]
    """From the payload of a chunk to the function that makes its call number i."""
    describe: Callable[[BaseException], str]
    """What an exception is recorded as."""
    processes: int = 1
    concurrency: int = 1
    """Calls at once within a process."""
    is_async: bool = False
    """Whether a call returns a coroutine."""
    timeout_s: float = 30.0
    """Wall-clock seconds for one call."""
    memory_mb: int | None = None
    """Megabytes a process may take beyond what it starts with."""

    @property
    def late(self) -> str:
        """What a call that took too long is recorded as."""
        return f"no answer within {self.timeout_s:g} s"


def make_calls(wire: socket.socket, lanes: list[Lane], settings: Settings) -> None:
    """Make calls until the owner is gone (EOFError or OSError).

    consumes: frames of calls (header and payload)
    produces: frames of answers (chunk, calls, values, failures by call), each call once
    waits for: the next frame, and the calls themselves, whose limit the owner keeps
    unblocked by: a frame, or the end of the owner
    """
    if settings.is_async:
        asyncio.run(_by_tasks(wire, lanes, settings))
    elif len(lanes) > 1:
        _by_threads(wire, lanes, settings)
    else:
        _one_by_one(wire, lanes[0], settings)


class _Answers:
    """Answers that gather until it is time to send them; not locked."""

    def __init__(self) -> None:
        self._sent_ns = time.monotonic_ns()
        self._gathered: dict[int, tuple[list[int], list[Any], dict[int, str]]] = {}

    def add(self, chunk: int, call: int, value: Any, failure: str | None) -> None:
        calls, values, failures = self._gathered.setdefault(chunk, ([], [], {}))
        calls.append(call)
        values.append(value)
        if failure is not None:
            failures[call] = failure

    def are_due(self, took_ns: int) -> bool:
        return took_ns > SLOW_NS or time.monotonic_ns() - self._sent_ns > GATHER_NS

    def frames(self) -> bytes:
        """All that gathered; forgotten here."""
        gathered, self._gathered = self._gathered, {}
        self._sent_ns = time.monotonic_ns()
        bodies = [msgpack.packb((chunk, *answers)) for chunk, answers in gathered.items()]
        return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


def _one_by_one(wire: socket.socket, lane: Lane, settings: Settings) -> None:
    answers = _Answers()
    clock = time.monotonic_ns
    while True:
        chunk, calls, payload = _receive(wire)
        call = _prepared(payload, settings)
        for index in range(calls):
            start = clock()
            _enter(lane, chunk, index, start)
            answer = _attempt(call, index, settings)
            lane[0] = -1
            answers.add(chunk, index, *answer)
            if answers.are_due(clock() - start):
                wire.sendall(answers.frames())
        wire.sendall(answers.frames())


def _by_threads(wire: socket.socket, lanes: list[Lane], settings: Settings) -> None:
    todo: queue.SimpleQueue[tuple[int, int, Call]] = queue.SimpleQueue()
    answers = _Answers()
    lock = threading.Lock()

    def work(lane: Lane) -> None:
        while True:
            chunk, index, call = todo.get()
            start = time.monotonic_ns()
            _enter(lane, chunk, index, start)
            answer = _attempt(call, index, settings)
            lane[0] = -1
            with lock:
                answers.add(chunk, index, *answer)
                if todo.empty() or answers.are_due(time.monotonic_ns() - start):
                    _send_or_exit(wire, answers.frames())

    for lane in lanes:
        threading.Thread(target=work, args=(lane,), daemon=True).start()
    while True:
        chunk, calls, payload = _receive(wire)
        call = _prepared(payload, settings)
        for index in range(calls):
            todo.put((chunk, index, call))


async def _by_tasks(wire: socket.socket, lanes: list[Lane], settings: Settings) -> None:
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    loop = asyncio.get_running_loop()
    todo: asyncio.Queue[tuple[int, int, Call]] = asyncio.Queue()
    answers = _Answers()

    def send() -> None:
        if frames := answers.frames():
            writer.write(frames)

    async def work(lane: Lane) -> None:
        while True:
            chunk, index, call = await todo.get()
            _enter(lane, chunk, index, time.monotonic_ns())
            answer = await _attempt_async(call, index, settings)
            lane[0] = -1
            answers.add(chunk, index, *answer)
            loop.call_soon(send)

    tasks = [asyncio.create_task(work(lane)) for lane in lanes]
    try:
        while True:
            size, chunk, calls = HEADER.unpack(await reader.readexactly(HEADER.size))
            call = _prepared(await reader.readexactly(size), settings)
            for index in range(calls):
                todo.put_nowait((chunk, index, call))
    finally:
        del tasks
        os._exit(0)


def _enter(lane: Lane, chunk: int, index: int, now_ns: int) -> None:
    """Show the owner which call begins; the chunk last, because it marks the entry as valid."""
    lane[2] = now_ns
    lane[1] = index
    lane[0] = chunk


def _attempt(call: Call, index: int, settings: Settings) -> tuple[Any, str | None]:
    try:
        return call(index), None
    except BaseException as error:
        return None, settings.describe(error)


async def _attempt_async(call: Call, index: int, settings: Settings) -> tuple[Any, str | None]:
    limit = asyncio.timeout(settings.timeout_s)
    try:
        async with limit:
            return await call(index), None
    except BaseException as error:
        return None, settings.late if limit.expired() else settings.describe(error)


def _prepared(payload: bytes, settings: Settings) -> Call:
    try:
        return settings.prepare(payload)
    except Exception as error:
        failure = error

        def refuse(index: int) -> Any:
            raise failure

        return refuse


def _receive(wire: socket.socket) -> tuple[int, int, bytes]:
    size, chunk, calls = HEADER.unpack(_read(wire, HEADER.size))
    return chunk, calls, _read(wire, size)


def _read(wire: socket.socket, size: int) -> bytes:
    whole = bytearray(size)
    view = memoryview(whole)
    while view:
        got = wire.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(whole)


def _send_or_exit(wire: socket.socket, frames: bytes) -> None:
    try:
        wire.sendall(frames)
    except OSError:
        os._exit(0)
