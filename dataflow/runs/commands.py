"""The commands that look at runs between runs: list, compare, export, report."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dataflow.errors import GraphError

if TYPE_CHECKING:
    from dataflow.runs.listing import ListedRun

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
LatestRun = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]

CURVE_CELLS = 60
"""Of a curve in the terminal."""


def list_runs(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs"),
    *,
    json: Flag = False,
) -> int:
    """List the runs of a folder, newest first: state, steps, accuracy or reward, age. Looks only,
    at live ones too.

    Args:
        folder: where the runs are, or a run.
        json: print JSON.
    """
    from dataflow.display.formatting import clean
    from dataflow.runs.listing import in_columns, runs_in
    from dataflow.system.files import to_json

    listing = runs_in(folder)
    if json:
        skipped = [{"name": name, "why": why} for name, why in listing.others]
        print(
            to_json({"runs": [run.to_plain() for run in listing.runs], "others": skipped}, indent=1)
        )
        return 0
    if listing.runs:
        heads = ("run", "state", "steps", "accuracy", "reward", "begun", "last step")
        rows = [_row(run) for run in listing.runs]
        print(
            "\n".join(
                in_columns(heads, rows, right=("steps", "accuracy", "reward", "begun", "last step"))
            )
        )
    else:
        print(f"no run in {folder}")
    for run in listing.runs:
        for note in filter(None, (run.state.note, *run.notes)):
            print(f"note: {clean(run.name)}: {clean(note)}")
    for name, why in listing.others:
        print(f"skipped: {clean(name)}: {clean(why)}")
    return 0


def _row(run: "ListedRun") -> tuple[str, ...]:
    from dataflow.display.formatting import score
    from dataflow.runs.listing import ago

    steps = f"{run.steps}/{run.wanted}" if run.wanted is not None else str(run.steps)
    accuracy, reward = (score(value, "-") for value in (run.accuracy, run.reward))
    return run.name, run.state.word, steps, accuracy, reward, ago(run.begun), ago(run.written)


def export_run(
    run: LatestRun = Path("runs/latest"),
    *,
    to: Literal["parquet", "hf"],
    out: Path | None = None,
    pairs: Flag = False,
    by: str = "reward",
) -> int:
    """Write the rollouts of a run as a data set, whole or not at all; a live run up to the step
    that it has come to.

    Args:
        run: the run folder.
        to: parquet: files of it; hf: a folder that datasets.load_dataset reads, with a card.
        out: folder to make; <run>-rollouts or <run>-pairs here if left out.
        pairs: of each trained group the best rollout and the worst, as prompt, chosen, rejected.
        by: the figure that tells them apart.
    """
    from dataflow.display.formatting import clean
    from dataflow.folder.run_folder import RunFolder
    from dataflow.runs.export import export

    folder = RunFolder.open(run)
    place = out or Path(f"{folder.path.name}-{'pairs' if pairs else 'rollouts'}")
    rows, notes = export(folder, to, place, pairs=pairs, by=by)
    template = "{:,} pairs" if pairs else "{:,} rows {}"
    print(
        f"wrote {place}:"
        f" {', '.join(template.format(count, split) for split, count in rows.items())}"
    )
    for note in notes:
        print(f"note: {clean(note)}")
    return 0


def report_run(
    run: LatestRun = Path("runs/latest"), *, out: Path | None = None, by: str = "reward"
) -> int:
    """Write a run as one HTML file to send: curves, graph, rollouts, faults, ledger, environment.
    It loads nothing.

    Args:
        run: the run folder.
        out: the file; <run>.html here if left out.
        by: the figure of a rollout that tells the best from the worst.
    """
    from dataflow.display.formatting import size_of
    from dataflow.folder.run_folder import RunFolder
    from dataflow.runs.report import write_report

    folder = RunFolder.open(run)
    place = out or Path(f"{folder.path.name}.html")
    write_report(folder, place, by=by)
    print(f"wrote {place}: {size_of(place.stat().st_size)}, nothing else is needed to read it")
    return 0


def compare_runs(
    first: Folder, second: Folder, *, draw: Path | None = None, json: Flag = False
) -> int:
    """Say what differs between two runs in graph, knobs, program and environment, and put their
    figures side by side.

    Args:
        first: a run folder.
        second: another one.
        draw: an .svg of the curves of both, one over the other.
        json: print JSON.
    """
    from dataflow.display.views import glyphs_for
    from dataflow.folder.run_folder import RunFolder
    from dataflow.runs.compare import comparison, plain, sides_of
    from dataflow.runs.compare import draw as draw_curves
    from dataflow.system.files import to_json

    folders = RunFolder.open(first), RunFolder.open(second)
    sides = sides_of(*folders)
    if draw is not None:
        if draw.suffix.lower() != ".svg":
            raise GraphError(
                f"the picture of two runs is an .svg, but got '{draw.name}'; name it"
                f" {draw.stem}.svg"
            )
        draw_curves(*sides, draw)
    if json:
        print(to_json(plain(*sides), indent=1))
        return 0
    print("\n".join(comparison(*sides, signs=glyphs_for(sys.stdout).spark, width=CURVE_CELLS)))
    if draw is not None:
        print(f"\ndrew {draw}")
    return 0
