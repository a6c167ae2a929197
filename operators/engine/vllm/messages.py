"""What a generator's worker and vLLM's process say to each other, over a socket pair that has no
name: its other end is inherited, so nobody else can connect, and either side notices the end of the
other.

    Open (once, first)   Ready
    Step                 Stepped
    Listen               Offered
    Update               Updated
                         Failed, and then the end of the stream

Requests are answered in their order, and a step is made only when it is asked for.
"""

from __future__ import annotations

from typing import Any

from dataflow.limits import Limits
from dataflow.records import AnyArray
from dataflow.system.messages import Codec, Message, Plain, Secret, field
from dataflow.weight_ends import WeightSite

MOST_BYTES = 1 << 30
"""Of one message."""


class Adapters(Message, kw_only=True):
    """Low-rank adapters beside layers of the model, of which they alone travel."""

    layers: dict[str, tuple[str, str, float]]
    """By the path of a layer, the trainer's names of its A and B, and what B @ A is multiplied
    by."""
    room: int
    """The rank that vLLM makes room for."""
    start: str | None
    """The folder whose adapters they begin with; None: they change nothing at first."""


class Open(Secret, kw_only=True):
    """Load the model, and open the ends of the weight plane."""

    model: str
    """Its folder."""
    dtype: str
    trust_remote_code: bool
    slots: int
    context_tokens: int
    prefill_tokens: int
    ranks: int
    """Processes that share out the model."""
    cache_bytes: int | None
    """Of each rank."""
    cache_budget: int
    """Bytes that the caches may take together on processors, where `cache_bytes` is None."""
    page_tokens: int | None
    recomputes: bool
    """Whether unfinished rollouts are prefilled again under new weights."""
    arguments: dict[str, Plain]
    """Further ones of vLLM's `EngineArgs`, by name."""
    shapes: dict[str, tuple[int, ...]]
    """Of the tensors that the trainer sends, by its names."""
    adapters: Adapters | None
    """Where these are of adapters."""
    site: WeightSite | None
    """Where versions are offered; None: the weights stay as they are."""
    attempt: int
    """The scheduler's, at this worker."""
    limits: Limits


class Start(Message, kw_only=True):
    """Rollouts that start with the same tokens."""

    prompt: AnyArray
    most: int
    """New tokens."""
    tickets: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: dict[str, Plain]
    """By the fields of `Sampling`."""
    ends: tuple[int, ...]


class Step(Message, kw_only=True):
    """Take rollouts out, start others, and draw one token for each."""

    starts: tuple[Start, ...] = ()
    aborts: tuple[int, ...] = ()


class Listen(Message):
    """Say what the trainer offers."""


class Update(Message):
    """Take the newest version that is offered, on all ranks or on none."""


class Ready(Message, kw_only=True):
    """The model is loaded."""

    vllm: str
    """Its version."""
    platform: str
    cache_tokens: int
    """Positions that the KV-cache holds."""
    bytes_held: tuple[int, ...]
    """Of a version, by rank."""
    unseen: tuple[str, ...]
    """Kinds of layers that could not be seen to compute with what they are given."""


class Offered(Message, kw_only=True):
    """What the trainer offers."""

    version: int = -1
    """-1: nothing that could be taken now."""
    note: dict[str, int | float | str] = field(default_factory=dict)
    """The trainer's newest."""


class Stepped(Message, kw_only=True):
    """One entry for each new token."""

    version: int
    """That they were drawn with."""
    tickets: AnyArray
    tokens: AnyArray
    logprobs: AnyArray
    ended: tuple[int, ...]
    reasons: tuple[str, ...]
    """stop | length | error, of each that ended."""
    offered: Offered


class Updated(Message, kw_only=True):
    """Tokens are drawn with this version from now on."""

    version: int
    seconds: float
    """That it held decoding up."""
    offered: Offered


class Failed(Message):
    """What has ended the process."""

    error: str


CODEC: Codec[Any] = Codec(
    "vllm",
    3,
    Open,
    Step,
    Listen,
    Update,
    Ready,
    Offered,
    Stepped,
    Updated,
    Failed,
    max_bytes=MOST_BYTES,
)
