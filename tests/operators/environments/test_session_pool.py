"""The pool of sessions: how many there are, who gets one, when another takes its place, and that
all come back.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dataflow.errors import WorldFailed
from operators.session_pool import Away, NoRoom, SessionPool


class Kept:
    """A session that is counted."""

    is_lost = False

    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number
        self.log.append(f"start {number}")

    async def close(self) -> None:
        self.log.append(f"close {self.number}")


class Maker:
    """Starts sessions, or fails as it is told."""

    def __init__(self, *failures: Exception | None) -> None:
        self.log: list[str] = []
        self.failures = list(failures)
        self.made = 0

    async def __call__(self) -> Kept:
        await asyncio.sleep(0)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            self.log.append(f"no {type(failure).__name__}")
            raise failure
        self.made += 1
        return Kept(self.log, self.made - 1)


def pool_of(maker: Maker, **knobs: Any) -> SessionPool[Kept]:
    return SessionPool(maker, name="a world", **{"most": 2, **knobs})


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await work()

    return asyncio.run(bounded())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_session_that_came_back_whole_is_lent_again() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker)
        for _ in range(5):
            async with pool.lend() as session:
                assert session.number == 0
        await pool.close()
        assert pool.open == 0

    run(work)
    assert maker.log == ["start 0", "close 0"]


def test_there_are_never_more_sessions_than_there_may_be_and_everyone_gets_one() -> None:
    maker = Maker()
    seen: list[int] = []

    async def work() -> None:
        pool = pool_of(maker, most=3, ahead=2)

        async def borrow(number: int) -> None:
            async with pool.lend():
                seen.append(pool.open)
                await asyncio.sleep(0)
                if number % 5 == 0:
                    raise ValueError("broken")

        await asyncio.gather(*(borrow(number) for number in range(40)), return_exceptions=True)
        await pool.close()
        assert pool.open == 0

    run(work)
    assert len(seen) == 40 and max(seen) == 3
    assert sorted(line.split()[1] for line in maker.log if "start" in line) == sorted(
        line.split()[1] for line in maker.log if "close" in line
    )


def test_a_session_whose_borrower_failed_is_closed_and_another_takes_its_place() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker, most=1, ahead=1, sound=(StopAsyncIteration,))
        with pytest.raises(StopAsyncIteration):
            async with pool.lend() as session:
                raise StopAsyncIteration
        with pytest.raises(KeyError):
            async with pool.lend() as session:
                assert session.number == 0
                raise KeyError
        await settled()
        assert maker.log == [
            "start 0",
            "close 0",
            "start 1",
        ], "the next one does not wait to be asked for"
        async with pool.lend() as session:
            assert session.number == 1
        assert (pool.started, pool.renewed) == (2, 1)
        await pool.close()

    run(work)


def test_a_session_is_renewed_after_so_many_uses() -> None:
    maker = Maker()

    async def work() -> list[int]:
        pool, numbers = pool_of(maker, most=1, uses=2), []
        for _ in range(5):
            async with pool.lend() as session:
                numbers.append(session.number)
        await pool.close()
        return numbers

    assert run(work) == [0, 0, 1, 1, 2]


def test_a_full_server_is_waited_for_and_is_no_failure() -> None:
    maker = Maker(NoRoom(), NoRoom(), None)

    async def work() -> None:
        pool = pool_of(maker)
        async with pool.lend() as session:
            assert session.number == 0
        await pool.close()

    run(work)
    assert maker.log == ["no NoRoom", "no NoRoom", "start 0", "close 0"]


def test_a_session_that_was_lost_while_it_was_idle_is_lent_to_nobody() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker, most=2)
        async with pool.lend() as first, pool.lend() as second:
            assert {first.number, second.number} == {0, 1}
        first.is_lost = second.is_lost = True
        async with pool.lend() as session:
            assert session.number == 2
        await settled()
        assert (pool.open, pool.renewed) == (1, 2), "they have made room"
        await pool.close()
        assert pool.open == 0

    run(work)
    assert sorted(maker.log) == sorted(
        f"{what} {number}" for what in ("start", "close") for number in range(3)
    )


def away() -> Away:
    error = Away("a server")
    error.__cause__ = ConnectionRefusedError("nobody listens")
    return error


def test_a_server_that_is_away_for_a_moment_is_waited_for_and_is_no_failure() -> None:
    maker = Maker(away(), away(), None)

    async def work() -> None:
        pool = pool_of(maker)
        async with pool.lend() as session:
            assert session.number == 0
        await pool.close()

    run(work)
    assert maker.log == ["no Away", "no Away", "start 0", "close 0"]


def test_a_server_that_stays_away_is_the_failure_of_who_waits_with_the_reason() -> None:
    maker = Maker(*(away() for _ in range(10_000)))

    async def work() -> None:
        pool = pool_of(maker, start_s=0.2)
        with pytest.raises(
            WorldFailed, match=r"could be started; found ConnectionRefusedError: nobody listens"
        ):
            async with pool.lend():
                raise AssertionError("there is none")
        await pool.close()
        assert pool.open == 0

    run(work)
    assert maker.made == 0 and len(maker.log) > 1


def test_who_waits_too_long_is_told_and_takes_nothing_along() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker, most=1, patience_s=1.0)
        async with pool.lend():
            with pytest.raises(
                WorldFailed,
                match=r"no session of 'a world' was free within 1 s; found 1 of 1 at work",
            ):
                async with pool.lend():
                    raise AssertionError("there is none")
        async with pool.lend() as session:
            assert session.number == 0
        await pool.close()
        assert pool.open == 0

    run(work)


def test_a_session_that_cannot_start_is_one_waiters_failure_and_none_starts_for_nobody() -> None:
    maker = Maker(*[OSError("the port is closed")] * 4, None)

    async def work() -> None:
        pool = pool_of(maker, ahead=2)
        for _ in range(3):
            with pytest.raises(
                WorldFailed, match=r"could be started; found OSError: the port is closed"
            ):
                async with pool.lend():
                    raise AssertionError("there is none")
            await settled()
        assert maker.log == ["no OSError"] * 4, (
            "one for each who waits, and one that was started ahead"
        )
        async with pool.lend():
            pass
        await settled()
        assert maker.made == 2, "once it works, the next is started ahead again"
        await pool.close()

    run(work)


def test_a_borrower_that_gives_up_as_its_session_comes_gives_it_back() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker, most=1)
        async with pool.lend():
            waiting = asyncio.ensure_future(pool.lend().__aenter__())
            await settled()
        waiting.cancel()  # its session is there, and it has not heard of it
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with pool.lend() as session:
            assert session.number == 0
        await pool.close()
        assert pool.open == 0

    run(work)


def test_what_is_lent_when_the_pool_closes_is_closed_when_it_comes_back() -> None:
    maker = Maker()

    async def work() -> None:
        pool = pool_of(maker)
        async with pool.lend():
            await pool.close()
        await settled()
        assert pool.open == 0

    run(work)
    assert maker.log == ["start 0", "close 0"]
