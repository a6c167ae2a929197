"""The flags that every graph over text files has: which policy, which prompts, which reward, how large a step."""

from dataclasses import dataclass
from typing import Any

from dataflow.node import Source
from dataflow.scorer import Scorer
from operators import Prompts
from operators.rewards import find


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A policy, the prompts it is trained on, and what its answers are worth."""

    policy: str
    """Hugging Face folder or id."""
    prompts: str
    """JSONL, Parquet or Arrow file, data set folder or id, with a column `prompt` and the answer's."""
    held_out: str = ""
    """The same for evaluation; none when empty."""
    reward: str = "number"
    """exact, number (the last one in the text), or path/to/file.py:function."""
    answer: str = "answer"
    """Column that the reward compares with."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    prompts_per_step: int = 64
    """Groups in an optimiser step."""
    group_size: int = 8
    """Rollouts of a prompt."""
    max_tokens: int = 1024
    """Longest completion."""
    eval_every: int = 50
    """Steps between evaluations."""
    dtype: str = "float32"
    """Type that the weights are computed in: float32 or bfloat16."""

    def pipeline(self) -> dict[str, Any]:
        """These flags as arguments of `policy_gradient`."""
        return {
            "policy": self.policy, "prompts": self._source(self.prompts, "prompts", None),
            "held_out": self._source(self.held_out, "held_out", 1) if self.held_out else None,
            "reward": self.scorer(), "lr": self.lr, "prompts_per_step": self.prompts_per_step,
            "group_size": self.group_size, "max_tokens": self.max_tokens, "every_steps": self.eval_every,
            "dtype": self.dtype,
        }  # fmt: skip

    def scorer(self) -> Scorer[..., Any]:
        """The reward."""
        return find(self.reward)

    def _source(self, text: str, name: str, group_size: int | None) -> Source:
        return Prompts(text, columns=(self.answer,), name=name, group_size=group_size)
