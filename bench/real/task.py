"""What all parts of the bench train on what: sums and differences in the model's own chat, and the
graph of it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from dataflow import Graph, Model
from dataflow.node import Operator, Source
from graphs import arithmetic
from graphs.tasks import questions
from operators import Evaluate, Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage
from operators.generator import WEIGHTS
from operators.losses import aipo, rloo, with_kl
from operators.rewards import find

Row = dict[str, str]
RHO = 4.0
TASKS = ("sums", "products", "chains")
DRAWN = 20
"""Questions that are drawn for each that is wanted: some come again."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One setting of the run, the same for every part and system."""

    policy: str
    """Folder, id, or package of the model."""
    train: tuple[Row, ...]
    """{"prompt", "answer"}."""
    held_out: tuple[Row, ...]
    """Never trained."""
    prompts_per_step: int
    group_size: int
    max_tokens: int
    lr: float
    chat: bool
    dtype: str
    """Type that weights are computed in."""
    weights: Literal["model", "int8", "int8_dynamic", "fp8"]
    """How the generator's linear layers compute."""

    @property
    def model(self) -> Model:
        """The policy."""
        return Model(self.policy, dtype=self.dtype)

    @property
    def rollouts_per_step(self) -> int:
        """Of all groups."""
        return self.prompts_per_step * self.group_size

    def generator(self, model: Model | None = None, **knobs: Any) -> Generator:
        """Rollouts of the policy, or of another model, laid out as the task lays them out."""
        usual = self.usual["generator"]
        assert isinstance(usual, Generator)
        return replace(
            usual,
            model=model or self.model,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            chat=self.chat,
            weights=self.weights,
            **knobs,
        )

    @cached_property
    def usual(self) -> Mapping[str, Operator]:
        """The operators of graphs.arithmetic, whose knobs are the bench's too where the task says
        nothing else.
        """
        return arithmetic.build(task=questions.QuestionTask(policy=self.policy)).operators

    def prompts(self, rows: Sequence[Row], **knobs: Any) -> Prompts:
        """These rows as a source."""
        return Prompts(list(rows), columns=("answer",), chat=self.chat, **knobs)

    def graph(
        self,
        name: str,
        prompts: Source,
        *,
        max_staleness: int,
        corrected: bool = True,
        kl: float = 0.0,
        held_out: Source | None = None,
        every_steps: int = 1,
    ) -> Graph:
        """AIPO on `prompts`; the run ends with them.

        corrected: False: plain policy gradient, without importance weights. kl: what a nat from the
        start costs.
        """
        g, reward = Graph(name), find("number")
        generator = self.generator()
        loss: Callable[..., Any] = partial(aipo, rho=RHO) if corrected else rloo
        rollouts = generator(g.source(prompts))
        if kl:
            rollouts = Logprobs(self.model.frozen())(rollouts)
            loss = with_kl(loss, kl, corrected=max_staleness > 0)
        usual = self.usual["trainer"]
        assert isinstance(usual, Trainer)
        trainer = replace(
            usual,
            model=self.model,
            loss=loss,
            prompts_per_step=self.prompts_per_step,
            lr=self.lr,
            recover_within_s=math.inf,
        )
        trainer(advantage(reward(rollouts)))
        if held_out is not None:
            Evaluate(every_steps=every_steps)(reward(generator(g.source(held_out))))
        g.feedback(trainer.weights, generator, max_staleness=max_staleness)
        return g


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `task_of` reads; what graphs.arithmetic has as well is as it is there."""
    usual = {field.name: field.default for field in fields(questions.QuestionTask)}
    flags = parser.add_argument_group("the task")
    flags.add_argument(
        "--policy", default=usual["policy"], help="folder, id or package (default: %(default)s)"
    )
    flags.add_argument("--task", choices=TASKS, default=usual["task"], help="default: %(default)s")
    for name in ("prompts_per_step", "group_size", "max_tokens"):
        flags.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=usual[name],
            help="default: %(default)s",
        )
    flags.add_argument("--lr", type=float, default=usual["lr"], help="default: %(default)s")
    flags.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=usual["dtype"],
        help="default: %(default)s",
    )
    flags.add_argument(
        "--weights", choices=WEIGHTS, default="model", help="of the generator's linear layers"
    )
    flags.add_argument(
        "--no-chat",
        action="store_true",
        help="prompts as they stand, for a model without a template",
    )
    flags.add_argument(
        "--threads", type=int, default=2, help="of systems that settle none (default: %(default)s)"
    )
    flags.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    flags.add_argument(
        "--questions", type=int, default=512, help="that are held out (default: %(default)s)"
    )


def task_of(options: argparse.Namespace) -> Task:
    """The task that the flags name."""
    return Task(
        policy=options.policy,
        train=tuple(questions.rows(options.task, questions.TRAINED, seed=0)),
        held_out=distinct(options.task, options.questions),
        prompts_per_step=options.prompts_per_step,
        group_size=options.group_size,
        max_tokens=options.max_tokens,
        lr=options.lr,
        chat=not options.no_chat,
        dtype=options.dtype,
        weights=options.weights,
    )


def folder_of(policy: str) -> Path:
    """The Hugging Face folder of a policy, for those that read nothing else."""
    from dataflow.gguf.conversion import converted
    from dataflow.model import is_gguf

    folder = converted(policy) if is_gguf(policy) else Path(policy)
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"--policy {policy} is no folder with a config.json; give one, or a GGUF file"
        )
    return folder.absolute()


def distinct(task: str, count: int) -> tuple[Row, ...]:
    """So many held-out questions, each once; fewer where the task has no more."""
    drawn = questions.rows(task, DRAWN * count, seed=1, held_out=True)
    by_prompt = {row["prompt"]: row for row in drawn}
    return tuple(by_prompt.values())[:count]
