"""Generator: turns prompts into rollouts of a language model whose weights may change midway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dataflow.model import Model
from dataflow.node import Context, Generate

if TYPE_CHECKING:
    from operators.engine.runtime import GeneratorRuntime


@dataclass(frozen=True, eq=False)
class Generator(Generate):
    """Samples `group_size` rollouts of every prompt with the model's newest weights.

    Sequences live in slots of a KV-cache and are decoded together, one token each per step; a slot that a
    finished rollout leaves is refilled at the next step.
    """

    model: Model
    """The policy."""
    group_size: int = 8
    """Rollouts of a prompt that does not say."""
    max_tokens: int = 256
    """Most tokens of a completion."""
    segment_tokens: int = 32
    """Decode steps between two returns to the worker's loop."""
    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1: all."""
    stop: tuple[str, ...] = ()
    """Strings at which a completion ends; they are not part of it."""
    slots: int = 256
    """Sequences in the KV-cache at once."""
    in_flight: int | None = None
    """Most prompts between admission and training; None: as many as the staleness bound allows."""
    context_tokens: int | None = None
    """Most tokens of prompt and completion together; None: the model's own limit."""
    on_update: Literal["keep"] = "keep"
    """What becomes of unfinished rollouts when weights change: keep (go on from their keys and values)."""
    chat: bool = False
    """Prompts are chat messages as JSON, laid out by the tokenizer's chat template."""

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts in a group, where the prompt does not say."""
        return self.group_size

    def faults(self) -> list[str]:
        """Knobs that cannot be right, each as: what is wrong, what was found, what to do."""
        found = [
            f"'{self.name}' needs {knob} of at least {least}, but got {value!r}; raise it"
            for knob, least, value in (
                ("group_size", 1, self.group_size),
                ("max_tokens", 1, self.max_tokens),
                ("segment_tokens", 1, self.segment_tokens),
                ("slots", 1, self.slots),
                ("in_flight", 1, 1 if self.in_flight is None else self.in_flight),
                ("context_tokens", 2, 2 if self.context_tokens is None else self.context_tokens),
                ("top_k", 0, self.top_k),
            )
            if not _is_whole(value) or value < least
        ]
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            found.append(
                f"'{self.name}' needs a temperature of 0 or more, but got {self.temperature!r}; "
                f"use 1.0 to sample from the policy itself, 0 for the likeliest token"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            found.append(f"'{self.name}' needs top_p above 0 and at most 1, but got {self.top_p!r}; use 1.0 for all")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            found.append(
                f"'{self.name}' needs stop as a tuple of strings that are not empty, but got {self.stop!r}; "
                f'give it as stop=("END",)'
            )
        if self.on_update != "keep":
            found.append(f"'{self.name}' got on_update={self.on_update!r}, which is not known; use \"keep\"")
        if isinstance(self.model, Model) and self.model.head != "lm":
            found.append(
                f"'{self.name}' generates with model '{self.model.name}', whose head is {self.model.head!r}; "
                f'give it a Model with head="lm"'
            )
        return found

    def build(self, context: Context) -> GeneratorRuntime:
        """Load the model and make the engine. Raises ModelError when either cannot be."""
        from operators.engine.runtime import GeneratorRuntime

        return GeneratorRuntime(self, context)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
