"""Blocking calls, each in a thread of its own: only their episode waits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from dataflow.errors import WorldFailed
from operators.tools.toolset import TookTooLong

T = TypeVar("T")
THREADS = 64
"""Most calls at a time in a process."""


async def within(awaited: Awaitable[T], timeout_s: float) -> T:
    """What it gives; TookTooLong where that takes more than so many seconds, which no error of its
    own is.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except TimeoutError as error:
        if limit.expired():
            raise TookTooLong(f"took more than {timeout_s:g} s") from error
        raise


class ToolThreads:
    """Threads of one process; those of calls that passed their limit are given up, and counted."""

    def __init__(self, most: int = THREADS) -> None:
        self._most = most
        self._room = asyncio.Semaphore(most)
        self._lost = 0

    async def call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """What a function gives; a coroutine function is awaited where it is. Raises what it
        raises, or TookTooLong.
        """
        if inspect.iscoroutinefunction(function):
            return await within(function(**arguments), timeout_s)
        async with self._room:
            if self._lost >= self._most:
                raise WorldFailed(
                    f"{self._lost} calls of tools never came back, the last of {function.__name__};"
                    " give what it waits for a limit of its own"
                )
            return await self._made(function, arguments, timeout_s)

    async def _made(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
    ) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        is_lost = False

        def settle(value: Any, error: BaseException | None) -> None:
            if is_lost:
                self._lost -= 1
            elif not future.done():
                future.set_result((value, error))

        def run() -> None:
            value, raised = None, None
            try:
                value = function(**arguments)
            except BaseException as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, raised)

        threading.Thread(target=run, name=f"tool {function.__name__}", daemon=True).start()
        try:
            value, raised = await within(future, timeout_s)
        except BaseException:
            is_lost = True
            self._lost += 1
            raise
        if raised is not None:
            raise raised
        return value
