"""`Demonstrations`: turns prompts with reference answers into rollouts of these answers, for
supervised training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from dataflow.errors import is_whole
from dataflow.model import Model
from dataflow.model_files import template_fault
from dataflow.node import Generate, SamplingTraits, Traits
from dataflow.records import PROMPT
from dataflow.runtime import Context, Runtime
from operators.generator import options_faults


@dataclass(frozen=True, eq=False)
class Demonstrations(Generate):
    """One rollout of every prompt: its tokens, those of the reference answer, and its end: the end
    token; of a chat, what ends a turn in the template.

    Prompts are laid out as a Generator lays them out, so that what is learned is what it will be
    asked for. The mask is true on the answer and its end. No policy drew these tokens: their
    logprobs are 0 and their versions -1, so a loss must not weigh them by ratios
    (`operators.losses.sft` does not), and nothing is ever too stale. No weights are needed, so no
    feedback edge is.

    >>> from dataflow import Graph, Model
    >>> from operators import Demonstrations, Prompts
    >>> prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    >>> shown = Demonstrations(Model("policies/sums"))(Graph("sums").source(prompts))
    >>> {"tokens", "mask"} <= set(shown.columns)
    True
    """

    light: ClassVar[bool] = True

    model: Model
    """Whose tokenizer and chat template are used."""
    _: KW_ONLY
    answer: str = "answer"
    """Column that holds the reference answer, a text."""
    chat: bool = False
    """Prompts are chat messages as JSON, laid out by the tokenizer's chat template."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """The chat template's own options, as those of a Generator."""
    context_tokens: int | None = None
    """Most tokens of a rollout; None: the model's own limit. Longer ones are recorded as failed."""

    @property
    def traits(self) -> Traits:
        """It lays prompts out."""
        return Traits(
            sampling=SamplingTraits(context_tokens=self.context_tokens),
            chat=self.chat,
            chat_options=self.chat_template_kwargs or {},
        )

    @property
    def uses(self) -> Model | None:
        """None: it reads no weights."""
        return None

    def missing(self) -> str | None:
        """A template, where prompts are chats."""
        return template_fault(self.model) if self.chat else None

    def reads(self) -> Mapping[str, Any]:
        """The prompt and the answer."""
        return {PROMPT: str, self.answer: str}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults = []
        if not isinstance(self.model, Model):
            faults.append(
                f"'{self.name}' has {self.model!r} as its model; give Model('path/to/folder')"
            )
        if not isinstance(self.answer, str) or not self.answer:
            faults.append(
                f"'{self.name}' has answer={self.answer!r}, which names no column; give one, as"
                " 'answer'"
            )
        faults += options_faults(self.name, self.chat, self.chat_template_kwargs)
        most = self.context_tokens
        if most is not None and not is_whole(most, 2):
            faults.append(
                f"'{self.name}' has context_tokens={most!r}; give a whole number of 2 or more, or"
                " None"
            )
        return faults

    def build(self, context: Context) -> Runtime:
        """Load the tokenizer. Raises ModelError when it cannot be, or when it names no end
        token.
        """
        from operators.sources.demonstration_runtime import DemonstrationRuntime

        return DemonstrationRuntime(
            self.model,
            node=context.node,
            answer=self.answer,
            chat=self.chat,
            options=self.chat_template_kwargs or {},
            context_tokens=self.context_tokens,
        )
