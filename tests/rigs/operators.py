"""Operators that fail in chosen ways: fakes, and runtimes put around those of others; what they are
built with, by hand.
"""

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dataflow.node import Operator, Sink
from dataflow.runtime import (
    Batch,
    Context,
    DeviceShare,
    GraphFacts,
    KnobsInForce,
    RunSettings,
    Runtime,
    WeightEnds,
)
from dataflow.tokens.ragged import group_slices

O = TypeVar("O", bound=Operator)  # noqa: E741


class Around(Runtime):
    """Passes every call on to another runtime."""

    def __init__(self, inner: Runtime) -> None:
        self.inner = inner

    def room(self) -> int:
        return self.inner.room()

    def push(self, batch: Batch) -> None:
        self.inner.push(batch)

    def work(self) -> list[Batch] | None:
        return self.inner.work()

    def pending(self) -> int:
        return self.inner.pending()

    def waits(self) -> Sequence[Any]:
        return self.inner.waits()

    def tell(self, message: Mapping[str, Any]) -> None:
        self.inner.tell(message)

    def change(self, knobs: KnobsInForce) -> None:
        self.inner.change(knobs)

    @property
    def is_behind(self) -> bool:
        return self.inner.is_behind

    def status(self) -> dict[str, float | int | str]:
        return self.inner.status()

    def starved(self) -> bool:
        return self.inner.starved()

    def beside(self) -> float:
        return self.inner.beside()

    def wants_devices(self) -> bool:
        return self.inner.wants_devices()

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()

    def forget(self, source: str, group: int) -> None:
        self.inner.forget(source, group)

    def close(self) -> None:
        self.inner.close()


def wrapped(operator: O, wrap: Callable[[Runtime], Runtime]) -> O:
    """The same operator, with something around its runtime."""
    other = copy.copy(operator)
    object.__setattr__(
        other, "build", lambda context: wrap(type(operator).build(operator, context))
    )
    return other


def built_by(operator: O, build: Callable[[Context], Runtime]) -> O:
    """The same operator, built by another function."""
    other = copy.copy(operator)
    object.__setattr__(other, "build", build)
    return other


class _Struck(Around):
    def __init__(self, inner: Runtime, blow: Callable[[], None], after: int) -> None:
        super().__init__(inner)
        self._blow, self._left = blow, after

    def work(self) -> list[Batch] | None:
        made = super().work()
        self._left -= made is not None
        if self._left == 0:
            self._blow()
        return made


def struck(operator: O, blow: Callable[[], None], after: int = 3) -> O:
    """The same operator, dealt a blow from within after so many slices of work."""
    return wrapped(operator, lambda inner: _Struck(inner, blow, after))


def signalled(operator: O, number: int, after: int = 3) -> O:
    """The same operator, whose process gets a signal after so many slices of work."""
    return struck(operator, lambda: os.kill(os.getpid(), number), after)


class _Slow(Around):
    def __init__(self, inner: Runtime, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def work(self) -> list[Batch] | None:
        time.sleep(self._seconds)
        return super().work()


def slow(operator: O, seconds: float) -> O:
    """The same operator, taking its time."""
    return wrapped(operator, lambda inner: _Slow(inner, seconds))


class _Paced(Around):
    def __init__(self, inner: Runtime, seconds: float, spins: bool) -> None:
        super().__init__(inner)
        self._seconds, self._spins = seconds, spins

    def work(self) -> list[Batch] | None:
        made = super().work()
        if made is None:
            return None
        groups = sum(len(group_slices(batch.records)) for batch in made)
        seconds = self._seconds * max(1, groups)
        if self._spins:
            ends = time.thread_time() + seconds
            while time.thread_time() < ends:
                pass
        else:
            time.sleep(seconds)
        return made


def paced(operator: O, seconds: float, *, spins: bool = False) -> O:
    """The same operator, which takes so much longer for each group, or for a slice that gives none:
    of sleep, or of a processor.
    """
    return wrapped(operator, lambda inner: _Paced(inner, seconds, spins))


class _Withheld(Around):
    def __init__(self, inner: Runtime, seconds: float) -> None:
        super().__init__(inner)
        self._seconds, self._since = seconds, time.monotonic()

    def work(self) -> list[Batch] | None:
        if time.monotonic() - self._since < self._seconds:
            return None
        made = super().work()
        self._since = time.monotonic() if made else self._since
        return made

    def starved(self) -> bool:
        return bool(self.inner.pending())


def withheld(operator: O, seconds: float) -> O:
    """The same operator, which begins nothing until so long after the last, as one whose weights
    come that seldom.
    """
    return wrapped(operator, lambda inner: _Withheld(inner, seconds))


class _Mute(Around):
    def work(self) -> list[Batch] | None:
        return None


def mute(operator: O) -> O:
    """The same operator, which takes rows in and never gives one back."""
    return wrapped(operator, _Mute)


class _Deaf(Around):
    def __init__(self, inner: Runtime, mark: Path) -> None:
        super().__init__(inner)
        self._mark = mark

    def tell(self, message: Mapping[str, Any]) -> None:
        if "drain" in message:
            self._mark.touch()


def deaf(operator: O, mark: Path) -> O:
    """The same operator, which leaves a mark when it is asked to drain, and goes on."""
    return wrapped(operator, lambda inner: _Deaf(inner, mark))


@dataclass(frozen=True, eq=False)
class Keep(Sink):
    """A sink that trains nothing and evaluates nothing; it writes down the groups it got."""

    name: str = field(default="keep", kw_only=True)
    light: ClassVar[bool] = True
    path: Path = field(kw_only=True)

    def build(self, context: Context) -> Runtime:
        return _Keeping(self.path)

    def groups(self) -> list[int]:
        """The groups that came, a number for each row."""
        return [int(line) for line in self.path.read_text().split()]


class _Keeping(Runtime):
    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def room(self) -> int:
        return 1 << 20

    def push(self, batch: Batch) -> None:
        with self._path.open("a") as out:
            out.writelines(f"{group}\n" for group in batch.records.column("group_id").to_pylist())
        batch.ack()


RECORDS = {"run": RunSettings, "graph": GraphFacts, "devices": DeviceShare, "weights": WeightEnds}


def make_context(**facts: Any) -> Context:
    """`make_context(node="trainer", steps=2)` is `Context(node="trainer",
    run=RunSettings(steps=2))`.
    """
    for name, kind in RECORDS.items():
        own = {each.name for each in dataclasses.fields(kind)} & facts.keys()
        facts[name] = kind(**{each: facts.pop(each) for each in own})
    return Context(**facts)
