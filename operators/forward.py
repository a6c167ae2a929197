"""What reads rollouts with a model and does not train it: reference, critic, judge; imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal

import pyarrow as pa

from dataflow.errors import is_whole
from dataflow.model import Model
from dataflow.node import Operator, SamplingTraits, Split, Traits, Transform
from dataflow.records import (
    COMPLETION,
    ERROR,
    LOGPROBS,
    MASK,
    PROMPT,
    TOKEN_NUMBERS,
    TOKENS,
    VERSIONS,
    Columns,
    version_column,
)
from dataflow.runtime import Context, Runtime


@dataclass(frozen=True, eq=False)
class ForwardOperator(Transform):
    """Adds a column of its name to rollouts; rows with an error, or a reason to be dropped, get
    null there.

    A group waits until weights of the version that it needs have come
    (`operators.forward_pass.build`).
    """

    model: Model
    """What reads the rollouts. Frozen; or fed by its trainer: g.feedback(trainer.weights, this,
    max_staleness=n); or refreshed: g.feedback(trainer.weights, this, every=n)."""
    _: KW_ONLY
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass; prompts that a group has in common count once."""
    tensor_parallel: int = 1
    """Processes that share out each layer's matrices; each takes its own part of a version of the
    weights."""

    head: ClassVar[str]
    """Which the model has to have."""

    @property
    def column(self) -> pa.DataType:
        """Type of the column it writes."""
        return TOKEN_NUMBERS

    @property
    def traits(self) -> Traits:
        """How many processes it takes; it may share its devices."""
        return Traits(split=Split(tensor_parallel=self.tensor_parallel), sleeps=True)

    def reads(self) -> Mapping[str, Any]:
        """The rollout's tokens, and the columns that say which of them count."""
        return {
            TOKENS: list[int],
            MASK: list[bool],
            LOGPROBS: list[float],
            VERSIONS: list[int],
            ERROR: str,
        }

    def provides(self, columns: Columns) -> Columns:
        """Its input's columns, `error` where failures are recorded, its own, and the version of the
        weights that made it.
        """
        return {
            **columns,
            ERROR: pa.string(),
            self.name: self.column,
            version_column(self.name): pa.int32(),
        }

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults = []
        if not isinstance(self.model, Model):
            faults.append(
                f"'{self.name}' reads with {self.model!r}, which is no Model; give"
                " Model('path/to/folder')"
            )
        elif self.model.head != self.head:
            faults.append(
                f"'{self.name}' needs a model with head '{self.head}', but '{self.model.name}' has"
                f" head '{self.model.head}'; give it Model(..., head='{self.head}')"
            )
        for knob in ("micro_batch_tokens", "tensor_parallel"):
            value = getattr(self, knob)
            if not is_whole(value, 1):
                faults.append(
                    f"'{self.name}' has {knob}={value!r}; give a whole number of 1 or more"
                )
        return faults

    def preload(self) -> None:
        """Import torch, the model's code and the runtime."""
        import operators.forward_pass.build  # noqa: F401
        from operators.models.loading import preload

        preload(self.model)

    def build(self, context: Context) -> Runtime:
        """Load the model and make the runtime. Raises ModelError when it cannot be."""
        from operators.forward_pass.build import build

        return build(self, context)

    def follower(self, context: Context, told: Mapping[str, Any]) -> Callable[[int, int], int]:
        """What a rank runs on another host than rank 0's
        (`dataflow.system.rank_places.Spreads`).
        """
        from operators.forward_pass.ranks import follower

        return follower(self, context, told)


@dataclass(frozen=True, eq=False)
class Logprobs(ForwardOperator):
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

    head: ClassVar[str] = "lm"

    name: str = field(default="ref_logprobs", kw_only=True)
    temperature: float = 1.0
    """That the generator samples at."""

    @property
    def traits(self) -> Traits:
        """Its temperature has to be the generator's."""
        return replace(super().traits, sampling=SamplingTraits(temperature=self.temperature))

    def at_temperature(self, temperature: float) -> Operator:
        """Of rows that say nothing else it takes log-probabilities at that one."""
        return replace(self, temperature=temperature)

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults, temperature = super().faults(), self.temperature
        if (
            isinstance(temperature, bool)
            or not isinstance(temperature, int | float)
            or not 0 < temperature < math.inf
        ):
            faults.append(
                f"'{self.name}' has temperature={temperature!r}; give a number above 0, the"
                " generator's"
            )
        return faults


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
class RewardModel(ForwardOperator):
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

    head: ClassVar[str] = "score"

    name: str = field(default="score", kw_only=True)
    per: Literal["rollout", "step"] = "rollout"
    """rollout: one number, read at the end of the text. step: a number at the last token of each
    step, 0 elsewhere."""
    cut: str = "\n\n"
    """What steps end with."""
    chat: bool = False
    """Lay the text out by the judge's chat template: prompts are messages as JSON, or else the
    user's words."""
    suffix: str = ""
    """Text behind each completion, such as the end token that the judge was trained with."""
    policy: Model | None = None
    """Whose tokenizer made the tokens, to find the last one of each step; None: the judge's own
    did."""

    @property
    def traits(self) -> Traits:
        """It reads prompts as text."""
        return replace(super().traits, chat=self.chat)

    @property
    def column(self) -> pa.DataType:
        """A number per rollout, or per token."""
        return TOKEN_NUMBERS if self.per == "step" else pa.float64()

    def reads(self) -> Mapping[str, Any]:
        """The texts too."""
        return {PROMPT: str, COMPLETION: str, **super().reads()}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults = super().faults()
        if self.per not in ("rollout", "step"):
            faults.append(
                f"'{self.name}' has per={self.per!r}, which is not known; use 'rollout' or 'step'"
            )
        if not isinstance(self.cut, str) or not self.cut:
            faults.append(
                f"'{self.name}' has cut={self.cut!r}; give the text that steps end with, such as"
                " '\\n\\n'"
            )
        return faults
