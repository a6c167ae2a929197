"""What a pool and its processes say to each other, and how one makes calls: each by itself, its answers together."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.system.channel import Channel
from dataflow.system.messages import Codec, Plain

Call = Callable[[int], Any]
Source = memoryview  # three words shared with the owner: chunk (-1: none), call, start in ns

GATHER_NS = 5_000_000
SLOW_NS = 200_000


@dataclass(frozen=True)
class Calls:
    """Calls to be made."""

    chunk: int
    calls: int
    payload: bytes


@dataclass(frozen=True)
class Answers:
    """Calls that were made."""

    chunk: int
    calls: list[int]
    values: Plain
    """One for each call; None where it failed."""
    failures: Mapping[int, str]
    """What went wrong, by call."""


CALLS: Codec[Any] = Codec("scorers-calls", 1, Calls, Answers, max_bytes=1 << 32)


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


class Gathered:
    """Answers that gather until it is time to send them; not locked."""

    def __init__(self) -> None:
        self._sent_ns = time.monotonic_ns()
        self._gathered: dict[int, tuple[list[int], list[Any], dict[int, str]]] = {}

    def add(self, chunk: int, call: int, value: Any, failure: str | None) -> None:
        """One more; of a call that failed, why."""
        calls, values, failures = self._gathered.setdefault(chunk, ([], [], {}))
        calls.append(call)
        values.append(value)
        if failure is not None:
            failures[call] = failure

    def are_due(self, took_ns: int) -> bool:
        """Whether to send them now, after a call that took so long."""
        return took_ns > SLOW_NS or time.monotonic_ns() - self._sent_ns > GATHER_NS

    def take(self) -> list[Answers]:
        """All that gathered; forgotten here."""
        gathered, self._gathered = self._gathered, {}
        self._sent_ns = time.monotonic_ns()
        return [Answers(chunk, *answers) for chunk, answers in gathered.items()]


def enter(source: Source, chunk: int, index: int, now_ns: int) -> None:
    """Show the owner which call begins; the chunk last, because it marks the entry as valid."""
    source[2] = now_ns
    source[1] = index
    source[0] = chunk


def attempt(call: Call, index: int, settings: Settings) -> tuple[Any, str | None]:
    """Make a call: its value, or why it failed."""
    try:
        return call(index), None
    except BaseException as error:
        return None, settings.describe(error)


def prepared(payload: bytes, settings: Settings) -> Call:
    """What makes the calls of a chunk; each fails where that cannot be read."""
    try:
        return settings.prepare(payload)
    except Exception as error:
        failure = error

        def refuse(index: int) -> Any:
            raise failure

        return refuse


def messages(channel: Channel[Any]) -> Iterator[Calls]:
    """What the owner sends, until it is gone. Raises EOFError then."""
    while channel.readable(None):
        yield from channel.arrived()


def send(channel: Channel[Any], answers: Gathered) -> None:
    """All that gathered."""
    for message in answers.take():
        channel.send(message)


def one_by_one(channel: Channel[Any], source: Source, settings: Settings) -> None:
    """Make calls in their order, until the owner is gone (EOFError or OSError)."""
    answers = Gathered()
    clock = time.monotonic_ns
    for message in messages(channel):
        call = prepared(message.payload, settings)
        for index in range(message.calls):
            start = clock()
            enter(source, message.chunk, index, start)
            answer = attempt(call, index, settings)
            source[0] = -1
            answers.add(message.chunk, index, *answer)
            if answers.are_due(clock() - start):
                send(channel, answers)
        send(channel, answers)
