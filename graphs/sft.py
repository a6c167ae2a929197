"""Supervised fine-tuning: the reference answers are the rollouts, and nobody generates but to evaluate.

python -m graphs.sft --policy FOLDER_OR_ID --prompts FILE --answer COLUMN --epochs 2
"""

from dataclasses import dataclass

from dataflow import Graph, main
from graphs.tasks.text import ANSWER, TextTask
from operators import Demonstrations, Trainer
from operators.losses import sft


@dataclass(frozen=True, kw_only=True)
class Task(TextTask):
    """A text task with a learning rate for supervised training."""

    lr: float = 1e-5
    """Learning rate of AdamW."""


def build(*, task: Task, warmup_steps: int = 20, schedule: str = "cosine") -> Graph:
    """Train a policy to write the reference answers.

    Args:
        task: what is trained on what; its reward is only evaluated.
        warmup_steps: steps over which the learning rate rises.
        schedule: what it does then: constant, linear or cosine, the latter two over --steps or --epochs.
    """
    g = Graph("sft")
    trainer = Trainer(
        task.model, loss=sft, lr=task.lr, prompts_per_step=task.prompts_per_step, warmup_steps=warmup_steps,
        schedule=schedule,
    )  # fmt: skip

    trainer(Demonstrations(task.model, answer=ANSWER, chat=task.chat)(g.source(task.train)))
    if task.held_out:
        generator = task.generator()
        task.evaluate(g, generator, task.scorer())
        g.feedback(trainer.weights, generator, max_staleness=1)
    return g


if __name__ == "__main__":
    main(build)
