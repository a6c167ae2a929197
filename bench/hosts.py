"""Rows, weights and steps per second of the sorting demo on one host, and on namespaces of this
machine that are hosts.

    python -m bench.hosts --json FILE
    python -m bench.hosts --mbit 100        links between hosts that carry no more

Systems: `one host`, trainer and generator on it, over sockets and shared memory as without hosts;
`three hosts`, the trainer on one, a replica of the generator on each of the others, over tcp with
keys; `two hosts`, both replicas beside each other on the second;
with --mbit also that where the plan is told the rate of the link, so that versions travel as
deltas. Each has a network, a file system and a clock of its own, and all share this machine's
cores: what differs is what the way between hosts costs. Systems take turns; the table shows the
median of the repeats. The first steps are left out.

rows_per_s        rollouts that were trained
steps_per_s       optimiser steps
versions_per_s    versions of the weights with which rollouts were drawn
weights_mb_per_s  the same in bytes (10^6) that the generators have taken in
link_mb_a_version bytes (10^6) of weights that left the trainer's host for each step
weights_ms        median of the time from the start of a transfer until a generator has it,
                  verified; over gloo alone
staleness_mean    versions
start_s           from the start of the program to its first step

Needs a clone, whose tests make the hosts, and what `tests/rigs/hosts` asks of the machine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Figure, Report
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.run_folder import RunFolder
from graphs.sorting import build

BESIDE: Mapping[str, Any] = {
    "replicas": {"generator": 2},
    "place": {"trainer": "h1", "generator": "h2"},
}
SYSTEMS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {
    "one host": (1, 1, {}),
    "three hosts": (
        3,
        2,
        {"replicas": {"generator": 2}, "place": {"trainer": "h1", "generator": ("h2", "h3")}},
    ),
    "two hosts": (2, 2, BESIDE),
}
"""By name: hosts, replicas of the generator, and what else `run` is given."""
WARM = 10
"""Steps that are left out."""
NO_END = 1_000_000
"""Steps between evaluations: there is none but at the end."""


def main() -> int:
    """Run the bench; the exit status is 1 when a run was not clean, or there are no hosts."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help=f"of each run, the first {WARM} left out (default 100)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system (default 3)")
    parser.add_argument(
        "--mbit",
        type=float,
        help="megabits per second of each host's link; as fast as it can if left out",
    )
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from rigs.hosts import NoHosts

    report, console, failed = Report("hosts", options.json), Console(width=130), False
    case = "sorting" if options.mbit is None else f"sorting, {options.mbit:g} Mbit/s"
    systems = dict(SYSTEMS)
    if options.mbit is not None:
        systems["two hosts, deltas"] = (2, 2, {**BESIDE, "link_gbps": options.mbit / 1000})
    lines: dict[str, list[dict[str, Figure]]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory(prefix="dataflow-bench-") as folder:
        build(policy=f"{folder}/policy")
        for repeat in range(options.repeats):
            for name, system in systems.items():
                try:
                    figures = measured(
                        Path(folder), name, system, repeat, options.steps, options.mbit
                    )
                except (NoHosts, AssertionError) as error:
                    report.add(case=case, system=name, repeat=repeat, skipped=str(error)[-400:])
                    console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
                    failed = True
                    continue
                report.add(case=case, system=name, repeat=repeat, **figures)
                lines[name].append(figures)
    table = Report("hosts")
    for name, of in lines.items():
        if of:
            table.add(case=case, system=name, **medians(of))
    table.show(console)
    return int(failed)


def measured(
    folder: Path,
    name: str,
    system: tuple[int, int, Mapping[str, Any]],
    repeat: int,
    steps: int,
    mbit: float | None,
) -> dict[str, Figure]:
    """One run. Errors: NoHosts; AssertionError with what it said, where it was not clean."""
    from rigs.hosts import hosts
    from rigs.hosts.cluster import Cluster

    count, replicas, more = system
    own = folder / f"{name.replace(',', '').replace(' ', '-')}-{repeat}"
    own.mkdir()
    with hosts(*(f"h{number}" for number in range(1, count + 1)), shared=[folder]) as network:
        for host in network:
            if mbit is not None:
                host.slow(mbit)
        cluster, began = Cluster(network, own), time.time()
        start = cluster.launch if count == 1 else cluster.start
        start(
            "sorting", {"policy": str(folder / "policy"), "eval_every": NO_END}, steps=steps, **more
        )
        verdict = cluster.ended(900.0)
    assert verdict.clean, verdict.line
    return figures(cluster.run_folder, folder / "policy", replicas, began)


def figures(run: Path, policy: Path, replicas: int, began: float) -> dict[str, Figure]:
    """What a run left in its folder. began: when its program was started, seconds since 1970."""
    metrics = [line for line in RunFolder.open(run).read_metrics() if "loss" in line]
    first, *counted = metrics[WARM - 1 :]
    span_s = counted[-1]["seconds"] - first["seconds"]
    versions = {version for line in counted for version in _versions(run, line["step"])}
    weights_bytes = sum(path.stat().st_size for path in policy.glob("*.safetensors"))
    sent = [
        sent["seconds"] for line in counted for sent in (line.get("weights_sent") or {}).values()
    ]
    first_step = min((run / "rollouts").glob("step-*.arrow"))
    return {
        "rows_per_s": sum(line["rollouts"] for line in counted) / span_s,
        "steps_per_s": len(counted) / span_s,
        "versions_per_s": len(versions) / span_s,
        "weights_mb_per_s": replicas * len(versions) * weights_bytes / span_s / 1e6,
        "link_mb_a_version": (
            sum(line["weights_sent_bytes"] for line in counted) / len(counted) / 1e6
            if "weights_sent_bytes" in counted[0]
            else None
        ),
        "weights_ms": 1e3 * statistics.median(sent) if sent else None,
        "staleness_mean": statistics.fmean(line["staleness_mean"] for line in counted),
        "start_s": first_step.stat().st_mtime - began,
    }


def medians(lines: Sequence[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Of each figure, over the repeats that have it."""
    middle: dict[str, Figure] = {}
    for name in lines[0]:
        values = [value for line in lines if isinstance(value := line[name], int | float)]
        middle[name] = statistics.median(values) if values else None
    return middle


def _versions(run: Path, step: int) -> set[int]:
    """With which the tokens of a step were drawn."""
    column = read_arrow(run / "rollouts" / f"step-{step:06d}.arrow").column("versions")
    return set(column.combine_chunks().flatten().to_pylist())


if __name__ == "__main__":
    sys.exit(main())
