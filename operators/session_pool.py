"""A pool of sessions of one environment: started ahead, lent to one episode at a time, renewed, all
given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from dataflow.errors import WorldFailed

_CLOSE_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class NoRoom(Exception):
    """Raised by what starts a session where as many as there may be are at work: it is tried again,
    and no failure.
    """


class Away(Exception):
    """Raised by a session's start when the server is unreachable, as during a restart. It is
    retried for as long as one start may take; then it fails with this error's cause.
    """


class Closable(Protocol):
    """What a pool asks of a session."""

    async def close(self) -> None:
        """Give back what it holds."""


S = TypeVar("S", bound=Closable)


def is_lost(session: Closable) -> bool:
    """Whether a session reports, by an attribute of this name, that it is unusable because its
    world has ended.
    """
    return bool(getattr(session, "is_lost", False))


def to_start(*, waiting: int, ahead: int, idle: int, starting: int, lent: int, most: int) -> int:
    """How many sessions to start now.

    waiting: borrowers without one. lent: sessions that are lent or being closed.

    >>> to_start(waiting=1, ahead=2, idle=0, starting=0, lent=0, most=8)  # 1 to lend, 2 ahead
    3
    >>> to_start(waiting=5, ahead=2, idle=0, starting=1, lent=6, most=8)  # at most 8 sessions
    1
    """
    return max(0, min(waiting + ahead, most - lent) - idle - starting)


async def until_loop_ends(close: Callable[[], Awaitable[None]]) -> None:
    """Wait for the end of the event loop, which cancels this, and close."""
    try:
        await asyncio.Event().wait()
    finally:
        await close()


class SessionPool(Generic[S]):
    """Lends the sessions of one event loop; one that was lost while it was idle is lent to nobody.

    consumes: borrowers, by `lend`
    produces: a session for each; never more than `most` at once, those that are idle, starting or
        closing counted
    waits for: a session that is given back, or that has started
    unblocked by: either, or `patience_s`
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[S]],
        *,
        name: str,
        most: int,
        ahead: int = 0,
        uses: int | None = None,
        patience_s: float = 30.0,
        start_s: float = 30.0,
        sound: tuple[type[BaseException], ...] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            start: starts a session; raises NoRoom where there is no place for it now, Away where
                nobody is there.
            name: what messages call the environment.
            most: sessions at once.
            ahead: of them those that are started before anybody asks, from the first borrower on.
            uses: how often a session is lent before it is renewed; None: as long as it is sound.
            patience_s: seconds that a borrower waits.
            start_s: seconds for one start.
            sound: what a borrower may raise that says nothing against its session; all else renews
                it.
        """
        self._start, self._name = start, name
        self._most, self._ahead, self._uses = most, ahead, uses
        self._patience_s, self._start_s, self._sound = patience_s, start_s, sound
        self._idle: deque[tuple[S, int]] = deque()
        """And how often each was lent."""
        self._waiting: deque[asyncio.Future[tuple[S, int]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts: set[asyncio.Task[None]] = set()
        """Of these, those that start a session."""
        self._starting = self._held = 0
        self._is_failing = self._is_closed = False
        self.started = self.renewed = 0
        """Sessions that were started; those of them that were given up for another."""

    @property
    def open(self) -> int:
        """Sessions that exist, those that are starting or closing included."""
        return len(self._idle) + self._starting + self._held

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[S]:
        """A session for the body of an `async with`; where the body fails it is given up, and
        another one started.

        Raises WorldFailed where none is free within `patience_s`, or none can be started.
        """
        session, uses = await self._borrowed()
        is_sound = False
        try:
            yield session
            is_sound = True
        except self._sound:
            is_sound = True
            raise
        finally:
            self._give_back(session, uses + 1, is_sound)

    async def close(self) -> None:
        """Close what is idle, and give up what is starting; what is lent is closed when it comes
        back.
        """
        self._is_closed = True
        for task in self._starts:
            task.cancel()
        for waiting in self._waiting:
            waiting.cancel()
        while self._idle:
            self._held += 1
            self._later(self._end(self._idle.popleft()[0]))
        await asyncio.sleep(0)  # who is cancelled in this moment gives back what it had
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _borrowed(self) -> tuple[S, int]:
        waiting: asyncio.Future[tuple[S, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._serve()
        limit = asyncio.timeout(self._patience_s)
        try:
            async with limit:
                return await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                # it came when nobody waited for it any more
                self._give_back(*waiting.result(), is_sound=True)
            if isinstance(error, TimeoutError) and limit.expired():
                raise WorldFailed(
                    f"no session of '{self._name}' was free within {self._patience_s:g} s; found"
                    f" {self._held} of {self._most} at work; let the environment serve more at"
                    " once, or ask for fewer with sessions="
                ) from None
            raise

    def _serve(self) -> None:
        """Hand out what is idle, and start what is missing."""
        self._waiting = deque(waiting for waiting in self._waiting if not waiting.done())
        while self._idle and self._waiting:
            self._held += 1
            session, uses = self._idle.popleft()
            if is_lost(session):
                self._give_back(session, uses, is_sound=False)
            else:
                self._waiting.popleft().set_result((session, uses))
        ahead = 0 if self._is_failing else self._ahead
        missing = to_start(
            waiting=len(self._waiting),
            ahead=ahead,
            idle=len(self._idle),
            starting=self._starting,
            lent=self._held,
            most=self._most,
        )
        for _ in range(0 if self._is_closed else missing):
            self._starting += 1
            task = self._later(self._begin())
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def _begin(self) -> None:
        """Start a session. Without room, retry while a borrower waits; where the server is away,
        retry until a start has taken too long. The first waiter gets the error; no session is
        started ahead until one has started.
        """
        session, pause_s, clock = None, _FIRST_PAUSE_S, asyncio.get_running_loop().time
        until_s = clock() + self._start_s
        limit: asyncio.Timeout | None = None
        try:
            while session is None:
                try:
                    limit = asyncio.timeout(self._start_s)
                    async with limit:
                        session = await self._start()
                except (NoRoom, Away) as error:
                    if all(waiting.done() for waiting in self._waiting):
                        break
                    if isinstance(error, NoRoom):
                        until_s = clock() + self._start_s
                    elif clock() > until_s:
                        raise
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except Exception as error:
            self._refuse(error, is_late=limit is not None and limit.expired())
        finally:
            self._starting -= 1
            self._is_failing = session is None
            if session is not None:
                self.started += 1
                self._held += 1
                self._give_back(session, 0, is_sound=True)
            self._serve()

    def _refuse(self, error: Exception, *, is_late: bool) -> None:
        waiting = next((waiter for waiter in self._waiting if not waiter.done()), None)
        if waiting is not None:
            late = f"it was not there within {self._start_s:g} s" if is_late else ""
            reason = error.__cause__ if isinstance(error, Away) and error.__cause__ else error
            problem = late or f"{type(reason).__name__}: {reason}"
            waiting.set_exception(
                WorldFailed(
                    f"no session of '{self._name}' could be started; found {problem}; look at the"
                    " environment"
                )
            )

    def _give_back(self, session: S, uses: int, is_sound: bool) -> None:
        if is_sound and not self._is_closed and (self._uses is None or uses < self._uses):
            self._held -= 1
            self._idle.append((session, uses))
            self._serve()
            return
        self.renewed += not self._is_closed
        self._later(self._end(session))

    async def _end(self, session: S) -> None:
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await session.close()
        except asyncio.CancelledError:  # the event loop ends: the session is closed all the same
            self._held += 1
            self._later(self._end(session))
        finally:
            self._held -= 1
            self._serve()

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
