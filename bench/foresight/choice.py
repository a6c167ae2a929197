"""Whether `--gpus auto` picks the fastest of eight placements of each of ten graphs, on two cores.

    python -m bench.foresight --choice --keep FOLDER --json OUT         # most of an hour on an idle machine
    python -m bench.foresight --choice --keep FOLDER --graphs "small+slow scorer"

Every placement that auto looks at (replicas and ranks of the generator, ranks of the trainer) is run for real, and
foreseen with the constants of the two runs that `--own` calibrates with, of two with ranks and of two with threads.
Graphs are as those of `--own`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.end_to_end.cases import SCORER_S
from bench.foresight.own import CALIBRATE, CUT, THREADED, Trial, build, policy, run_apart, run_one
from bench.report import Report

CORES = 2
TIE = 0.02
"""Of a step: two placements that differ by less are as fast as each other; the same run, made twice, differs so."""
GRAPHS = (
    Trial(name="small", steps=60),
    Trial(name="small, synchronous", max_staleness=0, steps=40),
    Trial(name="groups of 16", group_size=16, steps=40),
    Trial(name="slow scorer", slow=True, steps=40),
    Trial(name="slow scorer, staleness 1", slow=True, max_staleness=1, steps=30),
    Trial(name="large", policy="large", steps=40),
    Trial(name="large, synchronous", policy="large", max_staleness=0, steps=25),
    Trial(name="tail", policy="tail", steps=40),
    Trial(name="tail, synchronous", policy="tail", max_staleness=0, steps=20),
    Trial(name="tail, groups of 4", policy="tail", max_staleness=8, group_size=4, steps=50),
)


def choice(path: Path | None, policies: Path, kept: Path | None, names: Sequence[str]) -> int:
    """Calibrate; of each graph run all placements, and see which one was chosen. names: of graphs; none: all ten."""
    from dataflow import Devices
    from dataflow.foresight.calibration import calibrate
    from dataflow.foresight.choice.search import choose
    from dataflow.foresight.seen import look
    from dataflow.foresight.workload import Workload

    unknown = [name for name in names if name not in {each.name for each in GRAPHS}]
    if unknown:
        raise SystemExit(f"no graph is called {unknown[0]!r}; name some of {', '.join(each.name for each in GRAPHS)}")
    report, console = Report("foresight", path), Console(width=170)
    with tempfile.TemporaryDirectory(prefix="choice-") as temporary:
        folder = kept or Path(temporary)
        graphs = [each for each in GRAPHS if not names or each.name in names]
        for trial in (*CALIBRATE, *CUT, *THREADED, *graphs):
            policy(trial.policy, policies)
        seen = {trial.name: look(run_one(trial, policies, folder)) for trial in (*CALIBRATE, *CUT, *THREADED)}
        constants = calibrate(list(seen.values()))
        texts = {trial.texts: (seen[trial.name].prompt_tokens, seen[trial.name].lengths) for trial in CALIBRATE}
        picked, winners, worst = 0, set(), 0.0
        for trial in graphs:
            runs = {asked: look(run) for asked, run in _run_all(trial, policies, folder).items()}
            first = next(iter(runs.values()))
            prompt, lengths = texts.setdefault(trial.texts, (first.prompt_tokens, first.lengths))
            found = choose(
                build(trial, policies), Devices(cpus=CORES), constants=constants, steps=trial.steps,
                workload=Workload(
                    prompt_tokens=prompt, seen=lengths, row_s={"reward": SCORER_S} if trial.slow else {}
                ),
            )  # fmt: skip
            foreseen = {way.asked: way.foreseen.step_s for way in found.ways}
            best = min(runs, key=lambda asked: runs[asked].step_s)
            slower = runs[found.ways[0].asked].step_s / runs[best].step_s - 1
            for asked, run in runs.items():
                report.add(
                    case=trial.name, system=asked, step_ms=1e3 * run.step_s, foreseen_ms=1e3 * foreseen[asked],
                    off=foreseen[asked] / run.step_s - 1, chosen=asked == found.ways[0].asked, fastest=asked == best,
                )  # fmt: skip
            picked, worst = picked + (slower <= TIE), max(worst, slower)
            winners.add(best)
    report.show(console)
    console.print(
        f"the fastest (or one within {TIE:.0%} of it) is picked in {picked} of {len(graphs)}, at worst {worst:.1%} "
        f"slower; {len(winners)} different winners", highlight=False,
    )  # fmt: skip
    return 0


def _run_all(trial: Trial, policies: Path, folder: Path) -> dict[str, Path]:
    """Run folders, by how one asks for the placement."""
    from dataflow import Devices
    from dataflow.foresight.choice.candidates import candidates

    made, devices, found = build(trial, policies), Devices(cpus=CORES), {}
    for number, candidate in enumerate(candidates(made, devices)):
        runs = folder / f"choice-{trial.name}-{number}".replace(" ", "-").replace(",", "")
        told = [trial.name, str(number), str(policies.absolute()), str(runs)]
        found[candidate.asked(made, devices)] = run_apart("bench.foresight.choice", told, runs)
    return found


def main(arguments: Sequence[str]) -> None:
    """The run that `_run_all` starts."""
    from dataflow import Devices, run
    from dataflow.foresight.choice.candidates import candidates

    name, number, policies, runs = arguments
    trial = next(each for each in GRAPHS if each.name == name)
    made = build(trial, Path(policies))
    candidate = candidates(made, Devices(cpus=CORES))[int(number)]
    run(
        candidate.placed(made), steps=trial.steps, replicas=candidate.replicas, ranks=candidate.ranks, runs=runs,
        quiet=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
