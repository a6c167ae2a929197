"""Our own runs, predicted: two of them calibrate, and others with other bounds, sizes and texts are
foreseen and run.

    python -m bench.foresight --own --json OUT

Every run is of the sorting graph (or of a policy with a heavy tail of lengths) on this machine's
cores. Rewards are drawn at random for each rollout, the learning rate is next to 0, and policies
have learned nothing, so that texts stay what they are, siblings differ, and every group has a
signal: what is predicted is seconds and staleness, not learning. A prediction knows the graph, its
placement, the constants of the two runs, and how long that policy's texts are: the first run that
has them says so.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bench.end_to_end.cases import SCORER_CALLS, SCORER_S, TAIL_TOKENS, make_case, make_policy
from bench.foresight.rounds import Measured, Noise, Planned, Rounds
from bench.report import Report
from graphs.tasks import sorting
from operators.warm_start import warm_start

if TYPE_CHECKING:
    from dataflow.foresight.lengths import Lengths
    from dataflow.foresight.rates import Constants
    from dataflow.foresight.seen import SeenRun

LONG = 200
"""Tokens of the longest completions of a run that calibrates."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    name: str
    policy: str = "small"
    """tiny, small, large or tail."""
    max_staleness: int = 4
    group_size: int = 8
    prompts_per_step: int = 32
    replicas: int = 1
    ranks: int = 1
    """Of the generator, and of the trainer."""
    max_tokens: int = sorting.MAX_TOKENS
    """Of a completion; a policy that has learned nothing ends some after every token."""
    slow: bool = False
    """Whether its scorer takes 50 ms, 32 calls of it at once."""
    steps: int = 60

    @property
    def texts(self) -> tuple[str, int]:
        """What they depend on."""
        return self.policy, self.max_tokens


CALIBRATE = (
    Trial(
        name="tiny, two threads, long",
        policy="tiny",
        max_staleness=0,
        prompts_per_step=24,
        max_tokens=LONG,
        steps=24,
    ),
    Trial(
        name="large, steps of 128 rollouts",
        policy="large",
        max_staleness=1,
        prompts_per_step=16,
        steps=36,
    ),
)
"""They differ in what the constants are to tell apart: sizes of the model and of a step, lengths,
and with them the batch; and whether generator and trainer take turns, with all cores each, or
compute at once with a thread each. Models that are foreseen are between these two."""
MORE = (
    Trial(
        name="tiny, staleness 1, long",
        policy="tiny",
        max_staleness=1,
        prompts_per_step=24,
        max_tokens=LONG,
        steps=36,
    ),
    Trial(name="tiny, steps of 64 rollouts", policy="tiny", prompts_per_step=8, steps=120),
    Trial(
        name="large, staleness 1, long",
        policy="large",
        max_staleness=1,
        prompts_per_step=16,
        max_tokens=LONG,
        steps=30,
    ),
    Trial(
        name="large, two threads", policy="large", max_staleness=0, prompts_per_step=16, steps=18
    ),
)
"""What else the choice of placements is calibrated with."""
CUT = (
    Trial(name="tiny, two ranks", policy="tiny", ranks=2, max_staleness=0, steps=30),
    Trial(
        name="large, two ranks",
        policy="large",
        ranks=2,
        max_staleness=0,
        prompts_per_step=16,
        steps=20,
    ),
)
"""They say what ranks on cores take to wait for each other; only the choice of placements needs
them."""
PREDICT = (
    Trial(name="staleness 0", max_staleness=0, steps=36),
    Trial(name="staleness 1", max_staleness=1, steps=48),
    Trial(name="staleness 8", max_staleness=8, steps=60),
    Trial(name="groups of 4", group_size=4, steps=90),
    Trial(name="groups of 16", group_size=16, steps=30),
    Trial(name="64 prompts a step", prompts_per_step=64, steps=28),
    Trial(name="slow scorer", slow=True, steps=28),
    Trial(name="two generators", replicas=2, steps=48),
    Trial(name="large", policy="large", steps=28),
    Trial(
        name="large, staleness 1, groups of 16",
        policy="large",
        max_staleness=1,
        group_size=16,
        steps=18,
    ),
    Trial(name="tail", policy="tail", steps=30),
    Trial(name="tail, staleness 0", policy="tail", max_staleness=0, steps=14),
    Trial(
        name="tail, staleness 8, groups of 4",
        policy="tail",
        max_staleness=8,
        group_size=4,
        steps=46,
    ),
)


def policy(name: str, policies: Path) -> Path:
    """The folder of a policy, which is made there if it is not."""
    if name == "tail":
        return make_policy(make_case("tail", policies, quick=False), quick=False)
    words = sorting.rows(20_000, seed=0)
    layers, width = {"tiny": (2, 64), "small": (2, 128), "large": (4, 256)}[name]
    return warm_start(
        policies / f"bench-untrained-{name}",
        examples=((row["prompt"], row["answer"]) for row in words),
        alphabet=sorting.ALPHABET,
        layers=layers,
        width=width,
        heads=4,
        steps=2,
        max_positions=LONG + 32,
        seed=0,
    )


def build(trial: Trial, policies: Path) -> Any:
    """Its graph."""
    import random
    import time

    from dataflow import Graph, Model, scorer
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo

    def drawn(completion: str, rollout_id: int) -> float:
        if trial.slow:
            time.sleep(SCORER_S)
        return random.Random(rollout_id).random()

    rows = make_case("tail" if trial.policy == "tail" else "even", policies, quick=False).rows
    model = Model(str(policy(trial.policy, policies)))
    longest = TAIL_TOKENS if trial.policy == "tail" else trial.max_tokens
    graph = Graph("foreseen")
    reward = scorer(name="reward", concurrency=SCORER_CALLS if trial.slow else 1)(drawn)
    generator = Generator(
        model, group_size=trial.group_size, max_tokens=longest, tensor_parallel=trial.ranks
    )
    trainer = Trainer(
        model, loss=aipo, prompts_per_step=trial.prompts_per_step, lr=1e-7, normalize="rollouts"
    )
    prompts = Prompts(list(rows), columns=("answer",), shuffle_seed=0)
    trainer(advantage(reward(generator(graph.source(prompts)))))
    graph.feedback(trainer.weights, generator, max_staleness=trial.max_staleness)
    return graph


def planned(trial: Trial, policies: Path) -> Planned:
    """Its run, placed as `--own` has it."""

    def make(runs: Path) -> None:
        from dataflow import run

        run(
            build(trial, policies),
            steps=trial.steps,
            replicas={"generator": trial.replicas},
            ranks={"trainer": trial.ranks},
            runs=runs,
            quiet=True,
        )

    return Planned(name=trial.name, make=make)


def predict(trial: Trial, policies: Path, constants: Any, texts: Mapping[Any, Any]) -> Any:
    """What is foreseen of it; texts: prompt tokens and lengths, by policy and most tokens."""
    from dataflow import Devices
    from dataflow.foresight.foresee import foresee
    from dataflow.foresight.workload import Workload

    prompt, lengths = texts[trial.texts]
    return foresee(
        build(trial, policies),
        Devices(cpus=2),
        replicas={"generator": trial.replicas},
        steps=trial.steps,
        constants=constants,
        workload=Workload(
            prompt_tokens=prompt,
            run_lengths=lengths,
            row_s={"reward": SCORER_S} if trial.slow else {},
        ),
    )


def own(
    path: Path | None, policies: Path, keep: Path | None, seconds: float | None, rounds: int
) -> int:
    """Calibrate, foresee, run, compare. keep: where run folders stay; those that are there are not
    run again. seconds: after which no run is begun; what there is then is compared. rounds: every
    run is made so often, one after the other.
    """
    from dataflow.foresight.calibration import calibrate, described
    from dataflow.foresight.seen import look

    report, console = Report("foresight", path), Console(width=150)
    with tempfile.TemporaryDirectory(prefix="foresight-") as temporary:
        trials, making = (*CALIBRATE, *PREDICT), Rounds(keep or Path(temporary), seconds)
        for trial in trials:
            policy(trial.policy, policies)
        by_trial: dict[str, list[SeenRun]] = {}
        for number in range(rounds):
            folders = making.run(
                replace(planned(trial, policies), round=number) for trial in trials
            )
            for name, paths in folders.items():
                by_trial.setdefault(name, []).extend(map(look, paths))
        if not all(trial.name in by_trial for trial in CALIBRATE):
            console.print("the runs that calibrate are missing; call again with the same --keep")
            return 1
        constants = calibrate([run for trial in CALIBRATE for run in by_trial[trial.name]])
        console.print(described(constants), highlight=False, markup=False)
        _compare(report, console, by_trial, policies, constants)
    if making.missing:
        console.print(
            f"{making.missing} runs are missing; call again with the same --keep", highlight=False
        )
    return 0


def _compare(
    report: Report,
    console: Console,
    by_trial: Mapping[str, Sequence[SeenRun]],
    policies: Path,
    constants: Constants,
) -> None:
    """What was foreseen beside what came, in the mean of a run's rounds."""
    texts: dict[tuple[str, int], tuple[float, Lengths]] = {}
    off: dict[str, list[float]] = {"step_s": [], "efficiency": [], "staleness": []}
    for trial in (trial for trial in (*CALIBRATE, *PREDICT) if trial.name in by_trial):
        runs = by_trial[trial.name]
        texts.setdefault(trial.texts, (runs[0].prompt_tokens, runs[0].lengths))
        foreseen = predict(trial, policies, constants, texts)
        step_s, efficiency, staleness = (
            Measured.of(runs).step_s,
            *(statistics.mean(getattr(run, name) for run in runs) for name in [*off][1:]),
        )
        report.add(
            case="own runs",
            system=trial.name,
            rounds=len(runs),
            step_ms=1e3 * step_s,
            foreseen_ms=1e3 * foreseen.step_s,
            off=foreseen.step_s / step_s - 1,
            efficiency=efficiency,
            foreseen_efficiency=foreseen.efficiency,
            staleness=staleness,
            foreseen_staleness=foreseen.staleness,
            drift=max(run.drift for run in runs),
        )
        if trial in PREDICT:
            off["step_s"].append(abs(foreseen.step_s / step_s - 1))
            off["efficiency"].append(abs(foreseen.efficiency - efficiency))
            off["staleness"].append(abs(foreseen.staleness - staleness))
    report.show(console)
    for figure, errors in off.items():
        if errors:
            console.print(
                f"{figure}: off by {statistics.median(errors):.3f} in the median of {len(errors)},"
                f" {max(errors):.3f} at most",
                highlight=False,
            )
    measured = [Measured.of(runs) for runs in by_trial.values()]
    if any(len(run.steps_s) > 1 for run in measured):
        noise = Noise.of(measured)
        console.print(
            f"the same run differs by {noise.deviation:.1%} from round to round", highlight=False
        )
