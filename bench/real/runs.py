"""Runs that have a process each, are made once, and stand in one file with the conditions that they
were made under.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.nemesis import everyone
from bench.end_to_end.__main__ import environment
from bench.own_process import figures_of
from bench.report import Figure, Report
from dataflow import Graph, run
from dataflow.folder.run_folder import RunFolder
from dataflow.runner import Result

RUN_TIMEOUT_S = 3600.0
MIB = 2**20
Line = dict[str, Any]


def run_to_end(graph: Graph, seed: int, runs: str) -> tuple[Result, Path]:
    """A run in this process and its workers, and the folder of its last weights. RuntimeError: it
    lost something.
    """
    result = run(graph, seed=seed, runs=runs, quiet=True)
    if not result.verdict.clean:
        raise RuntimeError(
            f"the ledger of the run does not hold: {result.verdict.line}; see dataflow verify"
        )
    checkpoints = RunFolder.open(result.folder).checkpoints
    return result, checkpoints.folder(max(checkpoints.steps()))


def made_once(
    options: argparse.Namespace,
    case: str,
    runs: Sequence[tuple[str, int]],
    *,
    flags: Sequence[str],
    about: Mapping[str, Figure],
    describe: Callable[[Line], str],
) -> list[Line]:
    """A line for each system and seed: those that the JSON file has, the others measured now, one
    after the other.

    flags: the command line, which each run gets as well. about: the conditions, which stand in each
    line. Errors: SystemExit where the file has other runs.
    """
    setting = setting_of(options)
    lines = finished(options.json, case, setting)
    report = Report("real", options.json)
    for line in lines:
        report.add(**line)
    finished_runs = {(line["system"], line["seed"]) for line in lines}
    for system, seed in runs:
        if (system, seed) in finished_runs:
            print(f"{system} with seed {seed}: stands in {options.json}", flush=True)
            continue
        memory = PeakMemory()
        figures = figures_of(
            "bench.real",
            [case, system, str(seed)],
            flags,
            timeout_s=RUN_TIMEOUT_S,
            environment=environment(system, options.threads),
            watch=memory.look,
        )
        line = {
            "case": case,
            "system": system,
            "seed": seed,
            "setting": setting,
            "peak_mib": memory.most / MIB,
        }
        line |= {**figures, **about}
        report.add(**line)
        lines.append(line)
        why = figures.get("failed") or figures.get("skipped")
        print(f"{system} with seed {seed}: {why or describe(line)}", flush=True)
    return lines


def chosen(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of a part's runs that --only asks for. Errors: SystemExit for a name that is none of
    them.
    """
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        raise SystemExit(
            f"--only {unknown[0]} is no run of this part; give some of {', '.join(names)}"
        )
    return [name for name in names if name in (options.only or names)]


def setting_of(options: argparse.Namespace) -> str:
    """The task and its size in words: what runs have to have in common to stand in one table."""
    policy = Path(options.policy).name or options.policy
    return (
        f"{options.task}, {policy}, {options.steps} steps of {options.prompts_per_step} x"
        f" {options.group_size}, lr {options.lr:g}, {options.dtype}, {options.weights}"
    )


def finished(path: Path | None, case: str, setting: str) -> list[Line]:
    """The lines of runs that did not fail, as `Report.add` takes them. Errors: SystemExit where
    there are others.
    """
    if path is None or not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    other_cases = {(line["case"], line.get("setting", "")) for line in lines} - {(case, setting)}
    if other_cases:
        other_case = ", ".join(min(other_cases))
        raise SystemExit(
            f"{path} holds runs of {other_case}, but these are {case}, {setting}; give another"
            " --json"
            " FILE"
        )
    return [
        {key: value for key, value in line.items() if key != "bench"}
        for line in lines
        if "failed" not in line
    ]


class PeakMemory:
    """The most that a process and all that it started hold together: pages that several map count
    once.
    """

    def __init__(self) -> None:
        self.most = 0
        """Bytes."""

    def look(self, pid: int) -> None:
        """Read all of them once."""
        total = 0
        for process in everyone(pid):
            try:
                total += process.memory_full_info().pss
            except (psutil.Error, OSError):
                continue
        self.most = max(self.most, total)
