"""Which language model an operator uses: a name and a few facts, nothing loaded."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from dataflow.errors import GraphError

HEADS = ("lm", "value", "score")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """A Hugging Face folder or hub id, and how it is to be loaded.

    Two operators that are given equal models share one set of weights; a trainer changes them,
    and `g.feedback` carries the change to the readers.
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

    def frozen(self) -> "Model":
        """The same weights, never to change: for a reference policy, a judge, a teacher."""
        return dataclasses.replace(self, is_frozen=True)


def _one_of(knob: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise GraphError(f"Model knob '{knob}' is {found!r}, which is not known; use one of {list(allowed)}")
