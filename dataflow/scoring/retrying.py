"""Repeats calls where the world failed: how often, and after which pause."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from dataflow.errors import WorldFailed
from dataflow.scoring.calls import Call

WORLD_ERRORS: tuple[type[BaseException], ...] = (WorldFailed, ConnectionError, TimeoutError)
"""Errors that mean that something outside failed, whatever a scorer adds to them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


def pause_s(attempt: int, error: BaseException, share: float) -> float:
    """Seconds before a call is made again: as long as the error asks, else twice as long each time.

    attempt: calls made before this one failed. share: from 0 to 1, so that callers that failed
    together do not return together.

    >>> [pause_s(attempt, TimeoutError(), share=1.0) for attempt in range(8)]
    [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    >>> pause_s(0, WorldFailed("busy", after_s=3.0), share=0.0)
    3.0
    """
    after_s = getattr(error, "after_s", None)
    if isinstance(after_s, int | float):
        return min(max(0.0, float(after_s)), _LONGEST_PAUSE_S)
    longest: float = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
    return longest * (0.5 + 0.5 * share)


def retried(
    call: Call,
    retries: int,
    world: tuple[type[BaseException], ...],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Call:
    """The same call, made again so often where it raises one of `world`; the limit of a call holds
    for all of them.
    """

    def made(index: int) -> Any:
        for attempt in itertools.count():
            try:
                return call(index)
            except world as error:
                if attempt == retries:
                    raise
                sleep(pause_s(attempt, error, random.random()))
        raise AssertionError("counting does not end")

    return made


def retried_async(call: Call, retries: int, world: tuple[type[BaseException], ...]) -> Call:
    """The same for a call that returns a coroutine."""

    async def made(index: int) -> Any:
        for attempt in itertools.count():
            try:
                return await call(index)
            except world as error:
                if attempt == retries:
                    raise
                pause = pause_s(attempt, error, random.random())
            await asyncio.sleep(pause)
        raise AssertionError("counting does not end")

    return made
