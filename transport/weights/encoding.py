"""What travels in place of each tensor: cast, or quantized, with a float32 scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import FLOATING
from transport.weights.layout.layout import Layout, TensorLayout

SCALE = ":scale"
"""Behind a tensor's name: that of its scales, float32 [..., rows, 1]."""


@dataclass(frozen=True)
class QuantizedFormat:
    """Values of one byte: number = value * scale, and the largest number of a row is the largest
    value.
    """

    dtype: str
    """Of the values."""
    top: float
    """The largest value."""


QUANTIZED = {"int8": QuantizedFormat("int8", 127.0), "fp8": QuantizedFormat("float8_e4m3fn", 448.0)}
"""The formats by name."""

KEPT = ("*embed*", "*norm*", "*.wte.*", "*.wpe.*", "*lm_head*", "*.gate.*", "*.router.*")
"""Names that stay wide where no others are given: embeddings, norms, heads, and the routers of a
mixture."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Which tensors travel as what."""

    dtype: str | None = None
    """Floating tensors are cast to it, before they are quantized too; None: they stay as they
    are."""
    quantized: str | None = None
    """The format of the tensors that are quantized, int8 or fp8; None: none is."""
    names: frozenset[str] | None = None
    """Those tensors, by name; None: floating ones of two dimensions or more that match no pattern
    of `kept`."""
    kept: tuple[str, ...] = KEPT
    """Patterns, as of a shell, of names that are not quantized. Where `names` is None."""

    def __post_init__(self) -> None:
        for setting, value, choices in (
            ("dtype", self.dtype, FLOATING),
            ("quantized", self.quantized, QUANTIZED),
        ):
            if value is not None and value not in choices:
                raise LayoutMismatch(
                    f"weights cannot travel with that {setting}; found {value!r}; use one of"
                    f" {sorted(choices)}"
                )

    def quantizes(self, name: str, shape: tuple[int, ...], dtype: str) -> bool:
        """Whether this tensor is quantized."""
        if self.quantized is None or dtype not in FLOATING or len(shape) < 2:
            return False
        return (
            name in self.names
            if self.names is not None
            else not any(fnmatchcase(name, pattern) for pattern in self.kept)
        )

    def travels_as(self, dtype: str) -> str:
        """The dtype of what is not quantized."""
        return self.dtype if self.dtype and dtype in FLOATING else dtype

    def layout(self, full: Layout) -> Layout:
        """The layout of what travels from ranks that hold `full`: a quantized tensor is followed by
        `NAME:scale`, and who holds a part of a row holds its scale.

        LayoutMismatch where `names` has a tensor that is not there, or cannot be quantized, or lies
        in one of another name.
        """
        chosen = self._chosen(full)
        tensors: dict[str, TensorLayout] = {}
        for name, tensor in full.tensors.items():
            if name not in chosen:
                tensors[name] = replace(tensor, dtype=self.travels_as(tensor.dtype))
                continue
            if tensor.into != name:
                raise LayoutMismatch(
                    f"'{name}' cannot be quantized by the ranks that hold it; found it fused into"
                    f" '{tensor.into}'; offer it as a tensor of its own"
                )
            tensors[name] = replace(tensor, dtype=chosen[name].dtype)
            scale = name + SCALE
            tensors[scale] = TensorLayout(
                name=scale,
                shape=(*tensor.shape[:-1], 1),
                dtype="float32",
                shards=tensor.shards.of_rows(),
                into=scale,
            )
        return replace(full, tensors=tensors)

    @property
    def unquantized(self) -> Encoding:
        """The same without quantizing any tensor."""
        return replace(self, quantized=None, names=None)

    def to_plain(self) -> dict[str, Any]:
        """In strings and lists, for a message."""
        names = None if self.names is None else sorted(self.names)
        return {
            "dtype": self.dtype,
            "quantized": self.quantized,
            "names": names,
            "kept": list(self.kept),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoding:
        """The encoding that `to_plain` wrote."""
        names = None if plain["names"] is None else frozenset(plain["names"])
        return cls(
            dtype=plain["dtype"],
            quantized=plain["quantized"],
            names=names,
            kept=tuple(plain["kept"]),
        )

    def _chosen(self, full: Layout) -> dict[str, QuantizedFormat]:
        """The format of those tensors that are quantized."""
        if self.quantized is None:
            return {}
        chosen = {
            name: QUANTIZED[self.quantized]
            for name, tensor in full.tensors.items()
            if self.quantizes(name, tensor.shape, tensor.dtype)
        }
        if missing := (self.names or frozenset()) - chosen.keys():
            raise LayoutMismatch(
                "a tensor that is to be quantized is no floating matrix of this model; found"
                f" '{min(missing)}' among {len(self.names or ())} names; name tensors of two"
                " dimensions or more, tied ones by their first name"
            )
        return chosen
