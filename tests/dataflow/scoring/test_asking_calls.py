"""Laws of calls that ask: what they hear is an answer to their own question, and their owner's time
is not theirs.
"""

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.machine import alive

from dataflow.scoring.calls import Ask, Call, PoolSettings
from dataflow.scoring.pool import Asked, Pool

pytestmark = pytest.mark.usefixtures("forked")


def prepare(payload: bytes) -> Call:
    word = payload.decode()

    async def call(index: int, ask: Ask) -> bytes:
        if word == "quick":
            return b""
        if word.startswith("/"):
            return await held(Path(word), ask)
        heard = b""
        for number in range(3):
            heard += await ask(f"{word}{number}".encode())
            if word == "hang":
                await asyncio.sleep(60)
            if word == "block":
                time.sleep(60)
            if word == "die" and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            # in the world, and nobody knows by whose fault its process ends
            if word.startswith("meet"):
                await asyncio.sleep(0.05)
                if word == "meet and die":
                    os._exit(3)
                if word == "meet and block":
                    time.sleep(60)
                await asyncio.sleep(0.2 if number else 0.0)
            if word == "raise":
                raise ValueError("bad")
        return heard

    return call


async def held(mark: Path, ask: Ask) -> bytes:
    """Holds something, in the world and while it asks."""
    try:
        await (ask(b"") if mark.name == "asks" else asyncio.sleep(60))
    finally:
        await asyncio.sleep(0.05)
        mark.write_text("given back")
    return b""


@contextlib.contextmanager
def pool(**settings: Any) -> Iterator[Pool]:
    knobs = {"timeout_s": 0.3, "memory_mb": 64, "concurrency": 8, **settings}
    made = Pool(
        PoolSettings(
            prepare=prepare, pack=b"".join, describe=str, is_async=True, asks=True, **knobs
        )
    )
    try:
        yield made
    finally:
        made.close()


def conversed(
    made: Pool, words: list[str], answer: Callable[[Asked], bytes | None]
) -> dict[str, bytes | str]:
    """By word, what its call gave, or why it failed. answer: what is said to a question; None:
    nothing.
    """
    jobs = {made.submit(1, lambda start, stop, word=word: word.encode()): word for word in words}
    got: dict[str, bytes | str] = {}
    deadline = time.monotonic() + 30
    while len(got) < len(words):
        assert time.monotonic() < deadline, f"only {got} of {words}"
        select.select([made.fileno()], [], [], 0.02)
        for found in made.poll():
            got[jobs[found.job]] = found.failures.get(0, found.body)
        for asked in made.asked():
            if (said := answer(asked)) is not None:
                made.tell(asked, said)
    return got


@pytest.mark.parametrize("processes", [1, 2])
def test_every_call_hears_the_answers_to_its_own_questions(processes: int) -> None:
    words = [f"{letter}{number}" for letter in "abc" for number in range(20)]
    with pool(processes=processes, timeout_s=20.0) as made:
        got = conversed(made, words, lambda asked: asked.body + b";")
        assert got == {word: b"".join(f"{word}{n};".encode() for n in range(3)) for word in words}


def test_a_call_that_waits_for_its_owner_is_not_late() -> None:
    """Each question is answered after three times the limit of a call."""
    waiting: list[tuple[float, Asked]] = []
    with pool() as made:
        job = made.submit(1, lambda start, stop: b"a")
        got: list[Any] = []
        deadline = time.monotonic() + 30
        while not got:
            assert time.monotonic() < deadline
            select.select([made.fileno()], [], [], 0.02)
            got = made.poll()
            waiting += [(time.monotonic(), asked) for asked in made.asked()]
            if waiting and time.monotonic() - waiting[0][0] > 0.9:
                made.tell(waiting.pop()[1], b".")
        assert [(answer.job, answer.body, answer.failures) for answer in got] == [(job, b"...", {})]
        assert made.restarts == 0


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("hang", "hung: no answer within 0.3 s"),
        ("block", "hung: no answer within 0.3 s"),
        ("raise", "bad"),
    ],
)
def test_a_call_that_fails_after_an_answer_fails_alone(word: str, failure: str) -> None:
    with pool() as made:
        got = conversed(made, ["a", word, "b"], lambda asked: b".")
        assert got == {"a": b"...", "b": b"...", word: failure}


def test_calls_of_a_process_that_died_ask_again_from_their_first_question() -> None:
    """The one to blame is found, and the others go on; none hears an answer to a question of its
    earlier life.
    """
    asked: dict[int, list[int]] = {}

    def answer(question: Asked) -> bytes:
        asked.setdefault(question.job, []).append(question.number)
        return str(question.number).encode()

    with pool(timeout_s=20.0) as made:
        got = conversed(made, ["a", "die", "b"], answer)
        assert got["a"] == got["b"] == b"012"
        assert "signal 9" in str(got["die"])
    for numbers in asked.values():
        lives = "".join(map(str, numbers)).split("0")[1:]
        assert all("012".startswith("0" + life) for life in lives), numbers


@pytest.mark.parametrize(
    ("end", "failure"), [("die", "exited with status 3"), ("block", "no answer within 1 s")]
)
def test_who_ends_or_blocks_its_process_beside_others_is_found_at_once(
    end: str, failure: str
) -> None:
    words = [f"meet and {end}", *(f"meet {number}" for number in range(6))]
    with pool(timeout_s=1.0) as made:
        got = conversed(made, words, lambda asked: b".")
        assert failure in str(got.pop(f"meet and {end}"))
        assert got == dict.fromkeys(words[1:], b"...")
        assert made.restarts == 1


def test_who_asks_no_more_hears_nothing() -> None:
    with pool() as made:
        questions: list[Asked] = []
        got = conversed(made, ["a"], lambda asked: questions.append(asked) or b".")  # type: ignore[func-returns-value]
        for question in questions:
            made.tell(question, b"late")
        assert got == {"a": b"..."}
        assert conversed(made, ["b"], lambda asked: b"-") == {"b": b"---"}


def test_calls_under_way_give_back_what_they_hold_when_their_pool_closes(tmp_path: Path) -> None:
    """And one that does not let go is ended all the same."""
    marks = [tmp_path / "asks", tmp_path / "works"]
    with pool(timeout_s=60.0, processes=2) as made:
        for mark in [*marks, *marks]:
            made.submit(1, lambda start, stop, mark=mark: str(mark).encode())
        asked = 0
        deadline = time.monotonic() + 30
        while asked < 2:
            assert time.monotonic() < deadline
            select.select([made.fileno()], [], [], 0.02)
            made.poll()
            asked += len(made.asked())
        pids = made.pids
    assert [mark.read_text() for mark in marks] == ["given back"] * 2 and not alive(pids)
    with pool(timeout_s=60.0) as made:
        made.submit(1, lambda start, stop: b"block")
        while not (questions := made.asked()):
            select.select([made.fileno()], [], [], 0.02)
            made.poll()
        made.tell(questions[0], b".")
        pids = made.pids
    assert not alive(pids)


def test_no_call_waits_in_a_process_behind_others_that_may_wait_for_it() -> None:
    """All that may be made at once have asked before any is answered, though one process was
    quicker before.
    """
    with pool(timeout_s=60.0, processes=2, concurrency=2) as made:
        for _ in range(4):
            conversed(made, ["quick"], lambda asked: None)
        for word in (b"a", b"b", b"c", b"d"):
            made.submit(1, lambda start, stop, word=word: word)
        asked: list[Asked] = []
        deadline = time.monotonic() + 20
        while len(asked) < 4:
            assert time.monotonic() < deadline, f"only {len(asked)} of 4 calls ask"
            select.select([made.fileno()], [], [], 0.02)
            made.poll()
            asked += made.asked()
