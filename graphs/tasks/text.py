"""The flags that every graph over text files has: which policy, which prompts, which reward, how large a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataflow import Graph, Model
from dataflow.node import Source, Transform
from dataflow.scorer import Scorer
from operators import Evaluate, Generator, Prompts
from operators.rewards import find

ANSWER = "answer"
"""Column in which rewards and demonstrations find the reference answer, whatever the file calls it."""


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A policy, the prompts it is trained on, and what its answers are worth."""

    policy: str
    """Hugging Face folder or id."""
    prompts: str
    """JSONL, Parquet or Arrow file, data set folder or id; issued in another order in every epoch."""
    held_out: str = ""
    """The same for evaluation; none when empty."""
    form: str = ""
    """Whose rows these are: verl, trl, verifiers, openrlhf or slime; empty: as --question and --answer say."""
    question: str = "prompt"
    """Column that holds the prompt."""
    answer: str = ANSWER
    """Column that holds the reference answer, which rewards read as `answer`; empty: there is none."""
    reward: str = "number"
    """exact, number (the last one in the text), math_verify, path/to/file.py:function, or one that was written for
    another system, as trl:path/to/file.py:function."""
    chat: bool = False
    """Lay prompts out by the tokenizer's chat template."""
    epochs: int | None = None
    """Times that all prompts are issued; again and again when left out."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    prompts_per_step: int = 64
    """Groups in an optimiser step."""
    group_size: int = 8
    """Rollouts of a prompt."""
    max_tokens: int = 1024
    """Longest completion."""
    context_tokens: int | None = None
    """Longest prompt and completion together; as the model's config says when left out."""
    eval_every: int = 50
    """Steps between evaluations."""
    dtype: str = "float32"
    """Type that the weights are computed in: float32 or bfloat16."""

    def scorer(self) -> Scorer[..., Any]:
        """The reward."""
        return find(self.reward)

    @property
    def model(self) -> Model:
        """The policy."""
        return Model(self.policy, dtype=self.dtype, context_tokens=self.context_tokens)

    @property
    def train(self) -> Source:
        """The prompts that are trained on."""
        return self._source(self.prompts, name="prompts", shuffle_seed=0, epochs=self.epochs)

    @property
    def test(self) -> Source | None:
        """The prompts that are evaluated."""
        return self._source(self.held_out, name="held_out", group_size=1) if self.held_out else None

    def generator(self) -> Generator:
        """What the policy writes rollouts with."""
        return Generator(self.model, group_size=self.group_size, max_tokens=self.max_tokens, chat=self.chat)

    def evaluate(self, g: Graph, generator: Generator, reward: Transform) -> None:
        """Score held-out prompts every so many steps, if there are any."""
        if self.test is not None:
            Evaluate(every_steps=self.eval_every, of=reward.name)(reward(generator(g.source(self.test))))

    def _source(self, source: str, **knobs: Any) -> Source:
        """Prompts with the reference answer as column `answer`, and under the name that the file has for it."""
        if self.form:
            return Prompts(source, form=self.form, chat=self.chat, **knobs)
        if self.answer in ("", ANSWER):
            return Prompts(
                source, columns=(self.answer,) * bool(self.answer), prompt_column=self.question, chat=self.chat, **knobs
            )

        def answered(row: Mapping[str, Any]) -> dict[str, Any]:
            return {**row, ANSWER: row.get(self.answer)}

        columns = (self.answer, ANSWER)
        return Prompts(source, rows=answered, columns=columns, prompt_column=self.question, chat=self.chat, **knobs)
