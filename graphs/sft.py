"""Supervised fine-tuning: the reference answers are the rollouts, and nobody generates but to
evaluate.

python -m graphs.sft --policy FOLDER_OR_ID --prompts FILE --answer COLUMN --epochs 2
"""

from dataclasses import dataclass, fields
from typing import Literal

from dataflow import Graph, main
from graphs.tasks.options import GenerationFlags, refuse_idle
from graphs.tasks.text import ANSWER, TrainedText
from operators import Demonstrations
from operators.losses import sft


@dataclass(frozen=True, kw_only=True)
class Task(TrainedText):
    """A text task with a learning rate for supervised training."""

    lr: float = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """What the learning rate does after the warm-up; linear and cosine fall to --min-lr over
    --steps or --epochs."""


EVALUATION = ("reward", "max_tokens", *(field.name for field in fields(GenerationFlags)))
"""Flags that only evaluation reads."""


def build(*, task: Task) -> Graph:
    """Train a policy to write the reference answers; what it generates is only evaluated."""
    g = Graph("sft")
    trainer = task.trainer(loss=sft)

    trainer(Demonstrations(task.model, answer=ANSWER, chat=task.chat)(g.source(task.train)))
    if task.held_out:
        generator = task.generator()
        task.evaluate(g, generator, task.scorer())
        g.feedback(trainer.weights, generator, max_staleness=1)
    else:
        refuse_idle(task, (*EVALUATION, "eval_every"), "nothing is evaluated without --held-out")
    return g


if __name__ == "__main__":
    main(build)
