"""The most memory that each process of a run holds by itself, beside its share of the model.

    python -m bench.memory --json FILE
    python -m bench.memory --millions 100 400 --ranks 1+1 2+1 4+2

A model of random weights in float32, in a temporary folder; trainer ranks + generator ranks (tensor parallel); 4 steps
with a checkpoint after every other one, then 2 more from the last checkpoint. Memory is read from outside, 50 times a
second: the kernel's own high-water mark of each process (VmHWM, set back after each reading), which counts shared
segments and mapped files in full for each process that maps them.

In units of the whole model (its weights once):
share           what a process needs: a trainer's rank 4 / ranks (weights, gradients, two moments), a generator's 2 /
                ranks (the current version and the arriving one)
plane           two versions of the whole model, which one trainer rank keeps in shared memory for its readers: part of
                what it holds
packed          of a generator: the copy that its kernels read
start, step, checkpoint, resume    the most in each phase, less `before`; start: until the first step is recorded
own, shared, file    at the moment of the most: memory of its own, shared segments, mapped files
before_mib      what it held when it was seen first, before it loaded anything

A phase is told from the run's folder, a few hundredths of a second late. Run it on a machine with memory to spare.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
PHASES = ("start", "step", "checkpoint", "resume")


@dataclass
class Held:
    """What one process held."""

    before: int
    """Bytes, when it was seen first."""
    most: dict[str, int] = field(default_factory=dict)
    """By phase."""
    parts: dict[str, int] = field(default_factory=dict)
    """At the most of all: own, shared, file."""

    def see(self, phase: str, most: int, parts: dict[str, int]) -> None:
        """Take a reading."""
        if most > max(self.most.values(), default=0):
            self.parts = parts
        self.most[phase] = max(most, self.most.get(phase, 0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--millions", type=int, nargs="+", default=[100], choices=SIZES, help="of parameters")
    parser.add_argument("--ranks", nargs="+", default=["1+1", "2+1", "4+2"], help="trainer's + generator's")
    options = parser.parse_args(arguments)
    report = Report("memory", options.json)
    for millions in options.millions:
        for ranks in options.ranks:
            trainer, generator = map(int, ranks.split("+"))
            with tempfile.TemporaryDirectory() as temporary:
                try:
                    watch(Path(temporary), millions, trainer, generator, report)
                except Failed as failure:
                    report.add(case=f"{millions} M, {ranks}", system="failed", skipped=str(failure)[-300:])
    report.show(Console(width=max(165, Console().width)))


def watch(folder: Path, millions: int, trainer: int, generator: int, report: Report) -> None:
    """One run, and its lines. Errors: Failed."""
    command = [sys.executable, "-m", "bench.memory.program"]
    given = [str(folder), f"--millions={millions}", f"--trainer={trainer}", f"--generator={generator}"]
    Program([*command, "write", *given], folder / "said").wait(RUN_S)
    model = sum(path.stat().st_size for path in (folder / "policy").glob("*.safetensors"))
    held: dict[str, Held] = {}
    for what in ("run", "resume"):
        program = Program([*command, what, *given], folder / "said")
        goes_on, deadline = what == "resume", time.monotonic() + RUN_S
        first = last_step(folder) + 1
        try:
            while not program.is_over and time.monotonic() < deadline:
                look(program.pid, phase_of(folder, first, goes_on), held, what)
                time.sleep(SAMPLE_S)
            program.wait(1.0)
        finally:
            program.kill()
    shares = {"trainer": 4 / trainer, "generator": 2 / generator}
    for name in sorted({name.split("@")[0] for name in held}):
        role = name.split("-")[0]
        if role in shares:
            row = line(name, held, model)
            report.add(
                case=f"{millions} M, {trainer}+{generator}", system=name, share=round(shares[role], 2),
                plane=2.0 if role == "trainer" and trainer == 1 else None,
                packed=(1.0 if generator == 1 else 0.0) if role == "generator" else None, **row,
            )  # fmt: skip


def phase_of(folder: Path, first: int, goes_on: bool) -> str:
    """Where the run is: until it has made step `first`, it starts."""
    if goes_on:
        return "resume"
    if last_step(folder) < first:
        return "start"
    partial = any((folder / "latest" / "checkpoints").glob(".step-*.partial"))
    return "checkpoint" if partial else "step"


def look(scheduler: int, phase: str, held: dict[str, Held], run: str) -> None:
    """Read every rank once."""
    for name, process in workers(scheduler).items():
        see(f"{name}@{run}", process.pid, phase, held)
        with contextlib.suppress(psutil.Error):
            for number, rank in enumerate(sorted(process.children(), key=lambda each: each.pid), start=1):
                see(f"{name} rank {number}@{run}", rank.pid, phase, held)


def see(name: str, pid: int, phase: str, held: dict[str, Held]) -> None:
    """Read one process, and set its high-water mark back."""
    try:
        status = dict(each.split(":", 1) for each in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib = {key: int(status[key].split()[0]) for key in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except (OSError, KeyError):
        return
    parts = {"own": kib["RssAnon"] << 10, "shared": kib["RssShmem"] << 10, "file": kib["RssFile"] << 10}
    held.setdefault(name, Held(kib["VmRSS"] << 10)).see(phase, kib["VmHWM"] << 10, parts)


def line(name: str, held: dict[str, Held], model: int) -> dict[str, Figure]:
    """The figures of a process: its first run, and what it was in the second."""
    first, again = held.get(f"{name}@run"), held.get(f"{name}@resume")
    found: dict[str, Figure] = {}
    for phase in PHASES:
        process = again if phase == "resume" else first
        most = process.most.get(phase) if process is not None else None
        found[phase] = None if most is None or process is None else round((most - process.before) / model, 2)
    if first is not None:
        found |= {key: round(size / model, 2) for key, size in first.parts.items()}
        found["before_mib"] = round(first.before / MIB)
    return found


if __name__ == "__main__":
    main()
