"""A layout says which slice of each full tensor each rank holds, as torch.chunk cuts it."""

import itertools

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.weights import LayoutMismatch, MessageError
from transport.weights.layout.layout import Layout, Mesh, Shards, TensorLayout

from ..sides import MESHES, apart, gather_then_shard, models, sides, whole

laid = models().flatmap(lambda tensors: sides(tensors, False))


def dealt(tensor, mesh_shape, cuts, order, parts, place):
    """What the rank at `place` holds, by torch.chunk alone."""
    for axis in order:
        if cuts[axis] is not None:
            mine = []
            for part in tensor.chunk(parts[axis], cuts[axis]):
                pieces = part.chunk(mesh_shape[axis], cuts[axis])
                mine.append(
                    pieces[place[axis]]
                    if place[axis] < len(pieces)
                    else part.narrow(cuts[axis], 0, 0)
                )
            tensor = torch.cat(mine, cuts[axis])
    return tensor


@settings(max_examples=200)
@given(st.data())
def test_a_mesh_deals_out_a_tensor_as_torch_chunk_does(data):
    shape = data.draw(st.lists(st.integers(1, 13), max_size=3).map(tuple))
    mesh_shape = data.draw(st.sampled_from(MESHES))
    axes = range(len(mesh_shape))
    cuts = tuple(data.draw(st.sampled_from([None, *range(len(shape))])) for _ in axes)
    order = tuple(data.draw(st.permutations(axes)))
    parts = tuple(data.draw(st.sampled_from([1, 2, 3])) for _ in axes)
    full = torch.arange(int(np.prod(shape)), dtype=torch.int64).view(shape)
    held = TensorLayout(
        name="w",
        shape=shape,
        dtype="int64",
        shards=Shards.cut(shape, Mesh.of(*mesh_shape), cuts, order, parts),
        into="w",
    )
    found = gather_then_shard(Layout(tensors={"w": held}), {"w": full})
    for rank, place in enumerate(itertools.product(*map(range, mesh_shape))):
        want = dealt(full, mesh_shape, cuts, order, parts, place)
        if want.numel():
            assert torch.equal(found[rank]["w"], want)
        else:
            assert "w" not in found.get(rank, {})


def test_fsdp_leaves_ranks_empty_where_rows_run_out():
    layout = Layout.fsdp({"w": ((5, 3), "float32"), "b": ((), "float32")}, 4)
    assert [layout.local(rank).get("w") for rank in range(4)] == [((2, 3), "float32")] * 2 + [
        ((1, 3), "float32"),
        None,
    ]
    assert all(layout.local(rank)["b"] == ((), "float32") for rank in range(4))
    assert layout.ranks == 4


def test_tensor_parallel_first_and_fsdp_within_is_the_other_order():
    fsdp_first = Shards.cut((8,), Mesh.of(2, 2), (0, 0))
    tp_first = Shards.cut((8,), Mesh.of(2, 2), (0, 0), (1, 0))
    assert fsdp_first.start.ravel().tolist() == [0, 2, 4, 6]
    assert tp_first.start.ravel().tolist() == [0, 4, 2, 6]


def test_stages_of_a_pipeline_hold_their_own_tensors():
    tensors = {f"{n}.w": ((4, 4), "float32") for n in range(4)}
    first = Layout.cut({n: tensors[n] for n in ("0.w", "1.w")}, Mesh.of(2), lambda name: (0,))
    last = Layout.cut(
        {n: tensors[n] for n in ("2.w", "3.w")}, Mesh.of(2, first=2), lambda name: (0,)
    )
    both = first | last
    assert [list(both.local(rank)) for rank in range(4)] == [["0.w", "1.w"]] * 2 + [
        ["2.w", "3.w"]
    ] * 2
    with pytest.raises(LayoutMismatch, match=r"share tensors; found \['0.w', '1.w'\] in both"):
        both | first


def test_fused_parts_lie_end_to_end_and_experts_in_a_stack():
    tensors = dict.fromkeys(("gate", "up", "e0", "e1", "e2"), ((4, 3), "float32"))
    layout = Layout.cut(tensors, Mesh.of(2), lambda name: (0,)).fused("gate_up", ("gate", "up"))
    layout = layout.stacked("experts", ("e0", "e1", "e2"))
    assert layout.local(1) == {"gate_up": ((4, 3), "float32"), "experts": ((3, 2, 3), "float32")}
    full = whole(tensors)
    held = gather_then_shard(layout, full)[1]
    assert torch.equal(
        held["gate_up"].view(torch.uint8),
        torch.cat([full["gate"][2:], full["up"][2:]]).view(torch.uint8),
    )
    stack = torch.stack([full[f"e{n}"][2:] for n in range(3)])
    assert torch.equal(held["experts"].view(torch.uint8), stack.view(torch.uint8))
    with pytest.raises(LayoutMismatch, match=r"no rank has a local tensor 'gate'; found 2 others"):
        layout.fused("again", ("gate", "up"))


def test_columns_are_fused_along_the_dimension_that_is_named():
    layout = Layout.whole({"a": ((2, 3), "float32"), "b": ((2, 5), "float32")})
    assert layout.fused("ab", ("a", "b"), dim=1).local(0) == {"ab": ((2, 8), "float32")}
    with pytest.raises(
        LayoutMismatch,
        match=r"rank 0 would hold 'ab' in two shapes; found .*; fuse all parts at once",
    ):
        layout.fused("ab", ("a", "b")).local(0)


def test_parts_of_a_split_weight_lie_where_they_lay():
    layout = Layout.fsdp({"qkv": ((7, 2), "float32")}, 3).split("qkv", {"q": 4, "k": 1, "v": 2})
    full = {
        "q": torch.arange(8.0).view(4, 2),
        "k": torch.arange(8.0, 10).view(1, 2),
        "v": torch.arange(10.0, 14).view(2, 2),
    }
    held = gather_then_shard(layout, full)
    assert [held[rank]["qkv"].flatten().tolist() for rank in range(3)] == [
        list(range(6)),
        list(range(6, 12)),
        [12, 13],
    ]
    with pytest.raises(
        LayoutMismatch, match=r"parts of 'qkv' must make up the whole; found .* for 7 along 0"
    ):
        Layout.whole({"qkv": ((7, 2), "float32")}).split("qkv", {"q": 4, "k": 4})


def test_adapters_alone_and_a_cast_leave_the_rest_as_it_is():
    layout = Layout.whole(
        {"w": ((2,), "float32"), "n": ((2,), "int64"), "lora": ((1,), "float32")}, ranks=2
    )
    assert list(layout.only(["lora"]).local(1)) == ["lora"]
    assert layout.cast("bfloat16").local(1) == {
        "w": ((2,), "bfloat16"),
        "n": ((2,), "int64"),
        "lora": ((1,), "bfloat16"),
    }
    assert layout.flat(0).nbytes == 3 * 64


@given(laid)
def test_a_layout_of_shards_survives_the_wire(layout):
    again = Layout.from_plain(msgpack.unpackb(msgpack.packb(layout.to_plain())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert [again.local(rank) for rank in range(again.ranks)] == [
        layout.local(rank) for rank in range(layout.ranks)
    ]


def test_equal_shards_are_sent_once():
    layout = Layout.fsdp({f"t{n}": ((8, 2), "float32") for n in range(50)}, 4)
    assert len(layout.to_plain()["shards"]) == 1


@pytest.mark.parametrize(
    "plain",
    [
        None,
        3,
        {},
        {"shards": [], "tensors": [["w", [2], "float32", "w", 0]], "aliases": {}},
        {
            "shards": [[1, 1, 1, b"", b"", b"", b"", b""]],
            "tensors": [["w", [2], "float32", "w", 0]],
            "aliases": {},
        },
        {"shards": [], "tensors": [], "aliases": {}},
    ],
)
def test_what_is_no_layout_of_shards_is_refused(plain):
    with pytest.raises((MessageError, LayoutMismatch), match=r".*; .*; .*"):
        Layout.from_plain(plain)


def test_shards_must_fit_their_tensor_and_their_rank():
    zero, two, four = np.array([[0]]), np.array([[2]]), np.array([[4]])
    with pytest.raises(
        LayoutMismatch, match=r"must be a box that is not empty; found starts \[\[2\]\]"
    ):
        Shards(np.array([0]), two, two, zero, two)
    with pytest.raises(
        LayoutMismatch,
        match=r"must lie inside its rank's local tensor; found one .*; see local_start",
    ):
        Shards(np.array([0]), zero, four, zero, two)
    shards = apart([0], zero, four)
    for name, shape, dtype in (
        ("v", (4,), "float32"),
        ("w", (3,), "float32"),
        ("w", (4, 1), "float32"),
        ("w", (4,), "x"),
    ):
        with pytest.raises(
            LayoutMismatch, match=r"'w' does not fit its shards; found .*; see Layout.cut"
        ):
            Layout(
                tensors={
                    "w": TensorLayout(name=name, shape=shape, dtype=dtype, shards=shards, into="w")
                }
            )


@pytest.mark.parametrize(
    ("cuts", "order"), [((0, 2), None), ((0,), None), ((0, 1), (0, 0)), ((-1, 0), None)]
)
def test_a_cut_that_the_tensor_or_the_mesh_does_not_have_is_refused(cuts, order):
    with pytest.raises(
        LayoutMismatch, match=r"cannot be cut by .* over a mesh of shape \[2, 2\]; found .*; give"
    ):
        Shards.cut((4, 4), Mesh.of(2, 2), cuts, order)


@pytest.mark.parametrize(("shape", "ranks"), [((2, 2), (0, 1, 2)), ((2,), (1, 1)), ((0,), ())])
def test_a_mesh_names_each_rank_once(shape, ranks):
    with pytest.raises(LayoutMismatch, match=r"needs as many ranks, each once; found"):
        Mesh(shape, ranks)


def test_a_layout_needs_tensors_and_aliases_of_its_own():
    with pytest.raises(
        LayoutMismatch, match=r"a layout needs a tensor; found none; pass the model's parameters"
    ):
        Layout(tensors={})
    with pytest.raises(
        LayoutMismatch, match=r"alias 'a' must stand for one travelling tensor; found 'b'; name"
    ):
        Layout.whole({"w": ((2,), "float32")}, aliases={"a": "b"})
