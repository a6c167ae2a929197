"""The doctor at runs of fakes in processes: one that is well, one with a stopped worker, one that
never moves.
"""

import contextlib
import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.graphs import fake_graph
from rigs.machine import wait_until
from rigs.operators import mute, slow

from dataflow import Graph, Model, RunError, run, scorer
from dataflow.doctor.report import examine
from dataflow.errors import DeadlineError
from dataflow.folder.socket_folder import CONTROL
from dataflow.limits import Limits
from dataflow.scheduler.requests import ask_for_facts
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

pytestmark = [
    pytest.mark.usefixtures("one_core", "light"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
]


MODEL = Model("fake-policy")


PATIENT = Limits(stop_s=2.0, hang_s=150.0, stopped_s=150.0)


def endless(reward: Callable[..., float]) -> Graph:
    return fake_graph(
        source=slow(FakePrompts(size=None), 0.05),
        trainer=FakeTrainer(model=MODEL),
        scorers=(reward,),
    )


@contextlib.contextmanager
def beside(visit: Callable[[Path], None], runs: Path) -> Iterator[None]:
    """While a run goes on in this thread another one visits it, and then asks it to end."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            wait_until(lambda: (runs / "latest" / CONTROL).exists(), 60.0, "a run that answers")
            visit(runs / "latest")
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=body)
    thread.start()
    yield
    thread.join()
    if failures:
        raise failures[0]


def said(folder: Path, pattern: str) -> str:
    """The report, once it says so."""
    found: list[str] = []

    def says() -> bool:
        found.append(examine(folder, ask_for_facts))
        return re.search(pattern, found[-1]) is not None

    with contextlib.suppress(AssertionError):
        wait_until(says, 90.0)
    assert re.search(pattern, found[-1]), found[-1]
    return found[-1]


def pid_of(name: str, report: str) -> int:
    found = re.search(rf"^  {name} +\w+ +(\d+)", report, re.MULTILINE)
    assert found, report
    return int(found[1])


def test_the_doctor_finds_a_run_well_then_names_a_stopped_worker_and_a_signal_writes_it_down(
    tmp_path: Path,
) -> None:
    @scorer(isolate=False)
    def judge(completion: str) -> float:
        return 1.0

    def visit(folder: Path) -> None:
        well = said(folder, r"training, step [1-9](.|\n)*Nothing is wrong")
        assert re.search(r"judge-0 MainThread: .+\.py:\d+", well), "where it is"
        pid = pid_of("judge-0", well)
        os.kill(pid, signal.SIGSTOP)
        try:
            said(
                folder,
                rf"waits? for 'judge': judge-0 \(pid {pid}\) is stopped \(state T in /proc\)",
            )
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: list(folder.glob("doctor-*.txt")), 60.0, "the report")
        finally:
            os.kill(pid, signal.SIGCONT)
        said(folder, "Nothing is wrong")

    with beside(visit, tmp_path):
        result = run(endless(judge), runs=tmp_path, quiet=True, limits=PATIENT)
    assert result.verdict.clean, "what the doctor does leaves the run alone"
    assert "is stopped (state T" in next(result.folder.glob("doctor-*.txt")).read_text()


def test_a_worker_that_holds_its_interpreter_is_told_apart_and_its_log_says_where_it_is(
    tmp_path: Path,
) -> None:
    held = tmp_path / "held"

    @scorer(isolate=False)
    def judge(completion: str) -> float:
        if not held.exists():
            held.touch()
            ctypes.PyDLL(None).sleep(120)  # with the interpreter's lock held
        return 1.0

    def visit(folder: Path) -> None:
        text = said(folder, r"judge-0 \(pid \d+\) does not answer \(state [SD] in /proc\)")
        os.kill(pid_of("judge-0", text), signal.SIGKILL)
        assert re.search(
            r"judge-0 does not answer .*; its log now has\n(.*\n)?.*in judge\b", text
        ), text

    with beside(visit, tmp_path), contextlib.suppress(RunError):
        run(endless(judge), runs=tmp_path, quiet=True, limits=PATIENT)


def test_a_run_in_which_nothing_moves_ends_with_the_root_and_a_report_in_its_folder(
    tmp_path: Path,
) -> None:
    graph = fake_graph(generator=mute(FakeGenerator(model=MODEL)))
    with pytest.raises(
        DeadlineError, match=r"'generator', which holds \d+ rows .*doctor-.*\.txt says who waits"
    ) as ended:
        run(graph, runs=tmp_path, quiet=True, limits=Limits(stop_s=2.0, stall_s=3.0))
    path = re.search(r"(\S*doctor-\S*\.txt)", str(ended.value))
    assert path and "generator-0 MainThread" in Path(path[1]).read_text(), (
        "with the stacks of all workers"
    )
