"""A run of several ranks on both sides goes on whichever of them is killed, or is stopped for longer than deadlines."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import tiny_graph
from rigs.machine import alive, wait_until
from rigs.policy import tiny_policy
from rigs.ranks import processes_of

from dataflow import run, verify
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(600)]

SIZES = {"trainer": 4, "generator": 2}
RANKS = [(worker, rank) for worker, size in SIZES.items() for rank in range(size)]
WAIT_S = 120.0


class Striking(threading.Thread):
    """Strikes one rank after the other, each when the run has made a step since the last one was made up for."""

    def __init__(self, runs: Path, victims: list[tuple[str, int]]) -> None:
        super().__init__(daemon=True)
        self._runs, self._victims = runs, victims
        self.struck: list[tuple[str, int]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for worker, rank in self._victims:
                self._next_step()
                wait_until(lambda: all(len(processes_of(name)) == size for name, size in SIZES.items()), WAIT_S)
                self.strike(processes_of(worker)[rank])
                self.struck.append((worker, rank))
        except BaseException as error:
            self.error = error

    def strike(self, pid: int) -> None:
        before = len(self.faults())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(self.faults()) > before, WAIT_S, "the fault on record")

    def faults(self) -> list[dict[str, Any]]:
        return read_faults((self._runs / "latest").resolve()) if (self._runs / "latest").exists() else []

    def step(self) -> int:
        return max((int(path.stem.split("-")[1]) for path in self._runs.glob("*/rollouts/step-*.arrow")), default=0)

    def _next_step(self) -> None:
        begin = self.step()
        wait_until(lambda: self.step() >= begin + 2, WAIT_S, f"a step after {begin}")


class Stopping(Striking):
    """Stops a rank for so many seconds."""

    def __init__(self, runs: Path, victims: list[tuple[str, int]], stopped_s: float) -> None:
        super().__init__(runs, victims)
        self._stopped_s = stopped_s

    def strike(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + self._stopped_s
        while alive([pid]) and time.monotonic() < deadline:  # its worker may be started again meanwhile
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), heads=4)


@contextlib.contextmanager
def goes_on(striking: Striking, policy: Path, runs: Path, weights: str, limits: Limits, steps: int) -> Iterator[Any]:
    """A run during which ranks are struck: it comes to its end with every group trained once, by the newest weights."""
    graph = tiny_graph(
        policy, max_staleness=0, max_tokens=8, prompts_per_step=2, generator_knobs={"tensor_parallel": 2}
    )
    striking.start()
    result = run(graph, ranks={"trainer": 4}, steps=steps, weights=weights, runs=runs, quiet=True, limits=limits)
    striking.join(10)
    assert striking.error is None, striking.error
    assert not striking.is_alive(), f"the run was over before all were struck; struck were {striking.struck}"
    assert result.steps == steps and result.verdict.clean, result.verdict.line
    assert verify(result.folder).clean
    versions = RunFolder.open(result.folder).read_rollouts(steps).column("versions").to_pylist()
    assert {max(row) for row in versions} == {steps - 1}
    yield result


@pytest.mark.parametrize("weights", ["gloo", "shared_memory"])
def test_whichever_rank_is_killed_the_run_goes_on_and_every_group_is_trained_once(
    weights: str, four_heads: Path, tmp_path: Path
) -> None:
    limits = Limits(patience=Patience(first_s=0.05, of_one=5))
    striking = Striking(tmp_path, RANKS)
    with goes_on(striking, four_heads, tmp_path, weights, limits, steps=40) as result:
        found = read_faults(result.folder)
        assert striking.struck == RANKS
        assert len(found) >= len(RANKS) and all(fault["recovered_s"] is not None for fault in found)
        assert {fault["worker"] for fault in found} == {"trainer-0", "generator-0"}


@pytest.mark.parametrize(("exchange_s", "stopped_s"), [(120.0, 60.0), (5.0, 25.0)])
@pytest.mark.parametrize("weights", ["gloo", "shared_memory"])
def test_a_rank_that_is_stopped_for_longer_than_deadlines_and_goes_on_ends_no_run(
    weights: str, exchange_s: float, stopped_s: float, four_heads: Path, tmp_path: Path
) -> None:
    """The weight plane strikes off a rank that is silent for 20 s."""
    limits = Limits(exchange_s=exchange_s, patience=Patience(first_s=0.05, of_one=5))
    striking = Stopping(tmp_path, [("trainer", 2), ("generator", 1)], stopped_s)
    with goes_on(striking, four_heads, tmp_path, weights, limits, steps=24) as result:
        if exchange_s < stopped_s:
            assert {"trainer-0", "generator-0"} <= {fault["worker"] for fault in read_faults(result.folder)}
