"""How fast new weights get from a trainer's process to a reader's, and how long they hold either
up.

    python -m bench.weight_plane --json FILE
    python -m bench.weight_plane --ranks 1x1 2x1 2x2 4x2 --mib 64 512
    python -m bench.weight_plane --live 2x2 4x2 --mib 64
    python -m bench.weight_plane --simulate

Two processes with one torch thread each: see bench.weight_plane.pair; the systems: see
bench.weight_plane.systems. Every system publishes the same bytes, in turns with the others; the
reader's bytes are compared with the trainer's after every update, outside of the time. Figures are
medians over the repeats, of each repeat's median:

gb_per_s            bytes (10^9) over the time from the call to publish until the reader computes
                    with them, while both processes compute; least and most: of the repeats
waiting_gb_per_s    the same while neither computes and both wait for it; memcpy and gloo_p2p are
                    floors of this one
trainer_stall_ms    how long publish, and whatever it left to do, held the trainer's thread
reader_stall_ms     how much longer than usual the longest of the reader's steps took because of the
                    update
reader_held_ms      the longest that the system held the reader's thread between two steps
reader_quiet_ms     like reader_stall_ms of 20 steps without an update: the machine's own noise
of_memcpy, of_gloo  gb_per_s over that of memcpy, and over that of gloo_p2p, within each repeat
waiting_of_memcpy, waiting_of_gloo  the same of waiting_gb_per_s

What works beside the computing (ours) shares two cores with it, and what stops it (the others) has
them for itself: so compare speeds by waiting_gb_per_s, and what they cost by the stalls.

--ranks: between several processes on either side (bench.weight_plane.ranks).
--live: the same in a run, by its own metrics (bench.weight_plane.live).
--simulate: what the cost model says of large models on many GPUs (bench.weight_plane.simulation).
Run it on an idle machine with two cores.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console

from bench.report import Figure, Report
from bench.weight_plane.cases import Case, Job, UpdateTimes
from bench.weight_plane.pair import measure
from bench.weight_plane.systems import SYSTEMS, missing

MIB, TENSORS = (256, 1024), (1, 300)
FLOORS = {"memcpy": "of_memcpy", "gloo_p2p": "of_gloo"}
OVER_GLOO = ("ours_gloo", "ours_gloo_zero_copy", "gloo")
GOALS = {
    "ours_shm": ("of_memcpy", 0.85),
    "ours_gloo": ("of_gloo", 0.9),
    "ours_gloo_zero_copy": ("of_gloo", 0.9),
}
"""The least share of the floor that is aimed at."""
TITLES = {
    "gb_per_s": "GB/s",
    "waiting_gb_per_s": "GB/s waiting",
    "trainer_stall_ms": "trainer stall ms",
    "reader_stall_ms": "reader stall ms",
    "reader_held_ms": "held ms",
    "reader_quiet_ms": "quiet ms",
    "of_memcpy": "of memcpy",
    "waiting_of_memcpy": "waiting",
    "of_gloo": "of gloo",
    "waiting_of_gloo": "waiting ",
    "least": "least",
    "most": "most",
    "updates": "updates",
}
"""Figures that stand in the table; the JSON has them all."""
WIDE = 165
"""Characters of the table."""


Row = tuple[Case, str]
Found = dict[Row, dict[int, UpdateTimes]]
"""What each system measured on each case, by repeat."""


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when a system failed."""
    options = parser().parse_args(arguments)
    if options.simulate:
        return int(import_module("bench.weight_plane.simulation").main(options.json) or 0)
    if options.ranks:
        ranks = import_module("bench.weight_plane.ranks")
        systems = [
            system
            for system in ranks.SYSTEMS
            if system in options.rank_systems or not options.rank_systems
        ]
        return int(
            ranks.main(
                options.ranks,
                options.mib,
                systems,
                updates=options.updates or 30,
                seconds=options.seconds,
                path=options.json,
            )
        )
    if options.live:
        return int(
            import_module("bench.weight_plane.live").main(options.live, options.mib, options.json)
        )
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    cases = [Case(mib, tensors) for mib in options.mib for tensors in options.tensors]
    rows = [(case, system) for case in cases for system in SYSTEMS if system in options.systems]
    outcomes: Found = {}
    reasons = {row: why for row in rows if (why := missing(row[1]))}
    try:
        run(rows, outcomes, reasons, options, say)
    finally:
        show(rows, outcomes, reasons, Report("weight_plane", options.json), say)
    return int(any(why.startswith("failed") for why in reasons.values()))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.weight_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--mib", type=int, nargs="+", default=list(MIB), help="of a version (default 256 1024)"
    )
    parser.add_argument(
        "--tensors", type=int, nargs="+", default=list(TENSORS), help="of a version (default 1 300)"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="pairs of processes of each (default 3)"
    )
    parser.add_argument(
        "--updates", type=int, help="counted in each, busy and waiting (default 7; with --ranks 30)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="after which a pair counts no more (default 2)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="for everything, rows left out at need (default 8)",
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        metavar="TxR",
        help="of a trainer and of readers, e.g. 1x1 2x1 2x2 4x2",
    )
    parser.add_argument(
        "--live", nargs="+", metavar="TxR", help="the same in a live run, e.g. 2x2 4x2"
    )
    parser.add_argument("--rank-systems", nargs="+", default=[], help="with --ranks; default: all")
    parser.add_argument("--simulate", action="store_true", help="by the cost model, on many GPUs")
    return parser


def run(
    rows: list[Row],
    outcomes: Found,
    reasons: dict[Row, str],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """Fill `outcomes`, and `reasons` of the rows that have nothing to show. What has failed is not
    tried again.

    The systems of a case take turns. After the first time, a row is repeated while its share of the
    time and the whole time last.
    """
    began, share_s = time.monotonic(), 60 * options.minutes / max(1, len(rows) - len(reasons))
    spent = dict.fromkeys(rows, 0.0)
    for repeat in range(options.repeats):
        for row in rows:
            case, system = row
            left_s = began + 60 * options.minutes - time.monotonic()
            if (
                row in reasons
                or (repeat and spent[row] + spent[row] / repeat > share_s)
                or left_s <= spent[row]
            ):
                continue
            started = time.monotonic()
            outcome = measure(
                Job(system=system, case=case, updates=options.updates or 7, seconds=options.seconds)
            )
            spent[row] += time.monotonic() - started
            if isinstance(outcome, UpdateTimes):
                outcomes.setdefault(row, {})[repeat] = outcome
                pace = f"{speed(case, outcome.waiting_s):.2f} GB/s"
            else:
                outcomes.pop(row, None)
                pace = reasons[row] = f"failed: {outcome}"
            say(f"{case} {system}: {pace} ({time.monotonic() - started:.1f} s)")


def show(
    rows: list[Row],
    found: Found,
    reasons: dict[Row, str],
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Write the lines, and show the tables, the goals and what is missing."""
    table, notes = Report("weight_plane"), []
    for case, system in rows:
        if (case, system) in found:
            line = figures(
                system, case, {name: runs for (on, name), runs in found.items() if on == case}
            )
            table.add(
                case=str(case), system=system, **{TITLES[n]: line[n] for n in TITLES if n in line}
            )
            notes += [f"{case}: {goal(system, line)}"] if system in GOALS else []
        else:
            line = {
                "skipped": reasons.get((case, system), "skipped: no time was left; see --minutes")
            }
            notes.append(f"{case}: {system} {line['skipped']}")
        report.add(case=str(case), system=system, mib=case.mib, tensors=case.tensors, **line)
    table.show(Console(width=WIDE))
    for note in notes:
        say(note)


def figures(
    system: str, case: Case, outcomes: dict[str, dict[int, UpdateTimes]]
) -> dict[str, Figure]:
    """One row. memcpy has neither a busy update nor stalls: its one speed stands for both."""
    mine = outcomes[system]
    waiting = {repeat: speed(case, times.waiting_s) for repeat, times in mine.items()}
    busy = {repeat: speed(case, times.busy_s or times.waiting_s) for repeat, times in mine.items()}
    row: dict[str, Figure] = {
        "gb_per_s": statistics.median(busy.values()),
        "least": min(busy.values()),
        "most": max(busy.values()),
        "waiting_gb_per_s": statistics.median(waiting.values()),
    }
    for name in ("trainer_stall_ms", "reader_stall_ms", "reader_held_ms", "reader_quiet_ms"):
        measured = [
            statistics.median(getattr(times, name))
            for times in mine.values()
            if getattr(times, name)
        ]
        row[name] = statistics.median(measured) if measured else None
    for floor, name in FLOORS.items():
        if system != floor and floor in outcomes and (floor == "memcpy" or system in OVER_GLOO):
            theirs = outcomes[floor]
            row[name] = ratio(
                busy, {r: speed(case, f.busy_s or f.waiting_s) for r, f in theirs.items()}
            )
            row[f"waiting_{name}"] = ratio(
                waiting, {r: speed(case, f.waiting_s) for r, f in theirs.items()}
            )
    row["repeats"] = len(mine)
    row["updates"] = sum(len(times.waiting_s) for times in mine.values())
    return row


def speed(case: Case, seconds: list[float]) -> float:
    """GB/s of the median update."""
    return case.nbytes / 1e9 / statistics.median(seconds)


def ratio(mine: dict[int, float], floor: dict[int, float]) -> float | None:
    """The median over the repeats that both have made."""
    both = mine.keys() & floor.keys()
    return statistics.median(mine[repeat] / floor[repeat] for repeat in both) if both else None


def goal(system: str, row: dict[str, Figure]) -> str:
    """What was aimed at, and what was reached."""
    floor, least = GOALS[system]
    reached = ", ".join(
        f"{how} {'not measured' if share is None else format(share, '.2f')}"
        for how, share in (("computing", row.get(floor)), ("waiting", row.get(f"waiting_{floor}")))
    )
    return (
        f"{system} {floor.replace('_', ' ')} (goal {least:.2f}): {reached}; reader stall"
        f" {row['reader_stall_ms']:.2f} ms (goal under 1), of which its thread was held"
        f" {row['reader_held_ms']:.2f}; {row['reader_quiet_ms']:.2f} without an update"
    )


if __name__ == "__main__":
    # processes are ended, files removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
