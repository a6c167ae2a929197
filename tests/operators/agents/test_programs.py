"""Programs as the worlds of episodes: what their limits of time count, and what they do not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.machine import wait_until

from dataflow.scoring.pool import Answer
from operators import agent
from operators.agents.programs import Programs, TurnsInRun
from operators.episodes.worlds import row_bytes

WAIT_S = 30.0


@pytest.fixture
def programs_of() -> Iterator[Callable[..., Programs]]:
    made: list[Programs] = []

    def make(command: str, clock: Callable[[], float], **knobs: Any) -> Programs:
        made.append(
            Programs(
                agent(command, **knobs),
                TurnsInRun(64),
                "http://127.0.0.1:1",
                lambda _: None,
                str,
                clock=clock,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def answers_of(programs: Programs, count: int) -> list[Answer]:
    found: list[Answer] = []

    def all_are_there() -> bool:
        found.extend(programs.poll())
        return len(found) >= count

    wait_until(all_are_there, WAIT_S)
    return found


def submit(programs: Programs) -> int:
    return programs.submit(
        1, lambda start, stop: row_bytes(pa.RecordBatch.from_pylist([{"prompt": "a"}]))
    )


def test_time_that_imports_take_is_no_time_of_the_programs(
    programs_of: Callable[..., Programs], tmp_path: Path
) -> None:
    """They are ordered while what they share is imported, which takes longer than they may."""
    go, now = tmp_path / "go", [0.0]
    (tmp_path / "waits.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n   "
        " time.sleep(0.02)\n"
    )
    (tmp_path / "solve.py").write_text("print(1)\n")
    programs = programs_of(
        f"python {tmp_path}/solve.py", lambda: now[0], imports=("waits",), timeout_s=2.0
    )
    submit(programs)
    assert programs.poll() == []
    now[0] = 1000.0
    assert programs.poll() == []
    go.touch()
    (answer,) = answers_of(programs, 1)
    assert "never called the endpoint" in answer.failures[0], answer.failures


def test_a_program_that_neither_calls_nor_ends_is_late_once_it_runs(
    programs_of: Callable[..., Programs], tmp_path: Path
) -> None:
    now, begun = [0.0], tmp_path / "begun"
    (tmp_path / "solve.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    programs = programs_of(
        f"python {tmp_path}/solve.py", lambda: now[0], imports=("json",), timeout_s=2.0
    )
    submit(programs)
    wait_until(lambda: programs.poll() == [] and begun.exists(), WAIT_S)
    now[0] = 3.0
    (answer,) = answers_of(programs, 1)
    assert answer.failures[0] == "hung: no call and no end within 2 s"
