"""How busy episodes keep a generator whose worlds take their time: all of them at once, one batch
at a time, and TRL.

    python -m bench.episodes --json FILE
    python -m bench.episodes --episodes 256 --scale 0.1   # shorter
    python -m bench.episodes --episodes 128 --batch 64 --scale 0.05 --trl PYTHON   # has trl
    python -m bench.episodes --trl PYTHON --trl-episodes 32 --only trl   # as many as time allows

Each episode has `--turns` calls of a tool by the policy, and for each the world takes 0.1 to 30 s
(Pareto with a heavy tail, times `--scale`), drawn by its prompt; then the policy speaks once more.
World, prompts and policy, a small Llama that answers with a call, are the same in all systems; the
world is a class as TRL's `environment_factory` takes it. Of ours both are the same graph, which
trains the policy: `at once` with a staleness bound that lets all episodes begin, each waiting for
its own world; `batches` with the bound 0, so that a batch begins when the last episode of the one
before has ended and was trained. `trl` is GRPOTrainer (transformers generates, not vLLM), a step
for each batch.

ran           episodes that were really run; of trl as many as --trl-episodes says, spread over all
seconds       from the first turn to the last step, of these
all_s         the same of all episodes; extrapolated where fewer ran: waiting for worlds as their
              time is to that of those that ran (both are known), all else as the number of episodes
              is
busy          share of them in which the generator was at work; of trl, in its method that makes one
              turn of a batch

episodes_per_s  of those that ran
worlds_s      that all worlds take, added up
longest_s     those of one episode
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.episodes.slow_world import SlowWorld, world_s
from bench.episodes.subset import evenly, seconds_of_all
from bench.report import Report
from dataflow import Graph, Model, run
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.environments import trl_environment
from operators.losses import aipo

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
GROUP_SIZE = 4
ROOT = Path(__file__).parents[2]
SYSTEMS = ("at once", "batches", "trl")
TRL_S = 900.0


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts, with what their worlds are drawn by."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{ALPHABET[n % 26]}="}],
            "number": n,
            "scale": options.scale,
        }
        for n in range(options.episodes // GROUP_SIZE)
    ]


def graph(policy: Path, options: argparse.Namespace, max_staleness: int) -> Graph:
    """Episodes of as many prompts as are asked for."""
    g, model = Graph("slow_worlds"), Model(str(policy))
    generator = Generator(
        model, group_size=GROUP_SIZE, max_tokens=options.tokens, slots=options.slots, chat=True
    )
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=options.batch // GROUP_SIZE,
        lr=1e-4,
        normalize="rollouts",
    )
    world = trl_environment(SlowWorld, rounds=options.turns, timeout_s=120.0, concurrency=4096)
    prompts = Prompts(rows_of(options), columns=("number", "scale"), chat=True)
    trainer(advantage(world(generator, g.source(prompts))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def measured(
    policy: Path, options: argparse.Namespace, max_staleness: int, runs: Path
) -> Mapping[str, float]:
    """Figures of one run."""
    steps = options.episodes // options.batch
    result = run(graph(policy, options, max_staleness), steps=steps, runs=runs, quiet=True)
    assert result.verdict.clean, result.verdict.line
    times = json.loads((result.folder / "times.json").read_text())
    looks = [
        json.loads(line) for line in (result.folder / "activity.jsonl").read_text().splitlines()
    ]
    idle = itertools.takewhile(
        lambda look: not look["nodes"].get("generator", {}).get("tokens"), looks
    )
    began = max((look["seconds"] for look in idle), default=0.0)
    ended = max(line["seconds"] for line in result.metrics if "loss" in line)
    seconds = ended - min(began, ended)
    return {
        "ran": options.episodes,
        "seconds": seconds,
        "all_s": seconds,
        "busy": times["busy_seconds"]["generator"] / seconds,
        "episodes_per_s": options.episodes / seconds,
    }


def worlds_s(numbers: Sequence[int], options: argparse.Namespace) -> list[float]:
    """What the worlds of a group of episodes take, by the number of its prompt; all episodes of the
    group together.
    """
    turns = range(options.turns)
    return [
        GROUP_SIZE * sum(world_s(number, turn, options.scale) for turn in turns)
        for number in numbers
    ]


def trl_measured(policy: Path, options: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    """Figures of TRL's trainer, in a process of the other interpreter; why there are none."""
    ran = min(options.trl_episodes or options.episodes, options.episodes)
    rows = evenly(rows_of(options), ran // GROUP_SIZE)
    settings = {
        "policy": str(policy),
        "rows": rows,
        "episodes": ran,
        "batch": min(options.batch, ran),
        "group_size": GROUP_SIZE,
        "turns": options.turns,
        "completion": (options.turns + 1) * (options.tokens + 16),
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    done = subprocess.run(
        [options.trl, "-m", "bench.episodes.trl_arm", str(file)],
        capture_output=True,
        text=True,
        timeout=TRL_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"},
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr.strip()[-500:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    waited_s, seconds = figures.pop("waited_s"), figures["seconds"]
    numbers = range(options.episodes // GROUP_SIZE)
    worlds_share = sum(worlds_s([row["number"] for row in rows], options)) / sum(
        worlds_s(numbers, options)
    )
    all_s = seconds_of_all(
        seconds, waited_s, share=ran / options.episodes, worlds_share=worlds_share
    )
    return {"ran": ran, "all_s": seconds if ran == options.episodes else all_s, **figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them, and show them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1024, help="all together")
    parser.add_argument("--batch", type=int, default=128, help="of one step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="most of a turn")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that worlds take")
    parser.add_argument(
        "--trl", metavar="PYTHON", help="an interpreter that has trl, for TRL's arm"
    )
    parser.add_argument(
        "--trl-episodes", type=int, help="that it runs, where all take too long; a multiple of 4"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="which systems (default all)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    world_s = worlds_s(range(options.episodes // GROUP_SIZE), options)
    report = Report("episodes", options.json)
    case = f"{options.episodes} episodes of {options.turns} calls"
    worlds = {"worlds_s": sum(world_s), "longest_s": max(world_s) / GROUP_SIZE}
    with tempfile.TemporaryDirectory(prefix="dataflow-episodes-") as name:
        policy = Path(name) / "policy"
        subprocess.run(
            [sys.executable, "-m", "bench.episodes.tool_caller", str(policy)], check=True, cwd=ROOT
        )
        steps = options.episodes // options.batch
        for system, max_staleness in (("at once", steps), ("batches", 0)):
            if system not in options.only:
                continue
            figures = measured(
                policy, options, max_staleness, Path(name) / system.replace(" ", "_")
            )
            report.add(case=case, system=system, **figures, **worlds)
        if options.trl and "trl" in options.only:
            report.add(
                case=case, system="trl", **trl_measured(policy, options, Path(name)), **worlds
            )
        elif "trl" in options.only:
            report.add(case=case, system="trl", skipped="--trl names no interpreter that has trl")
    report.show(Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
