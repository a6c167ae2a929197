"""How long the weights' way takes in a live run, told by the run's own metrics, beside what the
machine needs for it.

    python -m bench.weight_plane --live 2x2 4x2 --mib 64

A run in float32 by real operators: a trainer of so many ranks (FSDP) and a generator of so many
(tensor parallel) that wait for each other (max_staleness=0); a model of random weights of about so
many MiB. Each version goes out from the trainer's weights. The first versions are left out: buffers
are made for them. Figures are medians, least_ms the best.

ms              from the start of a transfer until all of the reader's ranks have their part,
                verified (`seconds` of `weights_sent`); the trainer computes nothing meanwhile, the
                generator waits for it
publish_ms      how long publishing held the trainer before (`seconds_publish`)
held_ms         the longest that a generator's rank was held by taking a version, in the whole run
                (`held_seconds`)
memcpy_ms, raw_gloo_ms
                the floors of `--ranks` for the bytes that each pair of ranks has exchanged,
                measured straight after the run
over_floor, least_over    ms over the floor of its executor, and the best over the floor's best
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.memory.program import Size, build, write
from bench.report import Report
from bench.weight_plane.rank_ends import Job
from bench.weight_plane.ranks import FLOOR_OF, GOALS, measure, processor
from dataflow import run

EXECUTORS = ("shared_memory", "gloo")
STEPS, WARM = 10, 3
"""Versions, and those left out."""
WIDTH, MLP_WIDTH, HEADS = 512, 1408, 8
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP_WIDTH
"""Parameters of a layer, about."""
FLOOR_UPDATES, FLOOR_S = 30, 3.0


@dataclass(frozen=True, kw_only=True)
class Known(Job):
    """A floor of bytes that are known."""

    table: tuple[tuple[int, ...], ...]

    @property
    def pair_bytes(self) -> list[list[int]]:
        """From each rank to each rank."""
        return [list(row) for row in self.table]


def main(cases: Sequence[str], mib: Sequence[int], path: Path | None) -> int:
    """Make the runs, show the table; the exit status is 1 when a run was not clean."""
    report, table, console = (
        Report("weight_plane_live", path),
        Report("weight_plane_live"),
        Console(width=150),
    )
    notes, failed = [], False
    for case in cases:
        sources, readers = (int(number) for number in case.split("x"))
        for size in mib:
            for executor in EXECUTORS if sources > 1 else EXECUTORS[1:]:
                with tempfile.TemporaryDirectory(prefix="dataflow-bench-") as folder:
                    line = figures(Path(folder), sources, readers, size, executor)
                failed = failed or line is None
                if line is None:
                    for sink in (report, table):
                        sink.add(
                            case=case,
                            system=executor,
                            mib=size,
                            skipped="failed: the run was not clean",
                        )
                    continue
                report.add(case=case, system=executor, mib=size, processor=processor(), **line)
                table.add(case=case, system=executor, mib=size, **line)
                notes.append(
                    f"{case}, {size} MiB, {executor}: {line['over_floor']:.2f} of its floor (best"
                    f" {line['least_over']:.2f}, goal {GOALS[executor]:.1f}); a reader was held"
                    f" {line['held_ms']:.2f} ms"
                )
    table.show(console)
    console.print(processor(), highlight=False)
    console.print(*notes, sep="\n", markup=False, highlight=False)
    return int(failed)


def figures(
    folder: Path, sources: int, readers: int, mib: int, executor: str
) -> dict[str, float] | None:
    """One run; None where it was not clean."""
    layers = max(1, round((mib << 20) / 4 / LAYER))
    write(folder / "policy", Size(layers, WIDTH, MLP_WIDTH, HEADS))
    result = run(
        build(folder / "policy", readers),
        steps=STEPS,
        ranks={"trainer": sources},
        weights=executor,
        runs=folder / "runs",
        quiet=True,
    )
    if not result.verdict.clean:
        return None
    lines = [line for line in result.metrics if line.get("weights_sent")]
    sent: dict[int, dict[str, Any]] = {}
    for line in lines:
        (figures_sent,) = line["weights_sent"].values()
        sent[figures_sent["version"]] = figures_sent
    counted = [figures_sent for version, figures_sent in sent.items() if version > WARM]
    times = [1e3 * update["seconds"] for update in counted]
    table = tuple(tuple(row) for row in counted[-1]["pair_bytes"])
    floors = measure(
        [
            Known(
                system=floor,
                sources=sources,
                readers=readers,
                mib=mib,
                folder=str(folder),
                table=table,
            )
            for floor in dict.fromkeys(FLOOR_OF[executor] for executor in EXECUTORS)
        ],
        FLOOR_UPDATES,
        FLOOR_S,
    )
    mine, floor = statistics.median(times), floors[FLOOR_OF[executor]].line
    return {
        "ms": mine,
        "least_ms": min(times),
        "versions": len(times),
        "nbytes": counted[-1]["nbytes"],
        "held_ms": 1e3 * max(update["held_seconds"] for update in sent.values()),
        "publish_ms": 1e3 * statistics.median(line["seconds_publish"] for line in lines[WARM:]),
        **{f"{name}_ms": floor.line["ms"] for name, floor in floors.items()},
        "over_floor": mine / floor["ms"],
        "least_over": min(times) / floor["least_ms"],
    }
