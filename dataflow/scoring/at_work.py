"""A pool's process at work: it makes the calls that it is sent, one by one, by threads or by tasks, and answers."""

import asyncio
import contextlib
import os
import queue
import threading
import time
from typing import Any

from dataflow.scoring.calls import (
    Call,
    Gathered,
    Settings,
    Source,
    attempt,
    enter,
    messages,
    one_by_one,
    prepared,
    send,
)
from dataflow.system.channel import Channel
from dataflow.system.messages import MessageError


def make_calls(channel: Channel[Any], sources: list[Source], settings: Settings) -> None:
    """Make calls until the owner is gone (EOFError or OSError).

    consumes: calls (`Calls`)
    produces: answers (`Answers`), each call once
    waits for: the next message, and the calls themselves, whose limit the owner keeps
    unblocked by: a message, or the end of the owner
    """
    if settings.is_async:
        asyncio.run(_by_tasks(channel, sources, settings))
    elif len(sources) > 1:
        _by_threads(channel, sources, settings)
    else:
        one_by_one(channel, sources[0], settings)


def _by_threads(channel: Channel[Any], sources: list[Source], settings: Settings) -> None:
    todo: queue.SimpleQueue[tuple[int, int, Call]] = queue.SimpleQueue()
    answers = Gathered()
    lock = threading.Lock()

    def work(source: Source) -> None:
        while True:
            chunk, index, call = todo.get()
            start = time.monotonic_ns()
            enter(source, chunk, index, start)
            answer = attempt(call, index, settings)
            source[0] = -1
            with lock:
                answers.add(chunk, index, *answer)
                if todo.empty() or answers.are_due(time.monotonic_ns() - start):
                    try:
                        send(channel, answers)
                    except OSError:
                        os._exit(0)

    for source in sources:
        threading.Thread(target=work, args=(source,), daemon=True).start()
    for message in messages(channel):
        call = prepared(message.payload, settings)
        for index in range(message.calls):
            todo.put((message.chunk, index, call))


async def _by_tasks(channel: Channel[Any], sources: list[Source], settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    todo: asyncio.Queue[tuple[int, int, Call]] = asyncio.Queue()
    answers = Gathered()

    def flush() -> None:
        with contextlib.suppress(OSError):  # that the owner is gone shows when reading
            channel.flush()
        if not channel.has_output:
            loop.remove_writer(channel.fileno())

    def send_all() -> None:
        with contextlib.suppress(OSError):
            for message in answers.take():
                channel.post(message)
        if channel.has_output:
            loop.add_writer(channel.fileno(), flush)

    def read() -> None:
        try:
            arrived = channel.arrived()
        except (EOFError, OSError, MessageError):
            os._exit(0)
        for message in arrived:
            call = prepared(message.payload, settings)
            for index in range(message.calls):
                todo.put_nowait((message.chunk, index, call))

    async def work(source: Source) -> None:
        while True:
            chunk, index, call = await todo.get()
            enter(source, chunk, index, time.monotonic_ns())
            answer = await _attempt(call, index, settings)
            source[0] = -1
            answers.add(chunk, index, *answer)
            loop.call_soon(send_all)

    loop.add_reader(channel.fileno(), read)
    async with asyncio.TaskGroup() as workers:
        for source in sources:
            workers.create_task(work(source))


async def _attempt(call: Call, index: int, settings: Settings) -> tuple[Any, str | None]:
    limit = asyncio.timeout(settings.timeout_s)
    try:
        async with limit:
            return await call(index), None
    except BaseException as error:
        return None, settings.late if limit.expired() else settings.describe(error)
