"""What the engine has to know of an operator's knobs to check a graph, to size it and to place it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Said by each operator of itself (`Operator.traits`); what does not concern it stays at its default."""

    tensor_parallel: int = 1
    """Processes that share out each layer of its model."""
    sleeps: bool = False
    """Whether its runtime can give its devices' memory back and take it again, so that it may share them in turns."""
    dp_replicate: int = 1
    """Copies of its model among a trainer's processes."""
    temperature: float | None = None
    """At which it samples, or computes log-probabilities; None: it does neither."""
    chat: bool | None = None
    """Whether it lays out prompts as chat messages; None: it reads no prompts as text."""
    compares_siblings: bool = False
    """Whether it needs groups of two rollouts or more."""

    epochs: int | None = None
    """How often a source issues its rows; None: without end, or not known."""
    group_size: int | None = None
    """Rollouts that a source asks for, of each prompt; None: as many as the generator makes."""

    in_flight: int | None = None
    """Most prompts that a generator holds at once; None: as many as the feedback allows."""
    max_tokens: int | None = None
    """Most tokens of a completion; None: not known."""
    context_tokens: int | None = None
    """Most tokens of prompt and completion; None: the model's own limit."""
    top_k: int = 0
    """Token ids among which each is drawn; 0: all."""
    slots: int = 1
    """Rollouts that are decoded at once."""
    cache_bytes: int | None = None
    """Budget for keys and values; None: what is free."""

    queue_prompts: int | None = None
    """Most prompts that a trainer holds beside those of its step; None: as many as the feedback allows."""
    copies_weights: bool | None = None
    """Whether a trainer's ranks send versions from copies of its weights, so that no update waits for a reader; None:
    as its plan has it."""
    micro_batch_tokens: int = 0
    """Tokens of one pass of a trainer; 0: not known."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes anew what the layers made."""
    every_steps: int | None = None
    """Steps between two rounds of an evaluation; None: it evaluates nothing."""
