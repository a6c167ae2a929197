"""What travels in place of each tensor: cast, or quantized, with a float32 scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import FLOATING, FlatLayout

SCALE = ":scale"
"""Behind a tensor's name: that of its scales, float32 [..., rows, 1]."""


@dataclass(frozen=True)
class QuantizedFormat:
    """Values of one byte: number = value * scale, and the largest number of a row is the largest value."""

    dtype: str
    """Of the values."""
    top: float
    """The largest value."""


QUANTIZED = {"int8": QuantizedFormat("int8", 127.0), "fp8": QuantizedFormat("float8_e4m3fn", 448.0)}
"""The formats by name."""

KEPT = ("*embed*", "*norm*", "*.wte.*", "*.wpe.*", "*lm_head*", "*.gate.*", "*.router.*")
"""Names that stay wide where no others are given: embeddings, norms, heads, and the routers of a mixture."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Which tensors travel as what."""

    dtype: str | None = None
    """Floating tensors are cast to it, before they are quantized too; None: they stay as they are."""
    quantized: str | None = None
    """The format of the tensors that are quantized, int8 or fp8; None: none is."""
    names: frozenset[str] | None = None
    """Those tensors, by name; None: floating ones of two dimensions or more that match no pattern of `kept`."""
    kept: tuple[str, ...] = KEPT
    """Patterns, as of a shell, of names that are not quantized. Where `names` is None."""

    def __post_init__(self) -> None:
        for what, found, known in (("dtype", self.dtype, FLOATING), ("quantized", self.quantized, QUANTIZED)):
            if found is not None and found not in known:
                raise LayoutMismatch(
                    f"weights cannot travel with that {what}; found {found!r}; use one of {sorted(known)}"
                )

    def quantizes(self, name: str, shape: tuple[int, ...], dtype: str) -> bool:
        """Whether this tensor is quantized."""
        if self.quantized is None or dtype not in FLOATING or len(shape) < 2:
            return False
        return name in self.names if self.names is not None else not any(fnmatchcase(name, each) for each in self.kept)

    def flat_layout(self, tensors: Mapping[str, Any]) -> FlatLayout:
        """The layout of what travels for these torch tensors: a quantized one is followed by `NAME:scale`.

        Tied tensors travel once. LayoutMismatch where `names` has one that is not there, or cannot be quantized."""
        whole = FlatLayout.of(tensors)
        entries: list[tuple[str, tuple[int, ...], str]] = []
        left = set(self.names or ()) if self.quantized else set()
        for spec in whole.tensors:
            if self.quantized is not None and self.quantizes(spec.name, spec.shape, spec.dtype):
                entries.append((spec.name, spec.shape, QUANTIZED[self.quantized].dtype))
                entries.append((spec.name + SCALE, (*spec.shape[:-1], 1), "float32"))
                left.discard(spec.name)
            else:
                dtype = self.dtype if self.dtype and spec.dtype in FLOATING else spec.dtype
                entries.append((spec.name, spec.shape, dtype))
        if left:
            raise LayoutMismatch(
                f"a tensor that is to be quantized is no floating matrix of this model; found '{min(left)}' among "
                f"{len(self.names or ())} names; name tensors of two dimensions or more, tied ones by their first name"
            )
        return FlatLayout.build(entries, whole.aliases)
