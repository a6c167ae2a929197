"""What faults cost a run, and whether they break it: workers killed and stopped, scorers that hang
and crash.

    python -m bench.chaos --minutes 10 --prompts train.jsonl --eval test.jsonl --json FILE
    python -m bench.chaos --trainer-kills 50 --json FILE
    python -m bench.chaos --scheduler-kills 5 --prompts train.jsonl --eval test.jsonl --json FILE

The first runs the calculator task (bench.chaos.run) for so many minutes while every --every seconds
SIGKILL or SIGSTOP goes to a process chosen at random: a worker, or one of a scorer's pool, which
counts as one worker; a share of the rollouts makes its scorer hang for the second that it may take,
or its process crash: at 2,500 rollouts per second one call every 20 s, and one every 2 s. Then,
with nobody disturbing it, the same run again, for as many steps as the last evaluation of the first
had seen. `dataflow verify` reads both folders; the exit status is 1 when it does not say clean.

A line for each fault: notice_s, from the signal until the scheduler acted (a stopped worker is let
go on after 1 s); recover_s, from then until it was at work again; replaced_s, until a pool had
another process, or the stopped one went on; regenerated, rollouts whose generation was begun a
second time between this fault and the next (whole groups, counted when the generator marks them in
the ledger). A line for each run: steps; pace_s, the median from a step to the next; useful, the
time that the undisturbed run takes for so many steps, evaluations and checkpoints and all, over the
time that they took, from the first step to the last; finished_again, rollouts that a generator
finished twice; accuracy at the last evaluation of the disturbed run, first before the first step.

The second kills small runs of a tiny policy at random moments, five each: `tree`, the scheduler and
all below it, and `dataflow resume` goes on; `worker`, the trainer's process, which the scheduler
starts again. Half of them are synchronous, and their losses are compared with those of a run that
nobody kills. at_stake: groups that were finished and not trained at a kill, all kills together;
again, dropped, kept: what became of them.

The third kills the scheduler of a run that has a standby: without_s, the workers' time without a
scheduler; taken_up_s, what the next one took to begin; steps_before and steps_after, those of the 5
s before a kill and after it; dip, what share fewer they are; others_restarted, workers that had to
be started again. Then that of a run without one: gone_s, until no process was left; steps_alone,
those that were made meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.chaos.figures import (
    Ended,
    accuracies,
    drawn,
    faults_of,
    pace,
    repeated,
    rows_of_faults,
    useful,
)
from bench.chaos.kills import kill_trainers
from bench.chaos.nemesis import Blow, Nemesis
from bench.chaos.program import END_S, START_S, Failed, judged, left_behind, started, steps_made
from bench.chaos.scheduler import kill_schedulers
from bench.report import Figure, Report
from dataflow.folder.run_folder import RunFolder

ENDLESS = "1000000"
QUICK_EVERY_S, QUICK_MINUTES = 4.0, 0.5
WIDTH = 150
"""Columns of the table, where the output is no terminal that says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when a run is not clean, or did not come to its end."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.minutes, options.every = (
            min(options.minutes, QUICK_MINUTES),
            min(options.every, QUICK_EVERY_S),
        )
    report = Report("chaos", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        try:
            if options.scheduler_kills:
                clean = kill_schedulers(options, runs.absolute(), report, _flags(options))
            else:
                act = kill_trainers if options.trainer_kills else disturb
                clean = act(options, runs.absolute(), report)
        except Failed as failure:
            print(failure, flush=True)
            clean = False
    report.show(Console(width=max(WIDTH, Console().width)))
    return int(not clean)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of the disturbed run (default 10)"
    )
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds from a fault to the next (default 20)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the faults, and of the runs (default 0)"
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--prompts", default="", help="GSM8K's train.jsonl; made-up steps without it"
    )
    parser.add_argument("--eval", default="", help="GSM8K's test.jsonl")
    parser.add_argument(
        "--policies", type=Path, default=Path("policies"), help="folder for the policy"
    )
    parser.add_argument(
        "--runs", type=Path, help="folder that keeps the runs; without it they are thrown away"
    )
    parser.add_argument(
        "--hang", type=float, default=1 / 50_000, help="share of rollouts that hang their scorer"
    )
    parser.add_argument(
        "--crash", type=float, default=1 / 5_000, help="share of rollouts that end its process"
    )
    parser.add_argument(
        "--eval-every", type=int, default=50, help="steps between evaluations (default 50)"
    )
    parser.add_argument(
        "--trainer-kills", type=int, default=0, help="kill the trainer so often, of small runs"
    )
    parser.add_argument(
        "--scheduler-kills", type=int, default=0, help="kill the scheduler so often, of one run"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny policy, half a minute: to try the code"
    )
    return parser


def disturb(options: argparse.Namespace, runs: Path, report: Report) -> bool:
    """The run under faults, then the one without; whether both are clean."""
    flags = _flags(options)
    faulty = [*flags, "--hang", str(options.hang), "--crash", str(options.crash)]
    blows = _under_faults(runs / "chaos", faulty, options)
    evaluated = max(accuracies(_metrics(runs / "chaos")), default=0)
    _undisturbed(runs / "undisturbed", flags, evaluated or steps_made(runs / "chaos"))
    group_size = 4 if options.quick else 8
    folder = runs / "chaos" / "latest"
    for row in rows_of_faults(blows, faults_of(folder), drawn(folder), group_size):
        report.add(case="faults", system=str(row.pop("worker")), **row)
    undisturbed = Ended.read(runs / "undisturbed" / "latest").step_times
    clean = [
        _outcome(runs, name, undisturbed, evaluated, group_size, report)
        for name in ("chaos", "undisturbed")
    ]
    return all(clean)


def _flags(options: argparse.Namespace) -> list[str]:
    tiny = ["--tiny"] if options.quick else []
    policy = options.policies.absolute() / ("calculator-tiny" if options.quick else "calculator")
    return [
        "--prompts",
        options.prompts,
        "--eval",
        options.eval,
        "--policy",
        str(policy),
        "--seed",
        str(options.seed),
        "--eval-every",
        str(options.eval_every),
        *tiny,
    ]


def _under_faults(runs: Path, flags: Sequence[str], options: argparse.Namespace) -> list[Blow]:
    """A run of so many minutes; what was done to it. It ends once its last fault is mended."""
    program = started(runs, *flags, "--steps", ENDLESS)
    try:
        program.until(lambda: steps_made(runs) > 0, START_S, "the first step")
        nemesis = Nemesis(program.pid, options.seed, options.every)
        nemesis.start()
        over = time.monotonic() + 60 * options.minutes
        try:
            program.until(
                lambda: time.monotonic() > over, 60 * options.minutes + END_S, "the end of its time"
            )
        finally:
            nemesis.stop()
        struck = sum(not blow.is_within for blow in nemesis.blows)
        before = steps_made(runs)
        program.until(lambda: steps_made(runs) > before + 2, END_S, "a step after the last fault")
        _settle(program, runs, struck)
        program.end()
    finally:
        program.kill()
    return nemesis.blows


def _settle(program: Any, runs: Path, struck: int) -> None:
    """Let the last faults be noticed and mended; two blows to one worker may be one fault."""
    deadline = time.monotonic() + 60
    program.until(
        lambda: len(faults_of(runs / "latest")) >= struck or time.monotonic() > deadline,
        END_S,
        "the last recovery",
    )


def _undisturbed(runs: Path, flags: Sequence[str], steps: int) -> None:
    program = started(runs, *flags, "--steps", str(steps))
    try:
        program.wait(START_S + 3600)
    finally:
        program.kill()


def _outcome(
    runs: Path,
    name: str,
    undisturbed: Sequence[float],
    evaluated: int,
    group_size: int,
    report: Report,
) -> bool:
    folder = runs / name / "latest"
    times = Ended.read(folder).step_times
    clean, summary = judged(runs / name)
    by_step = accuracies(_metrics(runs / name))
    book = drawn(folder)
    figures: dict[str, Figure] = {
        "clean": "yes" if clean else "NO",
        "faults": len(faults_of(folder)),
        "steps": len(times),
        "pace_s": pace(times),
        "wall_s": times[-1] - times[0] if times else None,
        "useful": useful(times, undisturbed),
        "begun_again": group_size * len(repeated(book, "begun", "prompts")),
        "finished_again": group_size * len(repeated(book, "finished", "prompts")),
        "first": by_step.get(0),
        "accuracy": by_step.get(evaluated),
        "at": evaluated,
        "left_behind": len(left_behind(runs / name)),
    }
    report.add(case="runs", system=name, **figures)
    print(f"{name}: {summary}", flush=True)
    return clean


def _metrics(runs: Path) -> list[dict[str, Any]]:
    return RunFolder.open(runs / "latest").read_metrics()


if __name__ == "__main__":
    raise SystemExit(main())
