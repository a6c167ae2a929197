"""Messages between a pool and its processes. Arguments and results of calls are bodies of messages,
which the pool does not read.
"""

from collections.abc import Callable, Mapping
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
    """The text that is recorded for an exception; of a scorer `return_values.describe`."""
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
