"""Whose turn it is: never two nodes awake, no turn lost, whoever works, dies or is stopped, in any
order.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rigs.machine import wait_until

from dataflow.errors import DeadlineError
from dataflow.worker.turns import Turns, decide

NODES = ("generator", "reference", "trainer")


@pytest.mark.parametrize(
    ("awake", "wants", "wanted", "does"),
    [
        (True, True, True, "stay"),
        (True, True, False, "stay"),
        (True, False, True, "give"),
        (True, False, False, "stay"),
        (False, True, True, "take"),
        (False, True, False, "take"),
        (False, False, True, "stay"),
        (False, False, False, "stay"),
    ],
)
def test_a_turn_is_given_when_its_work_is_done_and_another_asks(
    awake: bool, wants: bool, wanted: bool, does: str
) -> None:
    assert decide(awake=awake, wants=wants, wanted=wanted) == does


@dataclass
class Sleeper:
    """Work of so many slices, and whether it has memory."""

    work: int = 0
    has_memory: bool = False
    events: list[str] = field(default_factory=list)
    on_sleep: Callable[[], object] = lambda: None

    def wants_devices(self) -> bool:
        return self.work > 0

    def works(self) -> None:
        """A slice, where it can."""
        self.work -= self.has_memory and self.work > 0

    def sleep(self) -> None:
        self.on_sleep()
        self.has_memory = False
        self.events.append("sleep")

    def wake(self) -> None:
        self.has_memory = True
        self.events.append("wake")


@dataclass
class Process:
    """The first rank of a replica of a node."""

    node: str
    path: Path
    runtime: Sleeper = field(default_factory=Sleeper)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.turns = Turns(self.path, NODES, self.node)

    def dies(self) -> "Orphan":
        """The kernel closes its files; another is started, which has its work to do again. Its
        other rank lives on.
        """
        orphan = Orphan(self.node, tuple(map(os.dup, self.turns.files)), self.runtime.has_memory)
        self.turns.close()
        self.runtime.has_memory = self.stopped = False
        self.turns = Turns(self.path, NODES, self.node)
        return orphan


@dataclass(frozen=True)
class Orphan:
    """A rank whose first rank has died: it has the memory and the files that it had."""

    node: str
    files: tuple[int, ...]
    has_memory: bool

    def ends(self) -> None:
        for each in self.files:
            os.close(each)


class World(RuleBasedStateMachine):
    """Nodes that share devices, one of them as two replicas of two ranks each: work comes,
    processes die and stop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "turns"
        self.processes = [Process(node, path) for node in (*NODES, NODES[0])]
        self.orphans: list[Orphan] = []

    @rule(which=st.integers(0, 3), slices=st.integers(1, 3))
    def work_comes(self, which: int, slices: int) -> None:
        self.processes[which].runtime.work += slices

    @rule(which=st.integers(0, 3), held_up=st.booleans())
    def goes_on(self, which: int, held_up: bool) -> None:
        process = self.processes[which]
        if not process.stopped:
            process.turns.turn(process.runtime, held_up=held_up)
            process.runtime.works()

    @rule(which=st.integers(0, 3))
    def is_stopped_or_let_go_on(self, which: int) -> None:
        self.processes[which].stopped ^= True

    @rule(which=st.integers(0, 3))
    def dies(self, which: int) -> None:
        self.orphans.append(self.processes[which].dies())

    @precondition(lambda self: self.orphans)
    @rule(data=st.data())
    def the_other_rank_ends(self, data: st.DataObject) -> None:
        self.orphans.pop(data.draw(st.integers(0, len(self.orphans) - 1))).ends()

    @invariant()
    def one_node_alone_has_memory(self) -> None:
        awake = {each.node for each in self.processes if each.runtime.has_memory}
        awake |= {each.node for each in self.orphans if each.has_memory}
        assert len(awake) <= 1, f"{awake} have memory together"
        assert all(each.turns.awake == each.runtime.has_memory for each in self.processes)

    def teardown(self) -> None:
        """Once the dead have ended and the stopped go on, all work is done."""
        for orphan in self.orphans:
            orphan.ends()
        for _ in range(sum(each.runtime.work for each in self.processes) + 2 * len(self.processes)):
            for process in self.processes:
                process.turns.turn(process.runtime)
                process.runtime.works()
        left = [each.runtime.work for each in self.processes]
        for process in self.processes:
            process.turns.close()
        self.folder.cleanup()
        assert not any(left), left


def test_never_two_nodes_have_memory_and_all_work_is_done_whoever_dies_or_stops() -> None:
    run_state_machine_as_test(World, settings=settings(stateful_step_count=60))


def test_of_two_that_look_at_once_one_alone_takes_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, trainer = (
        Process("generator", tmp_path / "turns"),
        Process("trainer", tmp_path / "turns"),
    )
    generator.runtime.work = trainer.runtime.work = 1
    looks = trainer.turns._locks.is_taken

    def between(byte: int) -> bool:
        """The other one comes after this look, and before what follows from it."""
        found = looks(byte)
        generator.turns.turn(generator.runtime)
        return found

    monkeypatch.setattr(trainer.turns._locks, "is_taken", between)
    trainer.turns.turn(trainer.runtime)
    assert [generator.runtime.has_memory, trainer.runtime.has_memory].count(True) == 1


def test_memory_is_given_back_before_the_turn(tmp_path: Path) -> None:
    generator, trainer = (
        Process("generator", tmp_path / "turns"),
        Process("trainer", tmp_path / "turns"),
    )
    generator.runtime.work = trainer.runtime.work = 1
    generator.turns.turn(generator.runtime)
    generator.runtime.work = 0
    trainer.turns.turn(trainer.runtime)
    generator.runtime.on_sleep = lambda: (
        trainer.turns.turn(trainer.runtime) and trainer.runtime.events.append("early")
    )
    assert generator.turns.turn(generator.runtime) and trainer.runtime.events == []
    assert trainer.turns.turn(trainer.runtime) and trainer.runtime.has_memory


def test_memory_moves_once_for_each_turn(tmp_path: Path) -> None:
    generator, trainer = (
        Process("generator", tmp_path / "turns"),
        Process("trainer", tmp_path / "turns"),
    )
    generator.runtime.work = 3
    for _ in range(10):
        generator.turns.turn(generator.runtime)
        generator.runtime.work = max(0, generator.runtime.work - 1)
        trainer.turns.turn(trainer.runtime)
    assert (generator.runtime.events, trainer.runtime.events) == (["wake"], [])
    trainer.runtime.work = 1
    for _ in range(3):
        trainer.turns.turn(trainer.runtime)
        generator.turns.turn(generator.runtime)
    assert (generator.runtime.events, trainer.runtime.events) == (["wake", "sleep"], ["wake"])


def test_one_that_cannot_go_on_gives_its_turn_up_though_it_has_work(tmp_path: Path) -> None:
    generator, trainer = (
        Process("generator", tmp_path / "turns"),
        Process("trainer", tmp_path / "turns"),
    )
    generator.runtime.work = trainer.runtime.work = 1
    for _ in range(3):
        generator.turns.turn(generator.runtime, held_up=True)
        trainer.turns.turn(trainer.runtime)
    assert trainer.runtime.has_memory and not generator.runtime.has_memory


def test_building_waits_for_the_turn_with_a_deadline_that_says_for_whom(tmp_path: Path) -> None:
    generator, trainer = (
        Process("generator", tmp_path / "turns"),
        Process("trainer", tmp_path / "turns"),
    )
    with generator.turns.building(1.0):
        wait = pytest.raises(
            DeadlineError, match=r"'trainer' waited 0 s .* shares with \['generator', 'reference'\]"
        )
        with wait, trainer.turns.building(0.05):
            pass
    generator.turns.built(generator.runtime)
    with trainer.turns.building(0.05):
        assert trainer.turns.awake


ALONE = """
import os, sys, time
from pathlib import Path
from dataflow.system import child
from dataflow.worker.turns import Turns
turns = Turns(Path(sys.argv[1]), ("generator", "trainer"), "trainer")
with turns.building(10.0):
    rank = child.fork(lambda: time.sleep(600) or 0, keep=turns.files)
    print(rank.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP], ids=["runs", "stopped"])
def test_a_turn_ends_with_the_last_rank_of_who_had_it(number: int, tmp_path: Path) -> None:
    path, runtime = tmp_path / "turns", Sleeper(work=1)
    generator = Turns(path, ("generator", "trainer"), "generator")
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        rank = int(first.stdout.readline())
        try:
            os.kill(rank, number)
            first.kill()
            assert first.wait() == -signal.SIGKILL
            assert not any(generator.turn(runtime) for _ in range(100)) and generator.waiting
        finally:
            os.kill(rank, signal.SIGKILL)
        wait_until(lambda: generator.turn(runtime), 10.0, "that the killed rank lets go")
    assert runtime.has_memory
    generator.close()


HOLD = """
import sys
from pathlib import Path
from dataflow.worker.turns import Turns
turns = Turns(Path(sys.argv[1]), ("generator", "trainer"), "generator")
with turns.building(10.0):
    print("awake", flush=True)
    sys.stdin.read()
"""


def test_a_stopped_process_keeps_its_turn_and_a_killed_one_does_not(tmp_path: Path) -> None:
    path, runtime = tmp_path / "turns", Sleeper(work=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    trainer = Turns(path, ("generator", "trainer"), "trainer")
    with holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "awake\n"
            os.kill(holder.pid, signal.SIGSTOP)
            assert not any(trainer.turn(runtime) for _ in range(100)) and trainer.waiting
        finally:
            holder.kill()
        wait_until(lambda: trainer.turn(runtime), 10.0, "that the killed process lets go")
    assert runtime.has_memory
    trainer.close()
