"""Whether `--gpus auto` picks the fastest of eight placements of each of ten graphs, on two cores.

    python -m bench.foresight --choice --keep FOLDER --json OUT     # three rounds, 45 minutes
    python -m bench.foresight --choice --keep FOLDER --seconds 200  # again until none is missing
    python -m bench.foresight --choice --keep FOLDER --graphs "small+slow scorer"

Every placement that auto looks at (replicas and ranks of the generator, ranks of the trainer) is
run for real, and foreseen with the constants of the two runs that `--own` calibrates with, of two
others, of two with ranks and of two with threads.
Graphs are as those of `--own`. Rounds are interleaved: all placements of all graphs once, then
those again that may be the fastest. The noise is that of runs made twice, pooled over all; a
placement ties with the fastest where the difference of their means is within what this noise makes
in 95 of 100 cases.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench.end_to_end.cases import SCORER_S
from bench.foresight.own import CALIBRATE, CUT, MORE, Trial, build, planned, policy
from bench.foresight.rounds import Measured, Noise, Planned, Rounds, contenders
from bench.report import Report

if TYPE_CHECKING:
    from dataflow.foresight.lengths import Lengths
    from dataflow.foresight.rates import Constants
    from dataflow.foresight.seen import SeenRun

CORES = 2
GRAPHS = (
    Trial(name="small", steps=32),
    Trial(name="small, synchronous", max_staleness=0, steps=24),
    Trial(name="groups of 16", group_size=16, steps=28),
    Trial(name="slow scorer", slow=True, prompts_per_step=16, steps=32),
    Trial(
        name="slow scorer, staleness 1", slow=True, max_staleness=1, prompts_per_step=16, steps=24
    ),
    Trial(name="large", policy="large", prompts_per_step=16, steps=28),
    Trial(
        name="large, synchronous", policy="large", max_staleness=0, prompts_per_step=24, steps=16
    ),
    Trial(name="tail", policy="tail", prompts_per_step=16, steps=32),
    Trial(name="tail, synchronous", policy="tail", max_staleness=0, prompts_per_step=16, steps=18),
    Trial(name="tail, groups of 4", policy="tail", max_staleness=8, group_size=4, steps=46),
)


def choice(
    path: Path | None,
    policies: Path,
    keep: Path | None,
    names: Sequence[str],
    seconds: float | None,
    rounds: int,
) -> int:
    """Calibrate; of each graph run all placements, and see which one was chosen. names: of graphs;
    none: all ten. seconds: after which no run is begun.
    """
    from dataflow.foresight.calibration import calibrate, described
    from dataflow.foresight.seen import look

    unknown = [name for name in names if name not in {graph.name for graph in GRAPHS}]
    if unknown:
        raise SystemExit(
            f"no graph is called {unknown[0]!r}; name some of"
            f" {', '.join(graph.name for graph in GRAPHS)}"
        )
    report, console = Report("foresight", path), Console(width=170)
    with tempfile.TemporaryDirectory(prefix="choice-") as temporary:
        graphs = [graph for graph in GRAPHS if not names or graph.name in names]
        calibrating = (*CALIBRATE, *MORE, *CUT)
        for trial in (*calibrating, *graphs):
            policy(trial.policy, policies)
        making = Rounds(keep or Path(temporary), seconds)
        folders = making.run(planned(trial, policies) for trial in calibrating)
        runs = _runs(graphs, policies, making, rounds)
        if making.missing:
            console.print(
                f"{making.missing} runs or more are missing; call again with the same --keep"
            )
        if len(folders) < len(calibrating):
            return 1
        looks = {trial.name: look(folders[trial.name][0]) for trial in calibrating}
        constants = calibrate(list(looks.values()))
        console.print(described(constants), highlight=False, markup=False)
        texts = {
            trial.texts: (looks[trial.name].prompt_tokens, looks[trial.name].lengths)
            for trial in CALIBRATE
        }
        _judge(
            report,
            console,
            [graph for graph in graphs if graph.name in runs],
            runs,
            policies,
            constants,
            texts,
        )
    return 0


def _runs(
    graphs: Sequence[Trial], policies: Path, making: Rounds, rounds: int
) -> dict[str, dict[str, list[SeenRun]]]:
    """Of each graph its runs, by how one asks for the placement: in the first round one placement
    of each graph after the other, in later ones those that may be the fastest.
    """
    from dataflow.foresight.seen import look

    ways = {trial.name: placements(trial, policies) for trial in graphs}
    by_graph: dict[str, dict[str, list[SeenRun]]] = {trial.name: {} for trial in graphs}
    for number in range(rounds):
        near = {
            name: (
                contenders(
                    {placement: Measured.of(some) for placement, some in by_placement.items()}
                )
                if number
                else list(of)
            )
            for name, of in ways.items()
            if (by_placement := by_graph[name]) or not number
        }
        for at in range(max(map(len, near.values()), default=0)):
            for name, placement in (
                (name, some[at]) for name, some in near.items() if at < len(some)
            ):
                planned = ways[name][placement](number)
                for path in making.run([planned]).get(planned.name, ()):
                    by_graph[name].setdefault(placement, []).append(look(path))
    return {name: by_placement for name, by_placement in by_graph.items() if by_placement}


def placements(trial: Trial, policies: Path) -> dict[str, Callable[[int], Planned]]:
    """Runs of one round, by how one asks for the placement."""
    from dataflow import Devices
    from dataflow.foresight.choice.candidates import Candidate, candidates

    graph, devices = build(trial, policies), Devices(cpus=CORES)

    def make(candidate: Candidate, runs: Path) -> None:
        from dataflow import run

        run(
            candidate.placed(build(trial, policies)),
            steps=trial.steps,
            replicas=candidate.replicas,
            ranks=candidate.ranks,
            runs=runs,
            quiet=True,
        )

    def planned_of(candidate: Candidate, at: int, number: int) -> Planned:
        return Planned(
            name=f"choice {trial.name} {at}", round=number, make=partial(make, candidate)
        )

    return {
        candidate.flags(graph, devices): partial(planned_of, candidate, at)
        for at, candidate in enumerate(candidates(graph, devices))
    }


def _judge(
    report: Report,
    console: Console,
    graphs: Sequence[Trial],
    runs: Mapping[str, Mapping[str, Sequence[SeenRun]]],
    policies: Path,
    constants: Constants,
    texts: dict[tuple[str, int], tuple[float, Lengths]],
) -> None:
    """What auto picks of each, beside what was measured."""
    from dataflow import Devices
    from dataflow.foresight.choice.search import choose
    from dataflow.foresight.workload import Workload

    measured = {
        name: {placement: Measured.of(some) for placement, some in of.items()}
        for name, of in runs.items()
    }
    every = [way for of in measured.values() for way in of.values()]
    noise = Noise.of(every) if any(len(way.steps_s) > 1 for way in every) else None
    picked, judged, many, winners, worst = 0, 0, 0, set[str](), 0.0
    for trial in graphs:
        ways, first = measured[trial.name], next(iter(runs[trial.name].values()))[0]
        prompt, lengths = texts.setdefault(trial.texts, (first.prompt_tokens, first.lengths))
        chosen_ways = choose(
            build(trial, policies),
            Devices(cpus=CORES),
            constants=constants,
            steps=trial.steps,
            workload=Workload(
                prompt_tokens=prompt,
                run_lengths=lengths,
                row_s={"reward": SCORER_S} if trial.slow else {},
            ),
        )
        foreseen = {way.flags: way.foreseen.step_s for way in chosen_ways.ways}
        chosen, best = (
            chosen_ways.ways[0].flags,
            min(ways, key=lambda placement: ways[placement].step_s),
        )
        if chosen not in ways:
            console.print(
                f"{trial.name}: what was picked, {chosen}, has not been run", highlight=False
            )
            continue
        judged, many = judged + 1, many + len(ways)
        for placement, measured_way in ways.items():
            report.add(
                case=trial.name,
                system=placement,
                step_ms=1e3 * measured_way.step_s,
                rounds=len(measured_way.steps_s),
                foreseen_ms=1e3 * foreseen[placement],
                off=foreseen[placement] / measured_way.step_s - 1,
                over_fastest=measured_way.step_s / ways[best].step_s - 1,
                chosen=placement == chosen,
                fastest=placement == best,
            )
        slower = ways[chosen].step_s / ways[best].step_s - 1
        tie = noise.tie(ways[chosen], ways[best]) if noise else 0.0
        picked, worst = picked + (slower <= tie), max(worst, slower)
        winners.add(best)
        console.print(
            f"{trial.name}: picked one {slower:.1%} slower than the fastest; a tie is up to"
            f" {tie:.1%}",
            highlight=False,
        )
    report.show(console)
    noise_text = (
        f"{noise.deviation:.1%} from round to round ({noise.freedom} degrees of freedom)"
        if noise
        else "not known"
    )
    console.print(
        f"the fastest (or one that ties) is picked in {picked} of {judged}; {many} placements were"
        f" run; at worst {worst:.1%} slower; {len(winners)} different winners; noise {noise_text}",
        highlight=False,
    )
