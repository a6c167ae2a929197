"""Which slice of each full tensor of a model each rank holds, and in which of its own tensors:
values, no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from transport.errors import MessageError
from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import ITEM_BYTES, FlatLayout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shards:
    """The boxes of one full tensor of d dimensions, row by row; ranks that hold nothing of it have
    no row.

    A rank may hold several boxes, and several ranks the same one (replicas). The box lies in a
    local tensor of k >= d dimensions; where k > d, it has size 1 along the leading ones (an expert
    within a stack of experts).
    """

    ranks: Ints
    """[n]"""
    start: Ints
    """[n, d]: first element of the box in the full tensor."""
    stop: Ints
    """[n, d]: one past its last."""
    local_start: Ints
    """[n, k]: first element of the box in the local tensor."""
    local_shape: Ints
    """[n, k]: shape of the local tensor."""

    def __post_init__(self) -> None:
        for values in (self.ranks, self.start, self.stop, self.local_start, self.local_shape):
            values.setflags(write=False)
        n, k = len(self.ranks), self.local_start.shape[1]
        size = np.ones((n, k), np.int64)
        size[:, k - self.start.shape[1] :] = self.stop - self.start
        if (self.stop <= self.start).any() or (self.start < 0).any():
            raise LayoutMismatch(
                f"a shard must be a box that is not empty; found starts {self.start.tolist()[:4]}"
                f" and stops {self.stop.tolist()[:4]}; leave out ranks that hold nothing"
            )
        if (self.local_start < 0).any() or (self.local_start + size > self.local_shape).any():
            raise LayoutMismatch(
                "a shard must lie inside its rank's local tensor; found one that reaches beyond it;"
                " see local_start and local_shape"
            )

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for equal shards."""
        digest = xxhash.xxh3_128()
        for values in (self.ranks, self.start, self.stop, self.local_start, self.local_shape):
            digest.update(repr(values.shape).encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.digest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and self.key == other.key

    def cuts_rows(self, columns: int) -> bool:
        """Whether some box has a part of its rows alone, which are `columns` long (the last
        dimension).
        """
        return bool((self.start[:, -1] > 0).any() or (self.stop[:, -1] < columns).any())

    @functools.lru_cache(maxsize=1024)  # noqa: B019  (shards are values, and equal ones are one entry)
    def of_rows(self) -> Shards:
        """Of a tensor with one number for each row of this one [..., rows, 1]: ranks hold those of
        their rows, once.
        """
        sides = ((self.start, 0), (self.stop, 1), (self.local_start, 0), (self.local_shape, 1))
        ended = [
            np.concatenate([side[:, :-1], np.full_like(side[:, -1:], end)], axis=1)
            for side, end in sides
        ]
        boxes = np.concatenate([self.ranks[:, None], *ended], axis=1)
        first = np.sort(np.unique(boxes, axis=0, return_index=True)[1])
        return Shards(self.ranks[first], *(side[first] for side in ended))

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def cut(
        cls,
        shape: tuple[int, ...],
        mesh: Mesh,
        cuts: tuple[int | None, ...],
        order: tuple[int, ...] | None = None,
        parts: tuple[int, ...] | None = None,
    ) -> Shards:
        """Dealt out over a mesh: mesh dimension i cuts tensor dimension `cuts[i]`, or None: it
        holds replicas.

        order: mesh dimensions in the order in which they cut, left to right if not given. (FSDP2
        over tensor parallel on one dimension cuts by tp first: order=(1, 0) for a mesh of fsdp x
        tp.) Each cut is torch.chunk: pieces of ceil(length / ranks), uneven or empty at the end.
        parts: for each mesh dimension, into how many parts the length is chunked before each part
        is dealt out by itself, one if not given. (A packed gate_up of which every rank holds rows
        of both: 2.)
        """
        axes = tuple(range(len(mesh.shape)))
        if (
            len(cuts) != len(axes)
            or any(c is not None and not 0 <= c < len(shape) for c in cuts)
            or sorted(order or axes) != list(axes)
            or len(parts or axes) != len(axes)
        ):
            raise LayoutMismatch(
                f"a tensor of shape {list(shape)} cannot be cut by {list(cuts)} over a mesh of"
                f" shape {list(mesh.shape)}; found order {order}, parts {parts}; give for each mesh"
                " dimension a dimension of the tensor, or None, and each mesh dimension once in"
                " `order`"
            )
        place = np.indices(mesh.shape).reshape(len(axes), -1)
        size = np.broadcast_to(np.asarray(shape, np.int64), (place.shape[1], len(shape))).copy()
        row = np.arange(len(size))
        low, high, local = np.zeros_like(size), size.copy(), np.zeros_like(size)
        for axis in order or axes:
            dim = cuts[axis]
            if dim is None:
                continue
            begin, end = _deal(
                size[:, dim], parts[axis] if parts else 1, place[axis], mesh.shape[axis]
            )
            count = begin.shape[1]
            low, high, local, row = (
                np.repeat(array, count, axis=0) for array in (low, high, local, row)
            )
            at = row, np.tile(np.arange(count), len(row) // count)
            first = np.maximum(local[:, dim], begin[at])
            last = np.minimum(local[:, dim] + high[:, dim] - low[:, dim], end[at])
            low[:, dim] += first - local[:, dim]
            high[:, dim] = low[:, dim] + last - first
            lengths = end - begin
            local[:, dim] = (np.cumsum(lengths, axis=1) - lengths)[at] + first - begin[at]
            size[:, dim] = lengths.sum(axis=1)
        nonempty = (high > low).all(axis=1)
        row = row[nonempty]
        return cls(
            np.asarray(mesh.ranks, np.int64)[row],
            low[nonempty],
            high[nonempty],
            local[nonempty],
            size[row],
        )


def _deal(length: Ints, parts: int, place: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Begin and end [n, parts] of each place's share of its length [n], dealt out to so many ranks
    part by part.
    """
    part = -(-length // parts)
    first = np.minimum(part[:, None] * np.arange(parts), length[:, None])
    last = np.minimum(first + part[:, None], length[:, None])
    piece = -(-(last - first) // ranks)
    begin = np.minimum(first + place[:, None] * piece, last)
    return begin, np.minimum(begin + piece, last)


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, e.g. fsdp x tp."""

    shape: tuple[int, ...]
    """Ranks along each dimension."""
    ranks: tuple[int, ...]
    """The rank at each place, the last dimension running fastest."""

    def __post_init__(self) -> None:
        if (
            int(np.prod(self.shape)) != len(self.ranks)
            or len(set(self.ranks)) != len(self.ranks)
            or not self.ranks
        ):
            raise LayoutMismatch(
                f"a mesh of shape {list(self.shape)} needs as many ranks, each once; found"
                f" {list(self.ranks)[:8]}"
            )

    @classmethod
    def of(cls, *shape: int, first: int = 0) -> Mesh:
        """Ranks first, first + 1, ... in a grid of this shape."""
        return cls(shape, tuple(range(first, first + int(np.prod(shape)))))


Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One full tensor, as the ranks hold it."""

    name: str
    """Its name in the model; the same on both sides."""
    shape: Shape
    """Of the full tensor."""
    dtype: str
    """By torch's name without the prefix."""
    shards: Shards
    into: str
    """The ranks' local tensor that it lies in; its own name, unless several are fused."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model's tensors over the ranks of one side, the trainer's or the generator's."""

    tensors: Mapping[str, TensorLayout]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which its bytes travel."""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise LayoutMismatch("a layout needs a tensor; found none; pass the model's parameters")
        for name, tensor in self.tensors.items():
            facts = tensor.name, tensor.shards.start.shape[1], tensor.dtype in ITEM_BYTES
            if (
                facts != (name, len(tensor.shape), True)
                or (tensor.shards.stop > tensor.shape).any()
            ):
                raise LayoutMismatch(
                    f"tensor '{name}' does not fit its shards; found shape {list(tensor.shape)},"
                    f" dtype {tensor.dtype}, boxes of {facts[1]} dimensions up to"
                    f" {tensor.shards.stop.max(0, initial=0)}; see Layout.cut"
                )
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise LayoutMismatch(
                    f"alias '{alias}' must stand for one travelling tensor; found '{name}'; "
                    "name the tensor it is tied to"
                )

    @functools.cached_property
    def ranks(self) -> int:
        """Ranks of this side: one more than the highest that holds anything."""
        return 1 + max(
            int(np.max(tensor.shards.ranks, initial=-1)) for tensor in self.tensors.values()
        )

    @functools.cached_property
    def rank_bytes(self) -> Ints:
        """[ranks]: bytes of the model that each holds, replicas counted at each of them."""
        per_element: Counter[Shards] = Counter()
        for tensor in self.tensors.values():
            per_element[tensor.shards] += ITEM_BYTES[tensor.dtype]
        by_rank = np.zeros(self.ranks, np.float64)
        for shards, nbytes in per_element.items():
            elements = np.prod(shards.stop - shards.start, axis=1, dtype=np.int64)
            by_rank += np.bincount(shards.ranks, elements * nbytes, self.ranks)
        return by_rank.astype(np.int64)

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for equal layouts."""
        digest = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            digest.update(repr((tensor.name, tensor.shape, tensor.dtype, tensor.into)).encode())
            digest.update(tensor.shards.key)
        digest.update(repr(sorted(self.aliases.items())).encode())
        return digest.digest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    @classmethod
    def cut(
        cls,
        tensors: Mapping[str, tuple[Shape, str]],
        mesh: Mesh,
        cuts: Callable[[str], tuple[int | None, ...]],
        *,
        order: tuple[int, ...] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> Layout:
        """Full tensors, name -> (shape, dtype), dealt out over a mesh; `cuts` and `order` as in
        `Shards.cut`.
        """
        layouts = {
            name: TensorLayout(
                name=name,
                shape=shape,
                dtype=dtype,
                shards=Shards.cut(shape, mesh, cuts(name), order),
                into=name,
            )
            for name, (shape, dtype) in tensors.items()
        }
        return cls(tensors=layouts, aliases=dict(aliases or {}))

    @classmethod
    def whole(
        cls,
        tensors: Mapping[str, tuple[Shape, str]],
        ranks: int = 1,
        aliases: Mapping[str, str] | None = None,
    ) -> Layout:
        """Every rank holds every tensor whole."""
        return cls.cut(tensors, Mesh.of(ranks), lambda name: (None,), aliases=aliases)

    @classmethod
    def fsdp(
        cls,
        tensors: Mapping[str, tuple[Shape, str]],
        ranks: int,
        aliases: Mapping[str, str] | None = None,
    ) -> Layout:
        """As FSDP2 shards: each tensor by torch.chunk along dim 0."""
        return cls.cut(
            tensors,
            Mesh.of(ranks),
            lambda name: (0 if tensors[name][0] else None,),
            aliases=aliases,
        )

    def __or__(self, other: Layout) -> Layout:
        """Both together: the stages of a pipeline, or dense layers beside experts."""
        twice = self.tensors.keys() & other.tensors.keys()
        if twice:
            raise LayoutMismatch(
                f"two layouts that are put together share tensors; found {sorted(twice)[:3]} in"
                " both"
            )
        return Layout(
            tensors={**self.tensors, **other.tensors}, aliases={**self.aliases, **other.aliases}
        )

    def cast(self, dtype: str) -> Layout:
        """The same, with floating tensors held in another dtype."""
        return replace(
            self,
            tensors={
                name: replace(tensor, dtype=dtype) if "float" in tensor.dtype else tensor
                for name, tensor in self.tensors.items()
            },
        )

    def only(self, names: Collection[str]) -> Layout:
        """These tensors alone, e.g. adapters."""
        return Layout(tensors={name: self.tensors[name] for name in names})

    def fused(self, into: str, parts: Collection[str], dim: int = 0) -> Layout:
        """Each rank holds its local tensors `parts` end to end along `dim` in one local tensor
        (qkv, gate_up).
        """
        inside = self._inside(parts)
        lengths = np.zeros((len(inside), self.ranks), np.int64)
        for number, part in enumerate(inside):
            for tensor in part:
                lengths[number, tensor.shards.ranks] = tensor.shards.local_shape[:, dim]
        starts, total = np.cumsum(lengths, axis=0) - lengths, lengths.sum(axis=0)
        moved: dict[str, TensorLayout] = {}
        for part, start in zip(inside, starts, strict=True):
            for tensor in part:
                ranks = tensor.shards.ranks
                local_start, local_shape = (
                    tensor.shards.local_start.copy(),
                    tensor.shards.local_shape.copy(),
                )
                local_start[:, dim] += start[ranks]
                local_shape[:, dim] = total[ranks]
                shards = replace(tensor.shards, local_start=local_start, local_shape=local_shape)
                moved[tensor.name] = replace(tensor, shards=shards, into=into)
        return replace(self, tensors={**self.tensors, **moved})

    def stacked(self, into: str, parts: Collection[str]) -> Layout:
        """Each rank holds its local tensors `parts`, of equal shape, in one local tensor [count,
        ...] (experts).
        """
        lifted: dict[str, TensorLayout] = {}
        for tensor in itertools.chain.from_iterable(self._inside(parts)):
            shards = tensor.shards
            shards = replace(
                shards,
                local_start=np.insert(shards.local_start, 0, 0, axis=1),
                local_shape=np.insert(shards.local_shape, 0, 1, axis=1),
            )
            lifted[tensor.name] = replace(tensor, shards=shards)
        return replace(self, tensors={**self.tensors, **lifted}).fused(into, parts)

    def _inside(self, parts: Collection[str]) -> list[list[TensorLayout]]:
        """What lies in each of these local tensors."""
        inside: dict[str, list[TensorLayout]] = {}
        for tensor in self.tensors.values():
            inside.setdefault(tensor.into, []).append(tensor)
        missing = [part for part in parts if part not in inside]
        if missing:
            raise LayoutMismatch(
                f"no rank has a local tensor '{missing[0]}'; found {len(inside)} others, first"
                f" {list(inside)[:3]}; name tensors of this layout"
            )
        return [inside[part] for part in parts]

    def split(self, name: str, parts: Mapping[str, int], dim: int = 0) -> Layout:
        """Call ranges of one full tensor by names of their own (a fused weight whose other side
        holds the parts).

        parts: name -> length along `dim`, in order, together the whole of it.
        """
        tensor = self.tensors[name]
        dim %= len(tensor.shape)
        if sum(parts.values()) != tensor.shape[dim]:
            raise LayoutMismatch(
                f"the parts of '{name}' must make up the whole; found {dict(parts)} for"
                f" {tensor.shape[dim]} along {dim}"
            )
        tensors: dict[str, TensorLayout] = {
            key: value for key, value in self.tensors.items() if key != name
        }
        shards, first = tensor.shards, 0
        lead = shards.local_start.shape[1] - len(tensor.shape)
        for part, length in parts.items():
            start, stop = shards.start.copy(), shards.stop.copy()
            start[:, dim] = np.clip(start[:, dim], first, first + length)
            stop[:, dim] = np.clip(stop[:, dim], first, first + length)
            mine = stop[:, dim] > start[:, dim]
            local_start = shards.local_start.copy()
            local_start[:, lead + dim] += start[:, dim] - shards.start[:, dim]
            start[:, dim] -= first
            stop[:, dim] -= first
            placed = Shards(
                shards.ranks[mine],
                start[mine],
                stop[mine],
                local_start[mine],
                shards.local_shape[mine].copy(),
            )
            shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
            tensors[part] = replace(tensor, name=part, shape=shape, shards=placed)
            first += length
        return replace(self, tensors=tensors)

    def local(self, rank: int) -> dict[str, tuple[Shape, str]]:
        """The local tensors that a rank holds: name -> (shape, dtype).

        LayoutMismatch where two full tensors ask for different shapes of one local tensor.
        """
        specs: dict[str, tuple[Shape, str]] = {}
        for tensor in self.tensors.values():
            for row in np.flatnonzero(tensor.shards.ranks == rank):
                spec = tuple(tensor.shards.local_shape[row].tolist()), tensor.dtype
                if specs.setdefault(tensor.into, spec) != spec:
                    raise LayoutMismatch(
                        f"rank {rank} would hold '{tensor.into}' in two shapes; found"
                        f" {specs[tensor.into]} and {spec} (for '{tensor.name}'); fuse all parts at"
                        " once"
                    )
        return specs

    def flat(self, rank: int) -> FlatLayout:
        """A rank's local tensors in one flat buffer. LayoutMismatch where it holds none."""
        local = self.local(rank)
        into = {
            alias: self.tensors[name].into
            for alias, name in self.aliases.items()
            if alias not in local
        }
        return FlatLayout.build(
            [(name, shape, dtype) for name, (shape, dtype) in local.items()],
            {alias: name for alias, name in into.items() if name in local},
        )

    def to_plain(self) -> dict[str, Any]:
        """In lists, strings, integers and bytes, as msgpack carries it; equal shards once."""
        table: dict[bytes, int] = {}
        shards: list[list[Any]] = []
        for tensor in self.tensors.values():
            if table.setdefault(tensor.shards.key, len(shards)) == len(shards):
                s = tensor.shards
                sizes = [len(s.ranks), s.start.shape[1], s.local_start.shape[1]]
                arrays = (s.ranks, s.start, s.stop, s.local_start, s.local_shape)
                shards.append(
                    [*sizes, *(np.ascontiguousarray(values, "<i8").tobytes() for values in arrays)]
                )
        tensors = [
            [h.name, list(h.shape), h.dtype, h.into, table[h.shards.key]]
            for h in self.tensors.values()
        ]
        return {"shards": shards, "tensors": tensors, "aliases": dict(self.aliases)}

    @classmethod
    def from_plain(cls, plain: Any) -> Layout:
        """The layout that `to_plain` wrote; anything else is a MessageError or a LayoutMismatch."""
        try:
            shards = [_shards(*entry) for entry in plain["shards"]]
            tensors = {}
            for name, shape, dtype, into, number in plain["tensors"]:
                full = tuple(map(int, shape))
                tensors[str(name)] = TensorLayout(
                    name=str(name),
                    shape=full,
                    dtype=str(dtype),
                    shards=shards[number],
                    into=str(into),
                )
            aliases = {str(alias): str(name) for alias, name in plain["aliases"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise MessageError(
                f"a layout cannot be read; found {type(plain).__name__}: {error}; both sides must"
                " run the same release"
            ) from None
        return cls(tensors=tensors, aliases=aliases)


def _shards(n: int, d: int, k: int, *data: bytes) -> Shards:
    ranks, *boxes = (np.frombuffer(raw, "<i8").astype(np.int64) for raw in data)
    start, stop, local_start, local_shape = boxes
    return Shards(
        ranks.reshape(n),
        start.reshape(n, d),
        stop.reshape(n, d),
        local_start.reshape(n, k),
        local_shape.reshape(n, k),
    )
