"""A plan's copies put every byte where it belongs, once, and spread the work over those who could
do it.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from transport.weights import LayoutMismatch
from transport.weights.layout.layout import Layout, Mesh
from transport.weights.layout.reshard import reshard

from ..sides import apart, boxes, empty, execute, gather_then_shard, models, same, sides, whole

pairs = models().flatmap(
    lambda tensors: st.tuples(st.just(tensors), sides(tensors, True), sides(tensors, False))
)


often = examples(80)


def needed(layout: Layout) -> int:
    """Bytes of everything that a layout's ranks hold."""
    items = {"float32": 4, "bfloat16": 2, "uint8": 1}
    return sum(
        int(np.prod([each.stop - each.start for each in inner])) * items[held.dtype]
        for held, _, _, inner in boxes(layout)
    )


@often
@given(pairs)
def test_executing_a_plan_gives_the_bytes_of_gather_then_shard(found):
    tensors, source, destination = found
    full = whole(tensors)
    got, times = execute(reshard(source, destination), gather_then_shard(source, full))
    assert same(got, gather_then_shard(destination, full))
    once = empty(destination, torch.int64)
    for held, rank, _, inner in boxes(destination):
        once[rank][held.into][inner] += 1
    assert same(times, once)


@often
@given(pairs)
def test_nothing_is_sent_that_is_not_needed(found):
    _, source, destination = found
    plan = reshard(source, destination)
    assert sum(copy.nbytes for copy in plan.copies()) == plan.nbytes == needed(destination)
    assert all(copy.nbytes for copy in plan.copies())


@often
@given(pairs)
def test_the_loads_of_ranks_that_hold_the_same_differ_by_at_most_one_copy(found):
    _, source, destination = found
    plan = reshard(source, destination)
    index = {
        name: torch.arange(int(np.prod(held.shape))).view(held.shape)
        for name, held in source.tensors.items()
    }
    holds = {
        name: torch.zeros(
            source.ranks, (held.shape and int(np.prod(held.shape))) or 1, dtype=torch.bool
        )
        for name, held in source.tensors.items()
    }
    for held, rank, outer, _ in boxes(source):
        holds[held.name][rank, index[held.name][outer].flatten()] = True
    wanted = empty(destination, torch.int64)
    for held, rank, outer, inner in boxes(destination):
        target = wanted[rank][held.into]
        target[inner] = index[held.name][outer].reshape(target[inner].shape)
    loads: dict[tuple[int, ...], Counter[int]] = {}
    for copy in plan.copies():
        elements = wanted[copy.destination_rank][copy.destination_name][
            copy.destination_box
        ].flatten()
        able = tuple(torch.nonzero(holds[copy.tensor][:, elements].all(dim=1)).flatten().tolist())
        assert copy.source_rank in able
        loads.setdefault(able, Counter(dict.fromkeys(able, 0)))[copy.source_rank] += 1
    for able, load in loads.items():
        assert max(load.values()) - min(load.values()) <= 1, (able, load)


@pytest.mark.parametrize(
    ("replicas", "shards", "readers"), [(2, 1, 1), (3, 1, 5), (2, 4, 8), (4, 2, 3), (8, 1, 8)]
)
def test_replicas_share_a_whole_model_to_within_one_copy(replicas, shards, readers):
    tensors = {f"t{n}": ((8, 3), "float32") for n in range(7)}
    source = Layout.cut(tensors, Mesh.of(replicas, shards), lambda name: (None, 0))
    loads = reshard(source, Layout.whole(tensors, readers)).pair_copies.sum(axis=1)
    assert loads.max() - loads.min() <= 1
    assert loads.sum() == 7 * readers * shards


@pytest.mark.parametrize(
    ("replicas", "shards", "readers", "degree"), [(2, 4, 4, 2), (4, 2, 4, 2), (2, 2, 2, 4)]
)
def test_a_replica_of_the_destination_is_served_by_one_replica_of_the_source(
    replicas, shards, readers, degree
):
    cuts = {"rows": 0, "columns": 1, "norm": None}
    tensors = {
        "rows": ((8, 8), "float32"),
        "columns": ((8, 8), "float32"),
        "norm": ((8,), "float32"),
    }
    source = Layout.cut(tensors, Mesh.of(replicas, shards), lambda name: (None, 0))
    plan = reshard(
        source, Layout.cut(tensors, Mesh.of(readers, degree), lambda name: (None, cuts[name]))
    )
    table = plan.pair_bytes.reshape(replicas, shards, readers, degree).sum(axis=(1, 3))
    assert (np.count_nonzero(table, axis=0) == 1).all()
    assert (np.count_nonzero(table, axis=1) == readers // replicas).all()


@pytest.mark.slow
@often
@given(pairs)
def test_sender_and_receiver_list_their_copies_in_one_order(found):
    _, source, destination = found
    plan = reshard(source, destination)
    sends = [plan.sends(rank) for rank in range(source.ranks)]
    receives = [list(plan.copies(destination_rank=rank)) for rank in range(destination.ranks)]
    for one in range(source.ranks):
        assert all(copy.source_rank == one for copy in sends[one])
        for other in range(destination.ranks):
            mine = [copy for copy in sends[one] if copy.destination_rank == other]
            assert mine == [copy for copy in receives[other] if copy.source_rank == one]
            assert mine == list(plan.copies(source_rank=one, destination_rank=other))
            assert sum(copy.nbytes for copy in mine) == plan.pair_bytes[one, other]
            assert len(mine) == plan.pair_copies[one, other]
    assert sum(map(len, sends)) == sum(map(len, receives)) == sum(1 for _ in plan.copies())


@given(models(), st.data())
def test_a_fused_weight_on_either_side_meets_its_parts_on_the_other(tensors, data):
    rows = {name: tensors[name][0][0] for name in "qkv"}
    width, dtype = tensors["q"][0][1], tensors["q"][1]
    fused = {"qkv": ((sum(rows.values()), width), dtype)}
    apart = {name: tensors[name] for name in "qkv"}
    ranks, degree = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    trainer = Layout.fsdp(fused, ranks).split("qkv", rows)
    generator = Layout.cut(apart, Mesh.of(degree), lambda name: (0,)).fused("qkv", "qkv")
    full = whole(apart)
    together = torch.cat([full[name] for name in "qkv"])
    # The trainer's local tensors are chunks of the fused weight itself.
    chunks = together.chunk(ranks)
    held = gather_then_shard(trainer, full)
    for rank, chunk in enumerate(chunks):
        assert torch.equal(held[rank]["qkv"].view(torch.uint8), chunk.view(torch.uint8))
    got, _ = execute(reshard(trainer, generator), held)
    for rank in range(generator.ranks):
        pieces = [
            full[name].chunk(degree)[rank] for name in "qkv" if rank < len(full[name].chunk(degree))
        ]
        assert torch.equal(got[rank]["qkv"].view(torch.uint8), torch.cat(pieces).view(torch.uint8))
    back, _ = execute(reshard(generator, trainer), got)
    assert same(back, held)


def test_experts_that_are_fused_and_stacked_meet_experts_one_by_one():
    names = [f"{part}{n}" for n in range(4) for part in ("gate", "up")]
    tensors = dict.fromkeys(names, ((3, 5), "float32"))
    mesh = Mesh.of(2)
    destination = Layout.cut(
        {n: tensors[n] for n in names[:4]}, Mesh.of(1), lambda name: (None,)
    ) | Layout.cut({n: tensors[n] for n in names[4:]}, Mesh.of(1, first=1), lambda name: (None,))
    for n in range(4):
        destination = destination.fused(f"expert{n}", (f"gate{n}", f"up{n}"))
    destination = destination.stacked("experts", [f"expert{n}" for n in range(4)])
    full = whole(tensors)
    source = Layout.cut(tensors, mesh, lambda name: (0,))
    got, _ = execute(reshard(source, destination), gather_then_shard(source, full))
    assert list(got[0]) == list(got[1]) == ["experts"]
    for rank in (0, 1):
        want = torch.stack(
            [torch.cat([full[f"gate{n}"], full[f"up{n}"]]) for n in (2 * rank, 2 * rank + 1)]
        )
        assert same({0: {"experts": got[rank]["experts"]}}, {0: {"experts": want}})


def test_a_tied_tensor_travels_once_unless_the_destination_keeps_two():
    tensors = {"embed": ((6, 4), "float32"), "norm": ((4,), "float32")}
    tied = Layout.fsdp(tensors, 2, aliases={"head": "embed"})
    also = Layout.whole(tensors, aliases={"head": "embed"})
    apart = Layout.whole({**tensors, "head": tensors["embed"]})
    renamed = Layout.whole(
        {"head": tensors["embed"], "norm": tensors["norm"]}, aliases={"embed": "head"}
    )
    full = whole(tensors)
    held = gather_then_shard(tied, full)
    assert reshard(tied, also).nbytes == 6 * 4 * 4 + 4 * 4
    got, _ = execute(reshard(tied, apart), held)
    assert same({0: {"w": got[0]["head"]}}, {0: {"w": full["embed"]}})
    got, _ = execute(reshard(tied, renamed), held)
    assert same({0: {"w": got[0]["head"]}}, {0: {"w": full["embed"]}})
    with pytest.raises(
        LayoutMismatch, match=r"ties tensors that the source trains apart; found .*; untie them"
    ):
        reshard(apart, also)


def test_tensors_without_elements_need_no_copy():
    tensors = {"none": ((0, 4), "float32"), "some": ((2,), "float32")}
    assert [
        copy.tensor for copy in reshard(Layout.whole(tensors), Layout.whole(tensors)).copies()
    ] == ["some"]


def test_a_cast_down_travels_in_the_smaller_dtype():
    tensors = {"w": ((4, 4), "float32"), "n": ((4,), "int64")}
    source = Layout.fsdp(tensors, 2)
    down = reshard(source, Layout.whole(tensors).cast("bfloat16"))
    assert {copy.tensor: copy.dtype for copy in down.copies()} == {"w": "bfloat16", "n": "int64"}
    assert down.nbytes == 16 * 2 + 4 * 8
    up = reshard(source.cast("bfloat16"), Layout.whole(tensors))
    assert up.nbytes == down.nbytes


def test_a_rank_that_holds_one_box_twice_counts_once_among_the_senders():
    ends = np.array([[0], [0], [0]]), np.array([[4], [4], [4]])
    twice = apart([0, 0, 1], *ends)
    source = Layout.whole({f"t{n}": ((4,), "uint8") for n in range(4)})
    held = {
        name: type(each)(name=name, shape=(4,), dtype="uint8", shards=twice, into=name)
        for name, each in source.tensors.items()
    }
    assert reshard(Layout(tensors=held), source).pair_copies.tolist() == [[2], [2]]


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (
            {"a": (4,)},
            {"b": (4,)},
            r"wants tensor 'b', which the source does not have; found 1 tensors, .*; both",
        ),
        (
            {"a": (4,)},
            {"a": (5,)},
            r"'a' has two shapes; found \[4\] at the source, \[5\] at the destination; both",
        ),
    ],
)
def test_layouts_of_two_models_are_refused(source, destination, message):
    sides = [
        Layout.whole({name: (shape, "uint8") for name, shape in each.items()})
        for each in (source, destination)
    ]
    with pytest.raises(LayoutMismatch, match=message):
        reshard(*sides)


def test_a_source_with_a_hole_is_refused():
    full = Layout.fsdp({"a": ((8, 2), "uint8")}, 4)
    shards = full.tensors["a"].shards
    some = apart(shards.ranks[:3], shards.start[:3], shards.stop[:3])
    hole = Layout(
        tensors={
            "a": type(full.tensors["a"])(
                name="a", shape=(8, 2), dtype="uint8", shards=some, into="a"
            )
        }
    )
    with pytest.raises(
        LayoutMismatch,
        match=r"'a' that the destination needs is held by no source rank; found boxes",
    ):
        reshard(hole, full)
    assert reshard(full, hole).nbytes == 12


def test_a_plan_is_computed_once():
    def layout(ranks: int) -> Layout:
        return Layout.fsdp({"once": ((16, 2), "uint8")}, ranks)

    before = reshard.cache_info()
    assert reshard(layout(4), layout(2)) is reshard(layout(4), layout(2))
    assert reshard.cache_info().misses == before.misses + 1


def llama_405b() -> dict[str, tuple[tuple[int, ...], str]]:
    width, inner, keys = 16384, 53248, 1024
    layer = {
        "q": (width, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, width),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "norm": (width,),
        "norm2": (width,),
    }
    shapes = {f"{n}.{name}": shape for n in range(126) for name, shape in layer.items()}
    return {
        name: (shape, "bfloat16") for name, shape in {**shapes, "embed": (128256, width)}.items()
    }


def test_405b_is_planned_from_512_to_512_ranks():
    tensors = llama_405b()
    cut = {"o": 1, "down": 1, "norm": None, "norm2": None}
    destination = Layout.cut(
        tensors, Mesh.of(64, 8), lambda name: (None, cut.get(name.split(".")[-1], 0))
    )
    plan = reshard(Layout.fsdp(tensors, 512), destination)
    wanted = sum(
        2 * int(held.shards.local_shape.prod(axis=1).sum()) for held in destination.tensors.values()
    )
    assert plan.nbytes == wanted
    loads = plan.pair_bytes.sum(axis=1)
    assert loads.max() < 1.01 * loads.mean()
    assert len(plan.kinds) == 7
