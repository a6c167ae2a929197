"""Whose turn it is: never two nodes awake, no turn lost, whoever works, dies or is stopped, in any order."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
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

    def wants_devices(self) -> bool:
        return self.work > 0

    def sleep(self) -> None:
        self.has_memory = False
        self.events.append("sleep")

    def wake(self) -> None:
        self.has_memory = True
        self.events.append("wake")


@dataclass
class Process:
    """A replica of a node."""

    node: str
    path: Path
    runtime: Sleeper = field(default_factory=Sleeper)

    def __post_init__(self) -> None:
        self.turns = Turns(self.path, NODES, self.node)

    def dies(self) -> None:
        """The kernel lets go of its locks, and of its memory; another is started, which has its work to do again."""
        self.turns.close()
        self.runtime.has_memory = False
        self.turns = Turns(self.path, NODES, self.node)


@pytest.mark.parametrize("seed", range(40))
def test_never_two_nodes_are_awake_and_all_work_is_done_whoever_dies(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    every = [Process(node, tmp_path / "turns") for node in (*NODES, "generator")]
    stopped: set[int] = set()
    for _ in range(400):
        number = draw.randrange(len(every))
        process, chance = every[number], draw.random()
        if chance < 0.04:
            process.dies()
            stopped.discard(number)
        elif chance < 0.08:
            stopped ^= {number}
        elif chance < 0.25:
            process.runtime.work += draw.randrange(4)
        elif number not in stopped:
            process.turns.turn(process.runtime, held_up=chance < 0.3)
            if process.runtime.has_memory and process.runtime.work:
                process.runtime.work -= 1
        awake = {each.node for each in every if each.runtime.has_memory}
        assert len(awake) <= 1, f"{awake} are awake together"
        assert all(each.turns.awake == each.runtime.has_memory for each in every)
    for _ in range(sum(each.runtime.work for each in every) + 2 * len(every)):
        for process in every:
            process.turns.turn(process.runtime)
            process.runtime.work -= process.runtime.has_memory and process.runtime.work > 0
    assert [each.runtime.work for each in every] == [0] * len(every)
    for process in every:
        process.turns.close()


def test_memory_moves_once_for_each_turn(tmp_path: Path) -> None:
    generator, trainer = Process("generator", tmp_path / "turns"), Process("trainer", tmp_path / "turns")
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
    generator, trainer = Process("generator", tmp_path / "turns"), Process("trainer", tmp_path / "turns")
    generator.runtime.work = trainer.runtime.work = 1
    for _ in range(3):
        generator.turns.turn(generator.runtime, held_up=True)
        trainer.turns.turn(trainer.runtime)
    assert trainer.runtime.has_memory and not generator.runtime.has_memory


def test_building_waits_for_the_turn_with_a_deadline_that_says_for_whom(tmp_path: Path) -> None:
    generator, trainer = Process("generator", tmp_path / "turns"), Process("trainer", tmp_path / "turns")
    with generator.turns.building(1.0):
        wait = pytest.raises(DeadlineError, match=r"'trainer' waited 0 s .* shares with \['generator', 'reference'\]")
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
        [sys.executable, "-c", ALONE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
