"""On-policy distillation: the policy writes, a teacher says how likely each token was to it; no
reward is needed.

python -m graphs.distill --policy FOLDER_OR_ID --teacher FOLDER_OR_ID --prompts FILE --answer ""
"""

from dataclasses import replace
from functools import partial

from dataflow import Graph, main
from graphs.tasks.options import refuse_idle
from graphs.tasks.text import TextTask
from operators.losses import distill


def build(*, task: TextTask, teacher: str, max_staleness: int = 4, rho: float = 4.0) -> Graph:
    """Train a policy towards a teacher on the policy's own rollouts (GKD, arXiv 2306.13649, reverse
    KL).

    Args:
        task: what is trained on what; its reward is only evaluated.
        teacher: folder or id of a model with the policy's tokenizer.
        max_staleness: versions a trained rollout's oldest token may be behind; 0 is synchronous.
        rho: cap of the importance weight.
    """
    if not task.held_out:
        refuse_idle(
            task, ("reward",), "the teacher judges, and nothing is evaluated without --held-out"
        )
    g = Graph("distill")
    generator = task.generator()
    judge = task.logprobs(
        replace(task.model.frozen(), source=teacher, name="teacher"), name="teacher_logprobs"
    )
    trainer = task.trainer(loss=partial(distill, rho=rho))

    trainer(judge(generator(g.source(task.train))))
    task.evaluate(g, generator, task.scorer())
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


if __name__ == "__main__":
    main(build)
