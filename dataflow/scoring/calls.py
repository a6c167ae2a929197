"""Messages between a pool and its processes. Arguments and results of calls are bodies of messages,
which the pool does not read.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from dataflow.scoring.failure import HUNG
from dataflow.system.messages import Codec, Message

Call = Callable[..., Any]
"""Makes a call by its number; where calls ask (`PoolSettings.asks`), by its number and an `Ask`."""


class Ask(Protocol):
    """A call's access to the owner of its pool."""

    async def __call__(self, body: bytes) -> bytes:
        """Ask the owner something, and wait for the answer; the call's clock stands still
        meanwhile.
        """

    def rest(self) -> AbstractContextManager[None]:
        """The clock stands still while the call waits for others: for a session that these hold."""


class Calls(Message):
    """Calls to make; the body has their arguments."""

    chunk: int
    calls: int


class Answers(Message):
    """Calls that were made; the body has the values of those that succeeded, in their order."""

    chunk: int
    calls: list[int]
    failures: Mapping[int, str]
    """Failures, by call."""


class CallAsks(Message):
    """A running call asks its owner something, and waits; the body has the question."""

    chunk: int
    call: int
    number: int
    """Number of the question, within the call."""


class CallHears(Message):
    """The owner's answer, in the body."""

    chunk: int
    call: int
    number: int


class PoolCloses(Message):
    """Nobody waits for calls any more: those that are under way are cancelled, and give back what
    they hold.
    """


CALLS: Codec[Any] = Codec(
    "scorers-calls", 4, Calls, Answers, CallAsks, CallHears, PoolCloses, max_bytes=1 << 32
)


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """What every process of a pool needs to know; inherited by fork, never sent."""

    prepare: Callable[[bytes], Call]
    """From the payload of a chunk to the function that makes its call number i; of a scorer
    `values.prepare`."""
    pack: Callable[[list[Any]], bytes]
    """Results of several calls as bytes, for whoever submitted them; of a scorer `values.pack`."""
    describe: Callable[[BaseException], str]
    """The text that is recorded for an exception; of a scorer `values.describe`."""
    processes: int = 1
    concurrency: int = 1
    """Calls at once within a process."""
    is_async: bool = False
    """Whether a call returns a coroutine."""
    asks: bool = False
    """Whether calls, which are coroutines then, ask their owner."""
    timeout_s: float = 30.0
    """Wall-clock seconds for one call; where it asks, from each answer to its next question."""
    memory_mb: int | None = None
    """Megabytes a process may take beyond what it starts with."""

    @property
    def late(self) -> str:
        """The text that is recorded for a call that took too long."""
        return f"{HUNG}: no answer within {self.timeout_s:g} s"


# The time limit of a call that asks: its clock stands still while the call rests.


class RestingLimit:
    """The limit of one call. A task that outlives the call rests and works without effect."""

    def __init__(
        self,
        limit: asyncio.Timeout,
        timeout_s: float,
        *,
        rests: Callable[[], None] = lambda: None,
        works: Callable[[], None] = lambda: None,
    ) -> None:
        """rests, works: called when the call begins to rest, and when it goes on."""
        self._limit, self._timeout_s, self._rests, self._works = limit, timeout_s, rests, works
        self._resting = 0
        self.is_over = False
        """Whether the call has ended."""

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """As `Ask.rest`; parts of a call may rest at once."""
        if self.is_over:
            yield
            return
        self._resting += 1
        self._rests()
        self._limit.reschedule(None)
        try:
            yield
        finally:
            self._resting -= 1
            if not self._resting and not self.is_over:
                self._works()
                self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
