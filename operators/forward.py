"""What reads rollouts with a model and does not train it: reference, critic, judge; imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dataflow.runtime import Context, Runtime
from operators.forward_pass.knobs import ForwardKnobs, LogprobsKnobs, RewardKnobs


@dataclass(frozen=True, eq=False)
class ForwardOperator(ForwardKnobs):
    """Adds a column of its name to rollouts, by one forward pass; see `ForwardKnobs`."""

    def preload(self) -> None:
        """Import torch, the model's code and the runtime."""
        import operators.forward_pass.build  # noqa: F401
        from operators.models.loading import preload

        preload(self.model)

    def build(self, context: Context) -> Runtime:
        """Load the model and make the runtime. Raises ModelError when it cannot be."""
        from operators.forward_pass.build import build

        return build(self, context)


@dataclass(frozen=True, eq=False)
class Logprobs(LogprobsKnobs, ForwardOperator):
    """Log-probabilities of the chosen tokens under a model: a reference, a teacher, or the proximal
    policy.

    They are those of the distribution that the trainer's `new_logprobs` belong to: at the same
    temperature and, where rows carry a sampling mask, over the ids that it names alone. A KL
    between the two then compares distributions over the same tokens, and is 0 where the weights are
    equal.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Logprobs, Prompts
    >>> policy, prompts = Model("policies/sums"), Prompts(["2+2="])
    >>> rollouts = Generator(policy)(Graph("sums").source(prompts))
    >>> "ref_logprobs" in Logprobs(policy.frozen())(rollouts).columns
    True
    """


@dataclass(frozen=True, eq=False)
class Values(ForwardOperator):
    """What a critic expects: at each chosen token the value of all that stands before it, read at
    the token before.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, Values
    >>> rollouts = Generator(Model("policies/sums"))(Graph("sums").source(Prompts(["2+2="])))
    >>> "values" in Values(Model("policies/sums", head="value", name="critic"))(rollouts).columns
    True
    """

    head: ClassVar[str] = "value"


@dataclass(frozen=True, eq=False)
class RewardModel(RewardKnobs, ForwardOperator):
    """What a sequence classifier thinks of prompt and completion, a number per rollout or
    (per="step") per step.

    The text is laid out and tokenized anew, so the judge may have another tokenizer than the
    policy.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, RewardModel
    >>> rollouts = Generator(Model("policies/sums"))(Graph("sums").source(Prompts(["2+2="])))
    >>> judge = RewardModel(Model("judges/sums", head="score").frozen(), name="reward")
    >>> "reward" in judge(rollouts).columns
    True
    """
