"""What a call has left behind shows nothing, and is answered nothing."""

import asyncio

import pytest

from dataflow.scoring.calls import CallAsks
from dataflow.scoring.server import _Asking


def test_a_task_that_outlives_its_call_leaves_the_next_one_alone() -> None:
    """Its source serves another call by then, of chunk 9."""
    progress, posted = memoryview(bytearray(32)).cast("q"), list[CallAsks]()

    async def work() -> None:
        limit = asyncio.timeout(60.0)
        ask = _Asking(
            lambda message, body: posted.append(message), {}, limit, progress, (1, 0), 60.0
        )
        gate = asyncio.Event()

        async def rests() -> None:
            with ask.rest():
                await gate.wait()
            with ask.rest():
                pass

        async with limit:
            asks, resting = asyncio.create_task(ask(b"a")), asyncio.create_task(rests())
            await asyncio.sleep(0)
        ask.end()
        progress[0] = 9
        gate.set()
        await resting
        assert progress[0] == 9
        for left in (asks, asyncio.create_task(ask(b"b"))):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(left, 20.0)

    asyncio.run(work())
    assert [message.number for message in posted] == [0]
