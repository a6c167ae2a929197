"""Where each tensor of one model lies in one flat buffer: names, shapes, dtypes, byte offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, TypeVar

from transport.errors import MessageError
from transport.weights.errors import LayoutMismatch

ALIGNMENT = 64
"""Bytes; every tensor starts at a multiple of it (a cache line, and AVX-512's width)."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of each dtype that may travel."""

FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})
"""The dtypes that `FlatLayout.of(dtype=...)` casts; integers and narrower floats travel as they
are."""


class Shaped(Protocol):
    """Anything with a shape: a torch tensor, without importing torch."""

    @property
    def shape(self) -> Iterable[int]:
        """Elements along each dimension."""


T = TypeVar("T", bound=Shaped)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor in the buffer."""

    name: str
    """Its name in the model, e.g. `model.layers.0.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    """Its shape, in elements."""
    dtype: str
    """Its dtype in the buffer, by torch's name without the prefix."""
    offset: int
    """Its first byte, counted from the start of the buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes it occupies, without padding."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} at byte {self.offset}"


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The tensors of one model in one flat buffer."""

    tensors: tuple[TensorSpec, ...]
    """In order of their offsets."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which its bytes travel."""

    def __post_init__(self) -> None:
        end, names = 0, set()
        for spec in self.tensors:
            if spec.dtype not in ITEM_BYTES:
                raise LayoutMismatch(
                    f"tensor '{spec.name}' has a dtype that the weight plane does not carry; "
                    f"found {spec.dtype}; cast it to one of {sorted(ITEM_BYTES)}"
                )
            if spec.offset < end or spec.offset % ALIGNMENT or min(spec.shape, default=0) < 0:
                raise LayoutMismatch(
                    f"tensor '{spec.name}' does not fit where it is put; found {spec}, after one"
                    f" that ends at byte {end}; build layouts with FlatLayout.of or"
                    " FlatLayout.build"
                )
            if spec.name in names:
                raise LayoutMismatch(
                    f"two tensors of one layout have the same name; found '{spec.name}' twice; name"
                    " each once"
                )
            names.add(spec.name)
            end = spec.offset + spec.nbytes
        if not names:
            raise LayoutMismatch(
                "a layout needs a tensor; found none; pass dict(model.named_parameters())"
            )
        for alias, name in self.aliases.items():
            if name not in names or alias in names:
                raise LayoutMismatch(
                    f"alias '{alias}' must stand for one travelling tensor; found '{name}'; "
                    "build layouts with FlatLayout.of"
                )

    @property
    def nbytes(self) -> int:
        """Size of the buffer, a multiple of `ALIGNMENT`."""
        last = self.tensors[-1]
        return max(_aligned(last.offset + last.nbytes), ALIGNMENT)

    @classmethod
    def build(
        cls,
        tensors: Iterable[tuple[str, tuple[int, ...], str]],
        aliases: Mapping[str, str] | None = None,
    ) -> FlatLayout:
        """Pack (name, shape, dtype) one after the other, each aligned."""
        specs, offset = [], 0
        for name, shape, dtype in tensors:
            spec = TensorSpec(name=name, shape=tuple(shape), dtype=dtype, offset=offset)
            specs.append(spec)
            offset = _aligned(offset + prod(spec.shape) * ITEM_BYTES.get(dtype, 0))
        return cls(tensors=tuple(specs), aliases=dict(aliases or {}))

    @classmethod
    def of(cls, tensors: Mapping[str, Any], dtype: str | None = None) -> FlatLayout:
        """The layout of these torch tensors; floating ones travel as `dtype` if it is given.

        Names of one and the same memory (tied tensors) travel once, under the first name.
        """
        entries: list[tuple[str, tuple[int, ...], str]] = []
        aliases: dict[str, str] = {}
        first_names: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            own = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(int(n) for n in tensor.shape)
            memory = (tensor.data_ptr(), str(tensor.device), shape, tuple(tensor.stride()), own)
            if tensor.numel() and memory in first_names:
                aliases[name] = first_names[memory]
                continue
            first_names[memory] = name
            entries.append((name, shape, dtype if dtype and own in FLOATING else own))
        return cls.build(entries, aliases)

    def to_plain(self) -> dict[str, Any]:
        """This layout in lists, strings and integers, as msgpack carries it."""
        return {
            "tensors": [[t.name, list(t.shape), t.dtype, t.offset] for t in self.tensors],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> FlatLayout:
        """The layout that `to_plain` wrote; anything else is a MessageError or a LayoutMismatch."""
        try:
            specs = tuple(
                TensorSpec(
                    name=str(name),
                    shape=tuple(map(int, shape)),
                    dtype=str(dtype),
                    offset=int(offset),
                )
                for name, shape, dtype, offset in plain["tensors"]
            )
            aliases = {str(alias): str(name) for alias, name in plain["aliases"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(
                f"a layout cannot be read; found {type(plain).__name__}: {error}; "
                "writer and reader must run the same release"
            ) from None
        return cls(tensors=specs, aliases=aliases)

    def arrange(self, tensors: Mapping[str, T], whose: str) -> list[list[T]]:
        """For each tensor of the layout those of `tensors` that carry its name or an alias of it.

        LayoutMismatch where a name is missing or unknown, or a shape differs (dtypes may).
        """
        places = {spec.name: place for place, spec in enumerate(self.tensors)}
        by_place: list[list[T]] = [[] for _ in self.tensors]
        for name, tensor in tensors.items():
            place = places.get(self.aliases.get(name, name))
            if place is None:
                raise LayoutMismatch(
                    f"{whose} has a tensor that would never be updated; found '{name}' outside the"
                    " layout; leave it out or add it to the writer's layout"
                )
            shape = tuple(tensor.shape)
            if shape != self.tensors[place].shape:
                raise LayoutMismatch(
                    f"{whose} has another shape for '{name}'; found {list(shape)}, the layout says "
                    f"{list(self.tensors[place].shape)}; both sides must load the same model"
                )
            by_place[place].append(tensor)
        for spec, tied in zip(self.tensors, by_place, strict=True):
            if not tied:
                raise LayoutMismatch(
                    f"{whose} has no tensor for '{spec.name}'; found {len(tensors)} tensors, first "
                    f"{list(tensors)[:3]}; pass every tensor of the layout"
                )
        return by_place


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
