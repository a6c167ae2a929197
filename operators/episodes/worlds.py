"""Runs the functions of episodes: in a pool of processes that can be killed, or in this process,
step by step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from dataflow.scoring.calls import Ask, Call, PoolSettings, RestingLimit
from dataflow.scoring.pool import Answer, Asked, Encode, Pool
from dataflow.scoring.values import checker, describe, row_arguments
from operators.episodes.chat import Chats, EpisodeOver
from operators.episodes.declaration import FunctionKnobs
from operators.tools.toolbox import RolloutTools, Toolbox


class Worlds(Protocol):
    """What makes calls that ask; a job is one call here."""

    restarts: int
    """How often a process was replaced."""

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""

    def waits(self) -> Sequence[Any]:
        """A descriptor that is readable when `poll` has something to do, where it waits for
        anybody.
        """

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job; its number."""

    def poll(self) -> list[Answer]:
        """Carry on; the answers that have come."""

    def asked(self) -> list[Asked]:
        """What calls have asked by the last `poll`."""

    def tell(self, question: Asked, body: bytes) -> None:
        """Answer a question; an answer that is no longer awaited is dropped."""

    def close(self) -> None:
        """Give back what it holds."""


class InWorkerWorlds:
    """Makes the calls in this process, in an event loop that `poll` moves on by a step, with a
    limit of time that holds for functions that await something.
    """

    restarts = 0

    def __init__(self, settings: PoolSettings, box: Toolbox | None = None) -> None:
        self._settings, self._box = settings, box
        self._loop = asyncio.new_event_loop()
        self._next_job = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[bytes]] = {}
        self._answers: list[Answer] = []
        self._asked: list[Asked] = []

    @property
    def timeout_s(self) -> float:
        """Seconds between two turns."""
        return self._settings.timeout_s

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""
        return len(self._tasks)

    def waits(self) -> Sequence[Any]:
        """Nothing: `poll` moves them on itself."""
        return ()

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job; its number."""
        assert calls == 1, "an episode is a job"
        job, self._next_job = self._next_job, self._next_job + 1
        self._tasks[job] = self._loop.create_task(self._make(job, encode(0, 1)))
        return job

    def poll(self) -> list[Answer]:
        """Carry on; the answers that have come."""
        if self._tasks:
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
        answers, self._answers = self._answers, []
        return answers

    def asked(self) -> list[Asked]:
        """What calls have asked by the last `poll`."""
        questions, self._asked = self._asked, []
        return questions

    def tell(self, question: Asked, body: bytes) -> None:
        """Answer a question."""
        future = self._waiting.pop((question.job, question.number), None)
        if future is not None and not future.done():
            future.set_result(body)

    def close(self) -> None:
        """End all that are under way."""
        tasks = asyncio.all_tasks(self._loop)  # those too that functions have started
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=self._settings.timeout_s))
        if self._box is not None:
            self._loop.run_until_complete(self._box.close())
        self._loop.close()

    def forget(self, job: int) -> None:
        """Nobody answers what a job has left behind."""
        for key in [key for key in self._waiting if key[0] == job]:
            self._waiting.pop(key).cancel()

    async def answered(self, query: Asked) -> bytes:
        """The answer to a question."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[query.job, query.number] = future
        self._asked.append(query)
        return await future

    async def _make(self, job: int, payload: bytes) -> None:
        limit = asyncio.timeout(self._settings.timeout_s)
        ask = _AskHere(self, job, limit)
        values, failures = [], {}
        try:
            async with limit:
                values = [await self._settings.prepare(payload)(0, ask)]
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by `close`; otherwise the world has raised it
            failures = {
                0: self._settings.late if limit.expired() else self._settings.describe(error)
            }
        finally:
            del self._tasks[job]
            ask.end()
        self._answers.append(Answer(job, [0], failures, self._settings.pack(values)))


class _AskHere:
    """What one call has of the worker in which it runs: `calls.Ask`."""

    def __init__(self, worlds: InWorkerWorlds, job: int, limit: asyncio.Timeout) -> None:
        self._worlds, self._job, self._asked = worlds, job, 0
        self._limit = RestingLimit(limit, worlds.timeout_s)
        self.rest = self._limit.rest

    async def __call__(self, body: bytes) -> bytes:
        """As `Ask`; a task that the call has left behind ends here."""
        if self._limit.is_over:
            raise asyncio.CancelledError
        with self.rest():
            self._asked += 1
            return await self._worlds.answered(Asked(self._job, 0, self._asked - 1, body))

    def end(self) -> None:
        """The call has ended."""
        self._limit.is_over = True
        self._worlds.forget(self._job)


def worlds_of(episode: FunctionKnobs, box: Toolbox | None = None) -> Worlds:
    """A pool, whose server is forked here, or this process. box: the episode's tools."""
    settings = PoolSettings(
        prepare=partial(_prepare, episode, box),
        pack=b"".join,
        describe=partial(describe, code=episode.function.__code__),
        processes=episode.processes,
        concurrency=episode.concurrency,
        is_async=True,
        asks=True,
        timeout_s=episode.timeout_s,
        memory_mb=episode.memory_mb,
    )
    return Pool(settings) if episode.isolate else InWorkerWorlds(settings, box)


def row_bytes(row: pa.RecordBatch) -> bytes:
    """The columns of one prompt, for `submit`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


async def _look(episode: FunctionKnobs, index: int, ask: Ask) -> bytes:
    return (await episode.look() or "").encode()


def _prepare(episode: FunctionKnobs, box: Toolbox | None, payload: bytes) -> Call:
    """The function that runs an episode of this row; where there is none, the one that looks at the
    world.
    """
    if not payload:
        return partial(_look, episode)
    row = pa.ipc.open_stream(pa.py_buffer(payload)).read_next_batch()
    annotations = episode.signature.annotations
    arguments = {
        name: row_arguments(row.column(name), annotations[name])[0] for name in row.schema.names
    }
    check = checker(episode.signature.output) if episode.signature.output is not None else None

    async def call(index: int, ask: Ask) -> bytes:
        tools = None if box is None else RolloutTools(box, ask.rest)
        chats = Chats(ask, has_messages=bool(episode.traits.chat), tools=tools)
        returned = episode.signature.nothing
        try:
            value = await episode.function(chats.begin(), **arguments, **episode.given)
            returned = None if check is None else check(value)
        except EpisodeOver:
            chats.is_over = True
        finally:
            if tools is not None:
                await tools.close()
        if tools is not None and tools.failure is not None:
            raise tools.failure
        return chats.outcome(returned).to_bytes()

    return call
