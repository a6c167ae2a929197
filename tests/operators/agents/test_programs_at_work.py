"""What programs ask while the process that starts them dies, or while their worker stands still."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rigs.machine import alive, wait_until

from dataflow import Graph, Model
from dataflow.runtime import Context
from operators import Generator, Prompts, agent
from operators.agents.programs import Programs, TurnsInRun
from operators.episodes.worlds import row_bytes
from operators.serving.work import News, Work

TIMEOUT_S = 30.0
ROW = row_bytes(pa.RecordBatch.from_pydict({"prompt": ["2+2="]}))


class Clock:
    """Seconds that a test passes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def begun() -> Iterator[tuple[Programs, TurnsInRun, Clock]]:
    """A program that runs, and asks as a test likes."""
    turns, clock = TurnsInRun(64), Clock()
    declared = agent("sleep 1000", name="sleeper", timeout_s=TIMEOUT_S)
    made = Programs(
        declared, turns, "http://127.0.0.1:9", lambda key: None, lambda ids: "", clock=clock
    )
    made.submit(1, lambda start, stop: ROW)
    yield made, turns, clock
    made.close()
    turns.let_go()


def asking(turns: TurnsInRun, programs: Programs, told: list[News]) -> None:
    """A call of the program's, as the endpoint hands it over."""
    (key,) = programs._by_key
    work = Work(
        prompt=np.array([1, 2]),
        limit=64,
        seeds=[0],
        sampling=None,
        stop=None,
        tell=told.append,
        session=key,
    )
    turns.submit([work])


def test_a_question_of_a_program_that_died_with_its_host_is_nobodys(begun: Any) -> None:
    """Where both are heard of at the same time."""
    programs, turns, _ = begun
    told: list[News] = []
    asking(turns, programs, told)
    os.kill(programs.pid, signal.SIGKILL)
    wait_until(lambda: not alive([programs.pid]), what="the end of the host")
    assert programs.poll() == [] and programs.restarts == 1
    assert programs.asked() == [] and len(told) == 1 and told[0].refusal is not None
    asking(turns, programs, told)
    assert programs.poll() == []
    (asked,) = programs.asked()
    assert programs.question(asked, {})[1].conversation == 0


def test_a_program_is_late_by_the_clock_of_its_worker(policy: Path) -> None:
    """Which stands still while that is stopped, and its endpoint with it."""
    g, clock, declared = Graph("g"), Clock(), agent("sleep 1000", name="sleeper", timeout_s=1e-3)
    declared(Generator(Model(str(policy)).frozen()), g.source(Prompts([{"prompt": "a"}])))
    runtime: Any = g.operators["sleeper"].build(Context(node="sleeper", clock=clock))
    try:
        programs: Programs = runtime._programs
        wait_until(
            lambda: programs.poll() == [] and programs._host.is_ready,
            what="the process that starts programs",
        )
        programs.submit(1, lambda start, stop: ROW)
        time.sleep(0.01)
        assert programs.poll() == [] and programs._sessions[0].failure is None, (
            "no time has passed for the worker"
        )
        clock.now = 1.0
        answers: list[Any] = []
        wait_until(
            lambda: answers.extend(programs.poll()) or answers, what="the end of the program"
        )
        assert "hung: no call and no end within 0.001 s" in answers[0].failures[0]
    finally:
        runtime.close()
