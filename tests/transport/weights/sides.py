"""Random layouts of one small model, and the oracle: every rank's local tensors cut out of whole
ones.
"""

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st

from transport.weights.layout.layout import Layout, Mesh, Shards, TensorLayout
from transport.weights.layout.plan import CopyPlan

Local = dict[int, dict[str, torch.Tensor]]
"""rank -> name -> local tensor"""

MESHES = [(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2)]
EXPERTS = tuple(f"expert{n}" for n in range(3))


@st.composite
def models(draw) -> dict[str, tuple[tuple[int, ...], str]]:
    """A model: embedding, fused and split projections, experts, a norm, a scalar, a convolution."""
    few, dtype = st.integers(1, 7), draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
    width = draw(few)
    shapes = {
        "embed": (draw(st.integers(1, 11)), width),
        "q": (draw(few), width),
        "k": (draw(few), width),
        "v": (draw(few), width),
        "norm": (width,),
        "scale": (),
        "conv": (draw(few), draw(few), 2),
        **dict.fromkeys(EXPERTS, (draw(few), width)),
    }
    return {name: (shape, dtype) for name, shape in shapes.items()}


@st.composite
def meshed(draw, tensors, first: int = 0, shapes=MESHES) -> Layout:
    """Dealt out over one mesh: replicas, rows, columns, both orders of cutting one dimension,
    packed parts.
    """
    mesh = Mesh.of(*draw(st.sampled_from(shapes)), first=first)
    axes = len(mesh.shape)
    order = tuple(draw(st.permutations(range(axes))))
    held = {}
    for name, (shape, dtype) in tensors.items():
        dims = st.sampled_from([None, *range(len(shape))])
        cuts = tuple(draw(st.tuples(*[dims] * axes)))
        parts = tuple(draw(st.tuples(*[st.sampled_from([1, 1, 2, 3])] * axes)))
        shards = Shards.cut(shape, mesh, cuts, order, parts)
        held[name] = TensorLayout(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=held)


@st.composite
def staged(draw, tensors) -> Layout:
    """A pipeline of two stages, each over a mesh of its own."""
    names = list(tensors)
    border = draw(st.integers(1, len(names) - 1))
    small = [shape for shape in MESHES if int(np.prod(shape)) <= 4]
    stages = [{name: tensors[name] for name in part} for part in (names[:border], names[border:])]
    return draw(meshed(stages[0], shapes=small)) | draw(meshed(stages[1], first=4, shapes=small))


@st.composite
def expert_parallel(draw, tensors) -> Layout:
    """Experts dealt out to groups of ranks, each rank's stacked in one local tensor; the rest over
    the same mesh.
    """
    groups, within = draw(st.sampled_from([(1, 2), (2, 1), (3, 1), (3, 2), (2, 4)]))
    dense = Layout.cut(
        {name: entry for name, entry in tensors.items() if name not in EXPERTS},
        Mesh.of(groups, within),
        lambda name: (0, None) if tensors[name][0] else (None, None),
    )
    for number, name in enumerate(EXPERTS):
        mesh = Mesh.of(within, first=number % groups * within)
        dense |= Layout.cut(
            {name: tensors[name]}, mesh, lambda name: (draw(st.sampled_from([None, 0, 1])),)
        )
    whole = all(
        (held.shards.stop - held.shards.start == held.shape).all()
        for held in map(dense.tensors.get, EXPERTS)
    )
    return dense.stacked("experts", EXPERTS) if whole and draw(st.booleans()) else dense


def apart(ranks, start, stop) -> Shards:
    """Boxes that are local tensors of their own; empty ones are left out."""
    some = (stop > start).all(axis=1)
    start, stop = start[some].astype(np.int64), stop[some].astype(np.int64)
    return Shards(
        np.asarray(ranks, np.int64)[some], start, stop, np.zeros_like(start), stop - start
    )


@st.composite
def by_hand(draw, tensors, complete: bool) -> Layout:
    """Boxes anywhere, overlapping; where they must be complete, the last rank holds everything
    besides.
    """
    held = {}
    for name, (shape, dtype) in tensors.items():
        ranks = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=4)))
        ends = [
            [sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
            for _ in ranks
        ]
        boxes = np.array(ends, np.int64).reshape(len(ranks), len(shape), 2)
        start, stop = boxes[:, :, 0], boxes[:, :, 1]
        if complete:
            ranks = [*ranks, 7]
            start, stop = np.vstack([start, np.zeros_like(start[:1])]), np.vstack([stop, [shape]])
        shards = apart(ranks, start, stop)
        held[name] = TensorLayout(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=held)


@st.composite
def sides(draw, tensors, complete: bool) -> Layout:
    """One side, up to 8 ranks; q, k and v in one local tensor or not."""
    layout = draw(
        st.one_of(
            meshed(tensors),
            meshed(tensors),
            staged(tensors),
            expert_parallel(tensors),
            by_hand(tensors, complete),
        )
    )
    if draw(st.booleans()) and fusable(layout, ("q", "k", "v")):
        layout = layout.fused("qkv", ("q", "k", "v"))
    return layout


def fusable(layout: Layout, names: tuple[str, ...]) -> bool:
    """Whether the local tensors that a rank has of them are equally wide."""
    widths: dict[int, set[int]] = {}
    for name in names:
        shards = layout.tensors[name].shards
        for rank, width in zip(
            shards.ranks.tolist(), shards.local_shape[:, 1].tolist(), strict=True
        ):
            widths.setdefault(rank, set()).add(width)
    return all(len(found) == 1 for found in widths.values())


def whole(tensors) -> dict[str, torch.Tensor]:
    """Full tensors of random bytes."""
    generator = torch.Generator().manual_seed(7)
    full = {}
    for name, (shape, dtype) in tensors.items():
        kind = getattr(torch, dtype)
        count = int(np.prod(shape)) * kind.itemsize
        full[name] = (
            torch.randint(256, (count,), dtype=torch.uint8, generator=generator)
            .view(kind)
            .view(shape)
        )
    return full


def boxes(
    layout: Layout,
) -> Iterator[tuple[TensorLayout, int, tuple[slice, ...], tuple[slice, ...]]]:
    """Every box of a layout: whose, which rank's, where in the full tensor, where in the local
    one.
    """
    for held in layout.tensors.values():
        shards = held.shards
        lead = shards.local_start.shape[1] - shards.start.shape[1]
        for rank, start, stop, local in zip(
            shards.ranks.tolist(),
            shards.start.tolist(),
            shards.stop.tolist(),
            shards.local_start.tolist(),
            strict=True,
        ):
            sizes = [1] * lead + [b - a for a, b in zip(start, stop, strict=True)]
            inner = tuple(slice(a, a + n) for a, n in zip(local, sizes, strict=True))
            yield held, rank, tuple(map(slice, start, stop)), inner


def empty(layout: Layout, dtype: torch.dtype | None = None) -> Local:
    """Every rank's local tensors, zero."""
    return {
        rank: {
            name: torch.zeros(shape, dtype=dtype or getattr(torch, own))
            for name, (shape, own) in layout.local(rank).items()
        }
        for rank in range(layout.ranks)
    }


def gather_then_shard(layout: Layout, full: dict[str, torch.Tensor]) -> Local:
    """What every rank must hold."""
    local = empty(layout)
    for held, rank, outer, inner in boxes(layout):
        target = local[rank][held.into]
        target[inner] = full[held.name][outer].reshape(target[inner].shape)
    return local


def execute(plan: CopyPlan, source: Local) -> tuple[Local, Local]:
    """What the destination holds after all copies, and how often each element was written."""
    got, times = empty(plan.destination), empty(plan.destination, torch.int64)
    for copy in plan.copies():
        there = source[copy.source_rank][copy.source_name][copy.source_box]
        got[copy.destination_rank][copy.destination_name][copy.destination_box] = there.reshape(
            copy.shape
        )
        times[copy.destination_rank][copy.destination_name][copy.destination_box] += 1
    return got, times


def same(one: Local, other: Local) -> bool:
    """Whether the bytes are equal."""
    return one.keys() == other.keys() and all(
        one[rank].keys() == other[rank].keys()
        and all(
            torch.equal(
                one[rank][n].reshape(-1).view(torch.uint8),
                other[rank][n].reshape(-1).view(torch.uint8),
            )
            for n in one[rank]
        )
        for rank in one
    )
