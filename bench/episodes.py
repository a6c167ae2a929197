"""How busy episodes keep a generator whose worlds take their time: all of them at once, and one batch at a time.

    python -m bench.episodes --json FILE
    python -m bench.episodes --episodes 256 --scale 0.1        shorter

Each episode has `--turns` turns of the policy, and after each the world takes 0.1 to 30 s (Pareto with a heavy tail,
times `--scale`), drawn by its prompt. Both systems are the same graph, which trains a small policy: `at once` with a
staleness bound that lets all episodes begin, each waiting for its own world; `batches` with the bound 0, so that a
batch begins when the last episode of the one before has ended and was trained.

seconds       from the first turn to the last step
busy          share of them in which the generator was at work

episodes_per_s
worlds_s      that all worlds took, added up
longest_s     those of one episode
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Report
from dataflow import Graph, Model, run, scorer
from operators import Generator, Prompts, Trainer, episode
from operators.credit import advantage
from operators.losses import aipo
from operators.warm_start import warm_start

LONGEST_S, SHORTEST_S, SHAPE = 30.0, 0.1, 1.1
ALPHABET = "abcdefghijklmnopqrstuvwxyz="
GROUP_SIZE = 4


def world_s(number: int, turn: int, scale: float) -> float:
    """What the world of a prompt takes after a turn."""
    return scale * min(LONGEST_S, SHORTEST_S * random.Random(f"{number}/{turn}").paretovariate(SHAPE))


@episode(max_turns=64, concurrency=4096, timeout_s=120.0)
async def slow(chat: Any, number: int, turns: int = 4, scale: float = 1.0) -> float:
    """Turns with a world that takes its time; the share of what was said that stands early in the alphabet."""
    said = ""
    for turn in range(turns):
        said += await chat.say()
        await asyncio.sleep(world_s(number, turn, scale))
        chat.hear("=")
    return sum(letter < "h" for letter in said) / max(1, len(said))


@scorer(isolate=False)
def reward(slow: float) -> float:
    """As the episode has it."""
    return slow


def graph(policy: Path, wanted: argparse.Namespace, max_staleness: int) -> Graph:
    """Episodes of as many prompts as are asked for."""
    prompts = wanted.episodes // GROUP_SIZE
    g, model = Graph("slow_worlds"), Model(str(policy))
    rows = [{"prompt": f"{ALPHABET[n % 26]}=", "number": n} for n in range(prompts)]
    generator = Generator(model, group_size=GROUP_SIZE, max_tokens=wanted.tokens, slots=wanted.slots)
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=wanted.batch // GROUP_SIZE, lr=1e-4, normalize="rollouts"
    )
    played = slow(generator, g.source(Prompts(rows, columns=("number",))), turns=wanted.turns, scale=wanted.scale)
    trainer(advantage(reward(played)))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def measured(policy: Path, wanted: argparse.Namespace, max_staleness: int, runs: Path) -> Mapping[str, float]:
    """Figures of one run."""
    steps = wanted.episodes // wanted.batch
    result = run(graph(policy, wanted, max_staleness), steps=steps, runs=runs, quiet=True)
    assert result.verdict.clean, result.verdict.line
    times = json.loads((result.folder / "times.json").read_text())
    looks = [json.loads(line) for line in (result.folder / "activity.jsonl").read_text().splitlines()]
    began = next((look["seconds"] for look in looks if look["nodes"].get("generator", {}).get("tokens")), 0.0)
    ended = max(line["seconds"] for line in result.metrics if "loss" in line)
    seconds = ended - min(began, ended)
    return {
        "seconds": seconds, "busy": times["busy_seconds"]["generator"] / seconds,
        "episodes_per_s": wanted.episodes / seconds,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, and show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024, help="all together")
    parser.add_argument("--batch", type=int, default=128, help="of one step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="most of a turn")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that worlds take")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    numbers = range(wanted.episodes // GROUP_SIZE)
    each = [sum(world_s(number, turn, wanted.scale) for turn in range(wanted.turns)) for number in numbers]
    report = Report("episodes", wanted.json)
    case = f"{wanted.episodes} episodes of {wanted.turns} turns"
    with tempfile.TemporaryDirectory(prefix="dataflow-episodes-") as name:
        policy = warm_start(
            Path(name) / "policy",
            examples=[("a=", "b")] * 64,
            alphabet=ALPHABET,
            layers=2,
            width=64,
            heads=4,
            steps=1,
            seed=0,
        )
        steps = wanted.episodes // wanted.batch
        for system, max_staleness in (("at once", steps), ("batches", 0)):
            figures = measured(policy, wanted, max_staleness, Path(name) / system.replace(" ", "_"))
            report.add(case=case, system=system, **figures, worlds_s=GROUP_SIZE * sum(each), longest_s=max(each))
    report.show(Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
