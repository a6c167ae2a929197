"""The run that bench.chaos disturbs: the calculator task with a scorer that hangs and crashes now
and then.

    python -m bench.chaos.run --prompts train.jsonl --eval test.jsonl --steps 100

`drawn.jsonl` in its folder says which groups a generator began and finished, and when, over all of
its attempts.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.learning.algorithms import examples
from dataflow import Graph, Model, main, scorer
from dataflow.runtime import Context
from graphs.tasks import calculator
from operators import Evaluate, Generator, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo

if TYPE_CHECKING:
    from operators.generation.runtime import GeneratorRuntime

CRASH_STATUS = 13
TINY = {"layers": 1, "width": 16, "steps": 2}
TINY_ROWS = 16


@scorer(timeout_s=1.0, processes=2)
def reward(
    completion: str,
    answer: str,
    rollout_id: int,
    hang: float = 0.0,
    crash: float = 0.0,
    seed: int = 0,
) -> float:
    """The task's; but of a share of the rollouts it never returns, and of another its process ends.

    Which ones they are depends on the seed and the rollout's number alone, so no answer is spared
    or struck more often.
    """
    draw = random.Random(f"{seed}/{rollout_id}").random() if hang or crash else 1.0
    if draw < hang:
        while True:
            time.sleep(0.01)
    if draw < hang + crash:
        os._exit(CRASH_STATUS)
    return calculator.reward(completion, answer)


class Counted(Generator):
    """A generator that writes down which groups it began and finished."""

    def build(self, context: Context) -> GeneratorRuntime:
        """The engine, with its book."""
        from bench.chaos.drawing import Counting

        return Counting(self, context)


def build(
    *,
    prompts: str = "",
    eval: str = "",
    policy: str = "policies/calculator",
    max_staleness: int = 4,
    eval_every: int = 50,
    checkpoint_every: int = 25,
    hang: float = 0.0,
    crash: float = 0.0,
    tiny: bool = False,
) -> Graph:
    """The calculator's graph under faults.

    Args:
        prompts: GSM8K's train.jsonl; made-up steps of the same forms when empty.
        eval: the same for evaluation: test.jsonl.
        policy: folder of the policy; made there by a supervised warm start if it is not there yet.
        max_staleness: versions that the oldest token of a trained rollout may be behind.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints.
        hang: share of the rollouts whose scorer never returns.
        crash: share of the rollouts whose scorer ends its process.
        tiny: a tiny policy, few prompts, small steps, to try the code.
    """
    most = TINY_ROWS if tiny else None
    size: dict[str, Any] = TINY if tiny else {}
    rows, held_out = examples(prompts, held_out=False), examples(eval, held_out=True)[:most]
    g, model = Graph("chaos"), Model(str(calculator.warm(policy, prompts, **size)))
    generator = Counted(
        model, group_size=4 if tiny else 8, max_tokens=calculator.MAX_TOKENS, name="generator"
    )
    faulty = reward.configured(hang=hang, crash=crash) if hang or crash else reward
    trainer = Trainer(
        model,
        loss=partial(aipo, rho=4.0),
        prompts_per_step=4 if tiny else 32,
        lr=1e-4,
        normalize="rollouts",
        warmup_steps=20,
        checkpoint_every=checkpoint_every,
    )
    source = Prompts(rows, columns=("answer",), shuffle_seed=0)
    trainer(advantage(faulty(generator(g.source(source)))))
    questions = Prompts(held_out, columns=("answer",), name="held_out", group_size=1)
    Evaluate(every_steps=eval_every)(faulty(generator(g.source(questions))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
