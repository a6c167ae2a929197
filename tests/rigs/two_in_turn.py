"""A program: a generator and a trainer, in turns on one memory or not. POLICY FOLDER WAY STEPS
RANKS.

The generator has RANKS. It prints what it made.
Each leaves its process's number in FOLDER/pids as it begins to be built.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dataflow import Devices, Graph, Model, run
from dataflow.folder.run_folder import RunFolder
from dataflow.node import Operator
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo
from rigs.graphs import reward, words
from rigs.operators import built_by

O = TypeVar("O", bound=Operator)  # noqa: E741


def marked(operator: O, folder: Path) -> O:
    """The same operator, which tells where it is built."""

    def build(context: Any) -> Any:
        (folder / operator.name).write_text(str(os.getpid()))
        return type(operator).build(operator, context)

    return built_by(operator, build)


def graph(policy: str, pids: Path, ranks: int) -> Graph:
    """Two prompts a step, short completions."""
    g, model = Graph("pair"), Model(policy)
    generator = marked(
        Generator(
            model,
            group_size=2,
            max_tokens=8,
            segment_tokens=4,
            slots=8,
            cache_bytes=64 << 20,
            tensor_parallel=ranks,
        ),
        pids,
    )
    trainer = marked(Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=2, lr=1e-4), pids)
    trainer(advantage(reward(generator(g.source(Prompts(words(), columns=("answer",)))))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    return g


def main(policy: str, folder: str, way: str, steps: str, ranks: str) -> None:
    """Run it, and say what it made."""
    sys.modules["dataflow.runner"].this_machine = lambda: Devices(cpus=1)  # type: ignore[attr-defined]
    pids = Path(folder) / "pids"
    pids.mkdir(parents=True)
    gpus: Any = "shared" if way == "shared" else None
    made = graph(policy, pids, int(ranks))
    result = run(made, steps=int(steps), gpus=gpus, runs=Path(folder) / "runs", quiet=True)
    rollouts = [
        RunFolder.open(result.folder).rollouts_of().read(step + 1) for step in range(result.steps)
    ]
    print(
        json.dumps(
            {
                "clean": result.verdict.clean,
                "losses": [(line["loss"], line["grad_norm"]) for line in result.metrics],
                "tokens": [table.column("tokens").to_pylist() for table in rollouts],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
