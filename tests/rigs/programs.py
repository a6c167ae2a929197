"""rigs/program.py under way in a process group of its own, as in a terminal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataflow.folder.run_folder import RunFolder

from .machine import descendants, wait_until

PROGRAM = Path(__file__).parent / "program.py"


@dataclass
class Program:
    """One of them."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def steps(self) -> int:
        latest = self.runs / "latest"
        return (
            sum(
                "loss" in line or "dropped" in line
                for line in RunFolder.open(latest).read_metrics()
            )
            if latest.exists()
            else 0
        )

    def family(self) -> set[int]:
        return {self.process.pid, *descendants(self.process.pid)}

    def ended_by_itself(self) -> bool:
        return self.process.poll() not in (None, -signal.SIGKILL)

    def made(self) -> list[Path]:
        """Folders for sockets and shared memory."""
        return [Path(line) for line in (self.folder / "made").read_text().splitlines()]

    def press_control_c(self) -> None:
        """What a terminal does: everyone in the group gets it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def outcome(self) -> str:
        folder = RunFolder.open((self.runs / "latest").resolve())
        return (
            str(folder.read_json("times.json")["outcome"])
            if (folder.path / "times.json").exists()
            else ""
        )

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def kill(self) -> None:
        """As the kernel does where memory is short."""
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def program(machine: None, tmp_path: Path, policy: Path) -> Iterator[Callable[..., Program]]:
    """Starts one of the kinds; output: in the place of a file; knobs: as in HOW of
    program.py.
    """
    started: list[Program] = []

    def start(kind: str, *, output: int | None = None, **how: Any) -> Program:
        command = [sys.executable, str(PROGRAM), kind, str(tmp_path), str(policy)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HOW": json.dumps(how)}
        environment.pop("CI", None)
        with (tmp_path / "output").open("a") as file:
            to = file if output is None else output
            process = subprocess.Popen(
                command, stdout=to, stderr=to, text=True, env=environment, process_group=0
            )
        started.append(Program(process, tmp_path))
        return started[-1]

    yield start
    left = [
        made for each in started if each.ended_by_itself() for made in each.made() if made.exists()
    ]
    for each in started:
        each.process.kill()
        each.process.wait(10)
        for made in each.made():
            shutil.rmtree(made, ignore_errors=True)
    assert left == []


def under_way(each: Program, steps: int = 2) -> None:
    """Wait until it has made so many steps."""

    def is_under_way() -> bool:
        assert each.process.poll() is None, each.output()
        return each.steps() >= steps

    wait_until(is_under_way, 90.0, f"step {steps}")
