"""Laws of the pool: every call is answered once, whatever its process does."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.scoring.calls import Call, PoolSettings
from dataflow.scoring.pool import Answer, CallChunk, CallRange, Pool, pieces_of

pytestmark = pytest.mark.usefixtures("forked")


MEETING = threading.Barrier(4)


LATE = "hung: no answer within 0.2 s"


KINDS = {
    "one": {},
    "processes": {"processes": 2},
    "threads": {"concurrency": 4},
    "tasks": {"concurrency": 4},
}


def act(word: str) -> Any:
    """What a call does, by its word."""
    match word.split(":")[0]:
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(2)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "raise":
            raise ValueError("bad")
        case "memory":
            held = bytearray(b"x") * (160 << 20)
            time.sleep(60)
            return len(held)
        case "too much":
            return len(bytearray(8 << 30))
        case "server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        case "close":
            os.closerange(3, 256)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "meet":
            MEETING.wait()
        case "print":
            print("a line " * 1000)
            sys.stderr.write("another\n")
        case "child":
            pid = subprocess.Popen(["sleep", "60"]).pid
            Path(word.partition(":")[2]).write_text(str(pid))
            time.sleep(60)
        case "pid":
            return os.getpid()
        case "mark":
            with Path(word.partition(":")[2]).open("a") as file:
                file.write("once\n")
    return word


def prepare(payload: bytes) -> Call:
    words = payload.decode().split("|")
    return lambda index: act(words[index])


def prepare_tasks(payload: bytes) -> Call:
    words = payload.decode().split("|")

    async def call(index: int) -> Any:
        if words[index] == "hang":
            await asyncio.sleep(60)
        if words[index] == "wait":
            await asyncio.sleep(0.01)
        if words[index] == "meet":
            await asyncio.to_thread(MEETING.wait)
            return "meet"
        return act("hang" if words[index] == "block" else words[index])

    return call


def pack(values: list[Any]) -> bytes:
    return json.dumps(values).encode()


def answered(answer: Answer) -> dict[int, Any]:
    """The value of each of its calls, or what went wrong with it."""
    made = [call for call in answer.calls if call not in answer.failures]
    return dict(zip(made, json.loads(answer.body or "[]"), strict=True)) | dict(answer.failures)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def pool(kind: str = "one", **settings: Any) -> Iterator[Pool]:
    is_async = kind == "tasks"
    made = Pool(
        PoolSettings(
            prepare=prepare_tasks if is_async else prepare,
            pack=pack,
            describe=describe,
            is_async=is_async,
            **{"timeout_s": 0.2, "memory_mb": 64, **KINDS[kind], **settings},
        )
    )
    try:
        yield made
    finally:
        made.close()


def submit(pool: Pool, words: list[str]) -> int:
    return pool.submit(len(words), lambda start, stop: "|".join(words[start:stop]).encode())


def answers(pool: Pool, words: list[str]) -> list[Any]:
    """The value of each call, or an exception with the failure."""
    job = submit(pool, words)
    got: dict[int, Any] = {}
    deadline = time.monotonic() + 30
    while pool.open_calls:
        assert time.monotonic() < deadline, f"only {len(got)} of {len(words)} calls were answered"
        select.select([pool.fileno()], [], [], 0.02)
        for answer in pool.poll():
            assert answer.job == job
            found = answered(answer)
            assert not got.keys() & found.keys(), "a call was answered twice"
            got |= found
    return [got[call] for call in range(len(words))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_is_answered_with_its_own_value(kind: str) -> None:
    words = [str(number) for number in range(300)]
    with pool(kind) as made:
        assert answers(made, words) == words
        assert made.restarts == 0


FAILURES = {
    "hang": LATE,
    "exit": "died: its process exited with status 3",
    "sys.exit": "SystemExit: 2",
    "kill": "died: its process ended with signal 9 (memory limit 64 MB)",
    "abort": "died: its process ended with signal 6 (memory limit 64 MB)",
    "raise": "ValueError: bad",
    "too much": "MemoryError: ",
    "server": "died: its process ended with signal 9 (memory limit 64 MB)",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", FAILURES)
def test_a_call_fails_by_its_own_fault_and_no_other_does(kind: str, word: str) -> None:
    words = ["a", "b", "c", word, "d", "e"]
    timeout_s = 0.3 if word == "hang" else 5.0
    with pool(kind, timeout_s=timeout_s) as made:
        got = answers(made, words)
        assert got == [*words[:3], FAILURES[word].replace("0.2", "0.3"), *words[4:]]
        assert answers(made, ["after"]) == ["after"]


def test_a_call_that_stops_its_process_is_late() -> None:
    with pool() as made:
        assert answers(made, ["a", "stop", "b"]) == ["a", LATE, "b"]


def test_a_process_that_somebody_stopped_is_let_go_on_with_its_calls() -> None:
    with pool(timeout_s=30.0) as made:
        assert answers(made, ["a", "stop", "b"]) == ["a", "stop", "b"]
        assert made.restarts == 0


def test_a_server_that_somebody_stopped_is_let_go_on() -> None:
    with pool(timeout_s=30.0) as made:
        os.kill(made.pids[0], signal.SIGSTOP)
        assert answers(made, ["a", "exit", "b"])[::2] == ["a", "b"]
        assert made.restarts == 1, "of the process, not of the server"


def test_a_call_that_eats_memory_is_ended_and_named() -> None:
    with pool(timeout_s=20.0) as made:
        assert answers(made, ["a", "memory", "b"]) == [
            "a",
            "died: its process took more memory than its limit of 64 MB",
            "b",
        ]


def test_a_call_that_closes_every_file_is_found_among_others() -> None:
    with pool() as made:
        got = answers(made, ["a", "close", "b"])
    assert (got[0], got[2]) == ("a", "b")
    assert got[1] in (
        "died: its process exited with status 0",
        "died: it closed the wire of its process",
    )


def test_a_blocked_event_loop_is_ended_like_any_other_call() -> None:
    with pool("tasks") as made:
        assert answers(made, ["a", "block", "b"]) == ["a", LATE, "b"]


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_calls_of_one_process_are_made_at_the_same_time(kind: str) -> None:
    with pool(kind, timeout_s=20.0) as made:
        assert answers(made, ["meet"] * 8) == ["meet"] * 8
        assert made.restarts == 0


def test_a_task_that_hangs_leaves_its_process_and_the_others_alone() -> None:
    late = LATE.replace("0.2", "1")  # so that a busy machine has time to answer those that wait
    with pool("tasks", timeout_s=1.0) as made:
        assert answers(made, ["hang", "wait", "hang", "wait"]) == [late, "wait", late, "wait"]
        assert made.restarts == 0


def test_answered_calls_are_not_made_again_when_a_later_one_ends_the_process(
    tmp_path: Path,
) -> None:
    marks = [f"mark:{tmp_path / str(number)}" for number in range(3)]
    with pool() as made:
        assert answers(made, marks) == marks
        answers(made, ["exit"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["once\n"] * 3


def test_a_process_killed_from_outside_costs_no_call() -> None:
    with pool(timeout_s=20.0) as made:
        words = [str(number) for number in range(20_000)]
        while len(made.pids) < 2:
            made.poll()
        submit(made, words)
        os.kill(made.pids[1], signal.SIGKILL)
        got = _drain(made)
    assert sorted(got, key=int) == words


def test_a_server_killed_from_outside_costs_no_call() -> None:
    with pool("processes", timeout_s=20.0) as made:
        submit(made, [str(number) for number in range(20_000)])
        os.kill(made.pids[0], signal.SIGKILL)
        assert sorted(_drain(made), key=int) == [str(number) for number in range(20_000)]
        assert made.restarts == 1


def test_an_end_of_a_process_that_nobody_has_said_started_is_told_by_the_server() -> None:
    """A server that is killed closes the ends that it had not handed to a process, one after the
    other.
    """
    with pool("processes", timeout_s=20.0) as made:
        while len(made.pids) < 3:
            made.poll()
        process = made._processes[0]
        pid, process.pid = process.pid, 0
        os.kill(pid, signal.SIGKILL)
        assert process.channel is not None and process.channel.readable(20.0)
        made.poll()
        assert made.restarts == 0
        process.pid = pid
        made.poll()
        assert made.restarts == 1


def _drain(made: Pool) -> list[Any]:
    got: list[Any] = []
    deadline = time.monotonic() + 30
    while made.open_calls and time.monotonic() < deadline:
        select.select([made.fileno()], [], [], 0.02)
        for answer in made.poll():
            assert not answer.failures
            got += answered(answer).values()
    return got


def test_several_processes_share_the_calls() -> None:
    with pool("processes", timeout_s=20.0) as made:
        submit(made, ["pid"] * 500)
        assert len(set(_drain(made))) == 2


def test_a_payload_larger_than_the_wire_holds_arrives_whole() -> None:
    words = ["x" * 3_000_000, "y" * 2_000_000]
    with pool(timeout_s=20.0, memory_mb=None) as made:
        assert answers(made, words) == words


def test_prints_go_where_the_worker_prints_and_break_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pool(timeout_s=20.0) as made:
        assert answers(made, ["print", "a", "print"]) == ["print", "a", "print"]
    out, err = capfd.readouterr()
    assert out.count("a line") == 2000
    assert err == "another\nanother\n"


def test_a_payload_that_cannot_be_decoded_fails_its_calls() -> None:
    with pool() as made:
        job = made.submit(2, lambda start, stop: b"\xff")
        while made.open_calls:
            select.select([made.fileno()], [], [], 0.02)
            for answer in made.poll():
                assert answer.job == job
                assert all("UnicodeDecodeError" in text for text in answer.failures.values())


def test_a_job_without_calls_is_over_at_once() -> None:
    with pool() as made:
        made.submit(0, lambda start, stop: b"")
        assert made.open_calls == 0


def test_closing_leaves_no_process() -> None:
    with pool("processes") as made:
        answers(made, ["a"] * 20)
        submit(made, ["hang", "hang"])
        while len(made.pids) < 3:
            made.poll()
        pids = made.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_a_hung_call_started_ends_with_it(tmp_path: Path) -> None:
    with pool(timeout_s=0.4) as made:
        assert answers(made, [f"child:{tmp_path / 'pid'}"]) == [LATE.replace("0.2", "0.4")]
    _wait_until_gone([int((tmp_path / "pid").read_text())])


ORPHAN = """
import sys, time
sys.path[:0] = {path!r}
from tests.dataflow.scoring.test_pool import pool, submit
with pool("processes", timeout_s=600.0) as made:
    submit(made, ["hang"] * 8)
    while len(made.pids) < 3:
        made.poll()
    print(*made.pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [(), (0,), (0, 1, 2)], ids=["none", "the server", "all"])
def test_no_process_outlives_a_worker_that_was_killed(stopped: tuple[int, ...]) -> None:
    """Neither those that run nor those that somebody stopped."""
    program = ORPHAN.format(path=[str(Path(__file__).parents[3])])
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 3
    try:
        for index in stopped:
            os.kill(pids[index], signal.SIGSTOP)
        worker.kill()
        worker.wait()
        worker.stdout.close()
        _wait_until_gone(pids)
    finally:
        for pid in filter(_lives, pids):
            os.kill(pid, signal.SIGKILL)


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, f"{left} outlived what they belong to"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_open_calls_become_pieces_of_neighbours_and_lonely_ones_stay_apart() -> None:
    def chunk(job: int, calls: set[int], is_alone: bool = False) -> CallChunk:
        return CallChunk(job, min(calls), calls, is_alone, 0.0)

    assert pieces_of([chunk(0, {3, 1, 2, 7}), chunk(0, {8}), chunk(1, {4, 5}, True)]) == [
        CallRange(0, 1, 4),
        CallRange(0, 7, 9),
        CallRange(1, 4, 5, True),
        CallRange(1, 5, 6, True),
    ]
