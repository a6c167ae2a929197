"""What a real model of 135 million parameters does on this machine: SmolLM2-135M-Instruct on sums and differences.

    python -m bench.real --parity --json FILE

--parity: AIPO with rollouts up to 0, 1, 4 and 8 versions old, and at 8 without importance weights: held-out accuracy
after the same number of rollouts, over the seeds, with standard errors. Each run has a process of its own; runs that
stand in FILE are not made again. The picture is drawn beside FILE.

Every line names processor, threads, commit and versions. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.real.parity import ARMS, parity, run_arm
from bench.real.task import add_flags
from bench.report import Figure
from dataflow.history.environment import environment
from dataflow.planning.this_machine import this_machine

ROOT = Path(__file__).parent.parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part of the bench; the exit status is 1 when a run failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.child:
        name, seed, out = options.child
        Path(out).write_text(json.dumps(run_arm(name, int(seed), options)))
        return 0
    about = conditions()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    return int(parity(options, given, about))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m bench.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--parity", action="store_true", help="accuracy by staleness, over the seeds")
    found.add_argument("--json", type=Path, help="file for the JSON lines")
    found.add_argument("--steps", type=int, default=60, help="steps' worth of prompts of a run (default 60)")
    found.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="of --parity (default: all)")
    found.add_argument("--points", type=int, default=4, help="evaluations within a run of --parity (default 4)")
    found.add_argument("--samples", type=int, default=2, help="of each question at the end (default 2)")
    found.add_argument("--child", nargs=3, metavar=("NAME", "SEED", "FILE"), help=argparse.SUPPRESS)
    add_flags(found)
    return found


def conditions() -> dict[str, Figure]:
    """Under which the figures came about."""
    devices = this_machine()
    about = environment(devices)
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    versions = {name: about["packages"].get(name, "") for name in ("torch", "transformers")}
    return {"processor": about["processor"], "threads": devices.cpus, "commit": done.stdout.strip(), **versions}


if __name__ == "__main__":
    raise SystemExit(main())
