"""On-policy distillation: the policy writes, a teacher says how likely each token was to it; no reward is needed.

python -m graphs.distill --policy FOLDER_OR_ID --teacher FOLDER_OR_ID --prompts FILE --answer ""
"""

from dataclasses import replace
from functools import partial

from dataflow import Graph, main
from graphs.tasks.text import TextTask
from operators import Logprobs, Trainer
from operators.losses import distill


def build(*, task: TextTask, teacher: str, max_staleness: int = 4, rho: float = 4.0) -> Graph:
    """Train a policy towards a teacher on the policy's own rollouts (GKD, arXiv 2306.13649, reverse KL).

    Args:
        task: what is trained on what; its reward is only evaluated.
        teacher: folder or id of a model with the policy's tokenizer.
        max_staleness: versions that the oldest token of a trained rollout may be behind; 0 is synchronous.
        rho: cap of the importance weight.
    """
    g = Graph("distill")
    generator = task.generator()
    judge = Logprobs(replace(task.model, source=teacher, name="teacher").frozen(), name="teacher_logprobs")
    trainer = Trainer(task.model, loss=partial(distill, rho=rho), lr=task.lr, prompts_per_step=task.prompts_per_step)

    trainer(judge(generator(g.source(task.train))))
    task.evaluate(g, generator, task.scorer())
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
