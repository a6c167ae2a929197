"""What a real model of 135 million parameters does on this machine: SmolLM2-135M-Instruct on sums
and differences.

    python -m bench.real                            where the seconds of a step go, and shares of
                                                    the processor's peaks
    python -m bench.real --systems --json FILE      beside a plain loop, TRL's GRPOTrainer,
                                                    model.generate and vLLM
    python -m bench.real --asynchronous             max_staleness 4 beside 0
    python -m bench.real --parity --json FILE       accuracy after the same rollouts, by staleness
    python -m bench.real --forgetting --gsm8k FOLDER --json FILE

without an option: stages of a step as the run records them (prompts of --steps steps, max_staleness
of --max-staleness); a trainer's forward, backward and update where every rollout has a signal;
prefill, decoding, the head and drawing of the generator in float32, bfloat16 and int8; each beside
the peaks of bench.peaks.

--systems: seconds a step, rates and peak memory of whole loops (as in bench.end_to_end, with this
model) and of generators that make one step's rollouts alone; all in float32 but those whose name
says bfloat16. plain and trl make --few-steps steps after one that does not count; trl takes some 19
GB of memory. vLLM runs where DATAFLOW_VLLM_PYTHON names the interpreter of an environment that has
it.

--parity: AIPO with rollouts up to 0, 1, 4 and 8 versions old, and at 8 without importance weights:
held-out accuracy after the same number of rollouts, over the seeds, with standard errors. The
picture is drawn beside FILE.

--forgetting: before and after training without a KL term and with one: perplexity of an English
text that was written for this bench, and of GSM8K's solutions; nats per token from the start, on
answers of its own to held-out questions.

Every run has a process of its own, and runs that stand in FILE are not made again. Every line names
processor, threads, commit and versions. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.real import forgetting, parity, seconds, systems
from bench.real.runs import Line
from bench.real.task import add_flags
from bench.report import Figure
from dataflow.history.environment import environment
from dataflow.planning.this_machine import this_machine

LEARNING_STEPS, TIMED_STEPS = 60, 12
ROOT = Path(__file__).parent.parent.parent
CHILDREN: Mapping[str, Callable[[str, int, argparse.Namespace], dict[str, Any]]] = {
    parity.CASE: parity.run_arm,
    systems.CASE: systems.run_system,
    systems.PACE_CASE: systems.run_paced,
    forgetting.CASE: forgetting.run_forgetting,
    seconds.CASE: lambda name, _, options: seconds.run_part(name, options),
}
"""What a process of its own does, by case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part of the bench; the exit status is 1 when a run failed."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(argv)
    if options.child:
        case, name, seed, out = options.child
        Path(out).write_text(json.dumps(CHILDREN[case](name, int(seed), options)))
        return 0
    about = conditions(options.threads)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    lines = part_of(options)(options, argv, about)
    return int(any("failed" in line for line in lines))


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, with as many steps as the part that they ask for takes."""
    options = parser().parse_args(argv)
    if options.steps is None:
        options.steps = LEARNING_STEPS if options.parity or options.forgetting else TIMED_STEPS
    if options.systems:
        options.dtype = "float32"
    return options


def part_of(
    options: argparse.Namespace,
) -> Callable[[argparse.Namespace, Sequence[str], Mapping[str, Figure]], list[Line]]:
    """The part that was asked for."""
    if options.parity:
        return parity.parity
    if options.systems:
        return systems.systems
    if options.asynchronous:
        return systems.asynchronous
    return forgetting.forgetting if options.forgetting else seconds.seconds


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--systems", action="store_true", help="beside other systems")
    part.add_argument("--asynchronous", action="store_true", help="max_staleness 4 beside 0")
    part.add_argument("--parity", action="store_true", help="accuracy by staleness")
    part.add_argument(
        "--forgetting", action="store_true", help="perplexities before and after, KL to the start"
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of a run (default {LEARNING_STEPS}; {TIMED_STEPS} where steps are only timed)",
    )
    parser.add_argument(
        "--few-steps", type=int, default=2, help="of the slow systems (default: %(default)s)"
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=4,
        help="of the default and of --forgetting (%(default)s)",
    )
    parser.add_argument("--only", nargs="+", help="of the part's runs only these, by name")
    parser.add_argument(
        "--points", type=int, default=4, help="evaluations within a run of --parity (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=2, help="of each question at the end (default: %(default)s)"
    )
    parser.add_argument(
        "--kl", nargs="+", type=float, default=[0.0, 0.05], help="of --forgetting (default 0 0.05)"
    )
    parser.add_argument(
        "--gsm8k", type=Path, help="folder with GSM8K's test split, for --forgetting"
    )
    parser.add_argument(
        "--child", nargs=4, metavar=("CASE", "NAME", "SEED", "FILE"), help=argparse.SUPPRESS
    )
    add_flags(parser)
    return parser


def conditions(threads: int) -> dict[str, Figure]:
    """Under which the figures came about."""
    about = environment(this_machine())
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    versions = {name: about["packages"].get(name, "") for name in ("torch", "transformers")}
    return {
        "processor": about["processor"],
        "cpus": about["cpus"],
        "threads": threads,
        "commit": done.stdout.strip(),
        **versions,
    }


if __name__ == "__main__":
    raise SystemExit(main())
