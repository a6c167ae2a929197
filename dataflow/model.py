"""Which language model an operator uses: a name and a few facts, nothing loaded."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from dataflow.errors import GraphError, KnobCheck

HEADS = ("lm", "value", "score")
DTYPES = ("float32", "bfloat16", "float16")
ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
"""In a folder that holds adapters alone, in place of config.json."""


@dataclass(frozen=True)
class LoRA(metaclass=KnobCheck):
    """Low-rank adapters (arXiv 2106.09685): weights stay as they were loaded, and W + alpha / rank * B @ A is computed.

    Only A and B are trained, travel to the readers and are in checkpoints. There is no dropout: rollouts of a group
    share what they have in common, which would need the same noise.

    >>> from dataflow import LoRA, Model
    >>> Model("policies/tiny", lora=LoRA(rank=8, targets=("q_proj", "v_proj"))).lora.rank
    8
    """

    rank: int = 16
    """Rows of A, columns of B."""
    alpha: float = field(default=32.0, kw_only=True)
    """Over the rank: what B @ A is multiplied by."""
    targets: str | tuple[str, ...] = field(default=ALL_LINEAR, kw_only=True)
    """Last names of the linear layers that have one, as ("q_proj", "v_proj"); all-linear: all but the output layer."""
    seed: int = field(default=0, kw_only=True)
    """Of A's first values; B is 0 at first, so that adapters change nothing until they are trained."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        if not _is_whole(self.rank) or self.rank < 1:
            raise GraphError(f"LoRA has rank={self.rank!r}, which is none; give a whole number of 1 or more, as 16")
        if not isinstance(self.alpha, int | float) or isinstance(self.alpha, bool) or not 0 < self.alpha < float("inf"):
            raise GraphError(f"LoRA has alpha={self.alpha!r}, which scales nothing; give a number above 0, as 32")
        if not _is_whole(self.seed) or self.seed < 0:
            raise GraphError(f"LoRA has seed={self.seed!r}, which is none; give a whole number of 0 or more")
        named = isinstance(self.targets, tuple) and self.targets and all(isinstance(t, str) and t for t in self.targets)
        if self.targets != ALL_LINEAR and not named:
            raise GraphError(
                f"LoRA has targets={self.targets!r}, which name no layers; give '{ALL_LINEAR}', or last names of "
                f'linear layers, as ("q_proj", "v_proj")'
            )


@dataclass(frozen=True)
class Model(metaclass=KnobCheck):
    """A Hugging Face folder or hub id, and how it is to be loaded.

    Two operators that are given equal models share one set of weights; a trainer changes them,
    and `g.feedback` carries the change to the readers.

    >>> from dataflow import Model
    >>> policy = Model("policies/tiny", dtype="bfloat16")
    >>> policy.name, policy.frozen().is_frozen
    ('tiny', True)
    >>> policy == Model("policies/tiny", dtype="bfloat16")
    True
    """

    source: str
    """Folder with config.json and safetensors, or an id on the hub."""
    name: str = field(default="", kw_only=True)
    """What errors and pictures call it; from the source when empty."""
    head: str = field(default="lm", kw_only=True)
    """lm (next token), value (a number per token) or score (a number per sequence)."""
    dtype: str = field(default="float32", kw_only=True)
    """Type the weights are computed in."""
    revision: str | None = field(default=None, kw_only=True)
    """Commit or tag of a hub id."""
    trust_remote_code: bool = field(default=False, kw_only=True)
    """Whether the folder's own Python may run."""
    is_frozen: bool = field(default=False, kw_only=True)
    """Frozen weights are never trained and need no feedback."""
    lora: LoRA | None = field(default=None, kw_only=True)
    """Adapters that are trained instead of the weights; None: the weights themselves are."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | Path) or not str(self.source):
            raise GraphError(
                f"a Model needs a Hugging Face folder or id, but got {self.source!r}; "
                f'give it as Model("path/to/folder")'
            )
        object.__setattr__(self, "source", str(self.source))
        _one_of("head", self.head, HEADS)
        _one_of("dtype", self.dtype, DTYPES)
        if not self.name:
            object.__setattr__(self, "name", Path(self.source).name or self.source)
        if self.lora is not None and not isinstance(self.lora, LoRA):
            raise GraphError(f"Model knob 'lora' is {self.lora!r}, which is no LoRA; give LoRA(rank=16)")
        if self.lora is not None and self.head != "lm":
            raise GraphError(
                f"model '{self.name}' has adapters and head '{self.head}', whose last layer is new and has to be "
                f"trained itself; leave lora out, or use head='lm'"
            )

    def frozen(self) -> "Model":
        """The same weights, never to change: for a reference policy, a judge, a teacher. Without adapters, which
        change nothing until they are trained."""
        return dataclasses.replace(self, is_frozen=True, lora=None)


def _one_of(knob: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise GraphError(f"Model knob '{knob}' is {found!r}, which is not known; use one of {list(allowed)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
