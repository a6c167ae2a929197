"""The most memory that each process of a run holds by itself, beside its share of the model.

    python -m bench.memory --json FILE
    python -m bench.memory --millions 100 400 --ranks 1+1 2+1 4+2

A model of random weights in float32, in a temporary folder; trainer ranks + generator ranks (tensor
parallel); 4 steps with a checkpoint after every other one, then 2 more from the last checkpoint.
Memory is read from outside, 50 times a second: the kernel's own high-water mark of each process
(VmHWM, set back after each reading), which counts shared segments and mapped files in full for each
process that maps them.

In units of the whole model (its weights once), what a process needs:
share           a trainer's rank 4 / ranks (weights, gradients, two moments), a generator's 2 /
                ranks (the current version and the arriving one)
plane           of a trainer's rank: two versions that can be sent, in segments that one rank shares
                with its readers; each of several maps its part of two of its readers' versions, to
                write them there
packed          of a generator of one rank: the copy that its kernels read
layer           of a trainer's rank among several: a layer's weights and gradients, and as much that
                it exchanges
activations     of a trainer's rank: what autograd keeps of its part of the rollouts, measured on
                one rank
needed          all of these
and what it held at the most, beside `process_mib`:
start, step, checkpoint, resume    start: until the first step is recorded
own, shared, file    at the moment of the most, `process_mib` included: its own memory, shared
                     segments, mapped files
process_mib     what the same process held at the most in the same run of a model of next to
                nothing: Python, torch and whatever else is imported, sockets, the generator's cache

A phase is told from the run's folder, a few hundredths of a second late. Run it on a machine with
memory to spare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.chaos.nemesis import workers
from bench.chaos.program import Failed, Program
from bench.long_run import last_step
from bench.memory.program import SIZES
from bench.report import Figure, Report

MIB = 1 << 20
SAMPLE_S = 0.02
RUN_S = 1200.0
NEEDS = ("share", "plane", "packed", "layer", "activations", "needed")
PHASES = ("start", "step", "checkpoint", "resume")


@dataclass
class Held:
    """What one process held, in bytes."""

    most: dict[str, int] = field(default_factory=dict)
    """By phase."""
    parts: dict[str, int] = field(default_factory=dict)
    """At the most of all: own, shared, file."""

    def at(self, phase: str) -> int:
        """The most in a phase; one that was too short to be seen had nothing of its own."""
        return self.most.get(phase, self.most.get("step", max(self.most.values())))

    def see(self, phase: str, most: int, parts: dict[str, int]) -> None:
        """Take a reading."""
        if most > max(self.most.values(), default=0):
            self.parts = parts
        self.most[phase] = max(most, self.most.get(phase, 0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--millions", type=int, nargs="+", default=[100], choices=[*SIZES][1:], help="of parameters"
    )
    parser.add_argument(
        "--ranks", nargs="+", default=["1+1", "2+1", "4+2"], help="trainer's + generator's"
    )
    options = parser.parse_args(arguments)
    report = Report("memory", options.json)
    for ranks in options.ranks:
        trainer, generator = map(int, ranks.split("+"))
        try:
            _, bare = watch(0, trainer, generator)
            for millions in options.millions:
                facts, by_process = watch(millions, trainer, generator)
                for row in lines(facts, by_process, bare, trainer, generator):
                    report.add(case=f"{millions} M, {ranks}", **row)
        except Failed as failure:
            report.add(case=ranks, system="failed", skipped=str(failure)[-300:])
    report.show(Console(width=max(190, Console().width)))


def watch(millions: int, trainer: int, generator: int) -> tuple[dict[str, int], dict[str, Held]]:
    """A run and its resume: `program.facts` of its model, and what its processes held. Errors:
    Failed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        flags = [
            str(folder),
            f"--millions={millions}",
            f"--trainer={trainer}",
            f"--generator={generator}",
        ]
        command = [sys.executable, "-m", "bench.memory.program"]
        for part in ("write", "facts"):
            Program([*command, part, *flags], folder / "said").wait(RUN_S)
        return json.loads((folder / "facts.json").read_text("utf-8")), held_in(
            folder, command, flags
        )


def held_in(folder: Path, command: list[str], flags: list[str]) -> dict[str, Held]:
    """By process and run, as `trainer-0 rank 1@resume`."""
    by_process: dict[str, Held] = {}
    for part in ("run", "resume"):
        program = Program([*command, part, *flags], folder / "said")
        goes_on, deadline = part == "resume", time.monotonic() + RUN_S
        first = last_step(folder) + 1
        try:
            while not program.is_over and time.monotonic() < deadline:
                look(program.pid, phase_of(folder, first, goes_on), by_process, part)
                time.sleep(SAMPLE_S)
            program.wait(1.0)
        finally:
            program.kill()
    return by_process


def phase_of(folder: Path, first: int, goes_on: bool) -> str:
    """Where the run is: until it has made step `first`, it starts."""
    if goes_on:
        return "resume"
    if last_step(folder) < first:
        return "start"
    partial = any((folder / "latest" / "checkpoints").glob(".step-*.partial"))
    return "checkpoint" if partial else "step"


def look(scheduler: int, phase: str, by_process: dict[str, Held], run: str) -> None:
    """Read every rank once."""
    for name, process in workers(scheduler).items():
        see(f"{name}@{run}", process.pid, phase, by_process)
        with contextlib.suppress(psutil.Error):
            for number, rank in enumerate(
                sorted(process.children(), key=lambda rank: rank.pid), start=1
            ):
                see(f"{name} rank {number}@{run}", rank.pid, phase, by_process)


def see(name: str, pid: int, phase: str, by_process: dict[str, Held]) -> None:
    """Read one process, and set its high-water mark back."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        kib = {
            key: int(status[key].split()[0]) for key in ("VmHWM", "RssAnon", "RssFile", "RssShmem")
        }
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except (OSError, KeyError):
        return
    parts = {
        "own": kib["RssAnon"] << 10,
        "shared": kib["RssShmem"] << 10,
        "file": kib["RssFile"] << 10,
    }
    by_process.setdefault(name, Held()).see(phase, kib["VmHWM"] << 10, parts)


def lines(
    facts: dict[str, int],
    by_process: dict[str, Held],
    bare: dict[str, Held],
    trainer: int,
    generator: int,
) -> Iterator[dict[str, Any]]:
    """The figures of each process: its first run, and what it was in the second."""
    model = facts["weights"]
    for name in sorted(
        {name.split("@")[0] for name in by_process if name.startswith(("trainer", "generator"))}
    ):
        if name.startswith("trainer"):
            needs = {
                "share": 4 / trainer,
                "plane": 2 / trainer,
                "layer": 3 * facts["layer"] / model * (trainer > 1),
                "activations": facts["activations"] / model / trainer,
            }
        else:
            needs = {"share": 2 / generator, "packed": float(generator == 1)}
        needs["needed"] = sum(needs.values())
        row: dict[str, Figure] = {"system": name}
        row |= {key: round(needs[key], 2) if key in needs else None for key in NEEDS}
        first, again = by_process.get(f"{name}@run"), by_process.get(f"{name}@resume")
        for phase in PHASES:
            process = again if phase == "resume" else first
            beside = bare.get(f"{name}@{'resume' if phase == 'resume' else 'run'}")
            most = process.most.get(phase) if process is not None else None
            row[phase] = (
                None
                if most is None or beside is None
                else round((most - beside.at(phase)) / model, 2)
            )
        if first is not None:
            row |= {key: round(size / model, 2) for key, size in first.parts.items()}
        if (beside := bare.get(f"{name}@run")) is not None:
            row["process_mib"] = round(beside.at("step") / MIB)
        yield row


if __name__ == "__main__":
    main()
