"""The first day on eight GPUs, as one command: every way that needs several, each with the bounds
that were written down before it ran.

    python -m bench.cluster --bounds          what will run and what it has to reach; needs no GPU
    python -m bench.cluster --json FILE       40 minutes on eight GPUs of one host
    python -m bench.cluster --rehearse        the same ways over gloo on a CPU, small, in minutes
    python -m bench.cluster --on 7b 70b 405b  Qwen2.5-7B on 8 H100, Llama-3.1-70B on 64, -405B on
                                              1,024, on paper (`bench.cluster.paper`); needs no GPU

Stages: ranks, the tests marked gpu; weights-*, a 7B's weights from four trainer ranks to four
generators while both compute; grpo-7b, 200 steps of asynchronous GRPO, and the same with vLLM;
tp4-fsdp2xtp2, a generator of four tensor-parallel ranks and a trainer of two by two; moe-30b-a3b,
experts. Models have random weights and public sizes, made once in --work; prompts are words.

A line per bound: holds, misses, not measured. vLLM's stage is skipped where there is none. The exit
status is 1 when a stage failed or a bound
is missed, 2 where there are too few GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.cluster.paper import TARGETS, show
from bench.cluster.run import PeakOfGpus, foreseen, policy_of, run_stage
from bench.cluster.stages import GIB, STAGES, Stage, rehearsed, verdicts
from bench.gpu.systems import config_of
from bench.own_process import figures_of
from bench.report import Figure, Report

RANKS = "ranks"
RANKS_MINUTES = 6.0
"""Of the tests marked gpu."""
DEVICES = "8xH100"
"""What bounds are foreseen for."""
WIDE = 160
"""Characters of a table."""
ROOT = Path(__file__).parents[2]
RANK_TESTS = {
    "cuda": ["-m", "gpu", "tests"],
    "cpu": ["-m", "not gpu and not slow", "tests/operators/engine/parallel/test_two_ranks.py"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the day, its rehearsal, or show the bounds."""
    options = parser().parse_args(arguments)
    if options.child is not None:
        return child(*options.child)
    console = Console(width=WIDE)
    if options.on:
        return show(options.on, console, Report("cluster on paper", options.json))
    stages = [stage for stage in STAGES if stage.name in (options.only or names())]
    if options.bounds:
        return show_bounds(stages, options.devices, console)
    device = "cpu" if options.rehearse else "cuda"
    if device == "cuda" and (why := too_few(max((stage.gpus for stage in stages), default=2))):
        print(why, file=sys.stderr)
        return 2
    if options.rehearse:
        stages = [rehearsed(stage) for stage in stages]
    else:
        show_bounds(stages, options.devices, console)
    report, failed = Report("cluster", options.json), False
    with tempfile.TemporaryDirectory(prefix="dataflow-cluster-") as folder:
        work = options.work or Path(folder)
        if RANKS in (options.only or names()):
            failed |= not run_ranks(device, report)
        for stage in stages:
            failed |= not run_one(stage, device, work, report)
    report.show(console)
    return int(failed)


def names() -> list[str]:
    """Of all stages, in order."""
    return [RANKS, *(stage.name for stage in STAGES)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--bounds", action="store_true", help="show the bounds and end")
    parser.add_argument("--rehearse", action="store_true", help="small, over gloo, on the CPU")
    parser.add_argument("--on", nargs="+", choices=[*TARGETS], help="on paper, and nothing else")
    parser.add_argument("--only", action="append", choices=names(), help="may be given again")
    parser.add_argument(
        "--devices", default=DEVICES, help=f"that bounds are foreseen for ({DEVICES})"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for models, kept; they are made anew where left out"
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return parser


def too_few(gpus: int) -> str:
    """Why the day cannot begin on this machine; empty: it can."""
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here >= gpus:
        return ""
    return (
        f"bench.cluster needs {gpus} GPUs, and torch {torch.__version__} finds {here}; try the ways"
        " with --rehearse, read the bounds with --bounds, or choose stages with --only"
    )


def show_bounds(stages: Sequence[Stage], devices: str, console: Console) -> int:
    """What each stage has to reach, and what is foreseen of it; 1 where the plan refuses one."""
    report, refused = Report("cluster"), False
    with tempfile.TemporaryDirectory(prefix="dataflow-cluster-") as folder:
        for stage in stages:
            policy = Path(folder) / stage.name
            config_of(stage.shape).save_pretrained(policy)
            figures = foreseen(stage, str(policy), devices)
            refused |= "failed" in figures
            report.add(case=f"bounds on {devices}", system=stage.name, gpus=stage.gpus, **figures)
    report.show(console)
    for stage in stages:
        for bound in stage.bounds:
            console.print(f"{stage.name}: {bound}", markup=False, highlight=False)
    return int(refused)


def run_ranks(device: str, report: Report) -> bool:
    """The tests of several ranks; whether they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *RANK_TESTS[device]]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=60 * RANKS_MINUTES,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        last, passed = (done.stdout.strip().splitlines() or [""])[-1], done.returncode == 0
    except subprocess.TimeoutExpired:
        last, passed = f"did not end within {RANKS_MINUTES:g} minutes", False
    if not passed:
        report.add(case=RANKS, system="pytest", failed=last)
    else:
        report.add(case=RANKS, system="pytest", verdict="holds", tests=last)
    print(f"{RANKS}: {last}", flush=True)
    return passed


def run_one(stage: Stage, device: str, work: Path, report: Report) -> bool:
    """A stage in a process of its own, and its verdicts; whether it ran and no bound is missed."""
    peak = PeakOfGpus()
    figures: dict[str, Figure] = figures_of(
        "bench.cluster",
        [stage.name, device, str(work)],
        timeout_s=60 * stage.minutes,
        watch=peak.look if device == "cuda" else None,
    )
    if peak.most:
        figures["peak_gib"] = peak.most / GIB
    for why in ("failed", "skipped"):
        if why in figures:
            report.add(case=stage.name, system="run", **figures)
            print(f"{stage.name}: {why}: {figures[why]}", flush=True)
            return why == "skipped"
    report.add(case=f"{stage.name}, figures", system=device, **figures)
    outcomes = verdicts(stage, figures)
    for bound, verdict in outcomes:
        measured = figures.get(bound.figure)
        report.add(case=stage.name, system=str(bound), measured=measured, verdict=verdict)
        print(f"{stage.name}: {bound}: {measured}: {verdict}", flush=True)
    return all(verdict != "misses" for _, verdict in outcomes)


def child(name: str, device: str, work: str, out: str) -> int:
    """The run of one stage, which writes its figures."""
    (stage,) = [stage for stage in STAGES if stage.name == name]
    stage = rehearsed(stage) if device == "cpu" else stage
    Path(work).mkdir(parents=True, exist_ok=True)
    policy = policy_of(stage.shape, Path(work) / stage.shape.digest)
    with tempfile.TemporaryDirectory(prefix="dataflow-cluster-run-") as folder:
        Path(out).write_text(json.dumps(run_stage(stage, policy, device, Path(folder))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
