"""A layout made from one rank's DTensors, or from a plan by names, is what every rank really
holds.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from transport.weights import LayoutMismatch
from transport.weights.layout.from_torch import layout_of
from transport.weights.layout.layout import Layout, Mesh
from transport.weights.layout.parallel_plan import mesh_layout

from ..sides import Local, gather_then_shard, same

WORLD = 8


@contextlib.contextmanager
def seat(rank: int) -> Iterator[None]:
    """This process as one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Fill the parameters with numbers, no two alike; copies of them by name."""
    first = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view(parameter.shape))
            first += parameter.numel()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def held_by_all(make: Callable[[], dict[str, torch.Tensor]]) -> tuple[Local, list[Layout]]:
    """What each rank holds, ranks without elements left out; and the layout that each makes of
    it.
    """
    found: Local = {}
    layouts = []
    for rank in range(WORLD):
        with seat(rank):
            tensors = make()
            layouts.append(layout_of(tensors, range(WORLD)))
            local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
            found[rank] = {
                n: t.detach() for n, t in local.items() if t.numel() and n in layouts[-1].tensors
            }
    return found, layouts


def check(full: dict[str, torch.Tensor], make: Callable[[], dict[str, torch.Tensor]]) -> Layout:
    """All ranks make the same layout, and hold what it says."""
    found, layouts = held_by_all(make)
    assert all(layout == layouts[0] for layout in layouts)
    want = gather_then_shard(layouts[0], full)
    assert same({rank: found[rank] for rank in want}, want)
    assert not any(found[rank] for rank in found.keys() - want.keys())
    return layouts[0]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((8,), (Shard(0),)),
        ((8,), (Shard(1),)),
        ((8,), (Shard(-1),)),
        ((8,), (Replicate(),)),
        ((4,), (Shard(0),)),
        ((2, 4), (Shard(0), Shard(1))),
        ((2, 4), (Replicate(), Shard(0))),
        ((4, 2), (Shard(0), Shard(0))),
        ((2, 2, 2), (Shard(1), Replicate(), Shard(0))),
        ((8,), (_StridedShard(0, split_factor=2),)),
        ((4,), (_StridedShard(1, split_factor=3),)),
        ((2, 4), (Shard(0), _StridedShard(1, split_factor=2))),
        ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
        ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
    ],
)
@pytest.mark.parametrize("shape", [(16, 12), (13, 7), (3, 2)])
def test_the_layout_of_a_dtensor_is_what_dtensor_deals_out(mesh, placements, shape):
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)

    def make() -> dict[str, torch.Tensor]:
        if torch.tensor(mesh).prod() == WORLD:
            device_mesh = init_device_mesh("cpu", mesh)
        else:
            device_mesh = init_device_mesh(
                "cpu", (WORLD // mesh[0], *mesh), mesh_dim_names=("rest", "own")
            )["own"]
        return {"w": distribute_tensor(full, device_mesh, placements, src_data_rank=None)}

    if len(mesh) > 1 or mesh[0] == WORLD:
        check({"w": full}, make)
    else:  # half of the world does not take part: its own mesh has the other ranks
        for rank in range(WORLD):
            with seat(rank):
                tensor = make()["w"]
                layout = layout_of({"w": tensor}, range(WORLD))
                want = gather_then_shard(layout, {"w": full}).get(rank, {})
                assert same(
                    {0: want}, {0: {"w": tensor.to_local()} if tensor.to_local().numel() else {}}
                )


@pytest.mark.parametrize("rows", [16, 13, 7, 5, 1])
@pytest.mark.parametrize("mesh", [(8,), (2, 4), (4, 2)])
def test_fsdp2_shards_as_the_layout_says(mesh, rows):
    """One mesh dimension: FSDP; two: HSDP."""
    full = numbered(nn.Linear(6, rows))

    def make() -> dict[str, torch.Tensor]:
        model = nn.Linear(6, rows)
        numbered(model)
        names = ("replicate", "shard")[-len(mesh) :]
        return dict(
            fully_shard(
                model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names)
            ).named_parameters()
        )

    check(full, make)


class Mlp(nn.Module):
    """Two layers that tensor parallelism cuts by rows and by columns."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(5, inner)
        self.down = nn.Linear(inner, 5)


@pytest.mark.parametrize("inner", [16, 13, 9, 7])
@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
def test_fsdp2_over_tensor_parallel_cuts_by_tensor_parallel_first(mesh, inner):
    full = numbered(Mlp(inner))

    def make() -> dict[str, torch.Tensor]:
        model = Mlp(inner)
        numbered(model)
        names = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "tp"))
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, names["tp"], styles, src_data_rank=None)
        return dict(fully_shard(model, mesh=names["fsdp"]).named_parameters())

    layout = check(full, make)
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in full.items()}
    assert mesh_layout(shapes, {"up": "colwise", "down": "rowwise"}, Mesh.of(1, *mesh)) == layout
    last = layout.tensors["up.weight"].shards
    assert len(set(zip(last.start[:, 0].tolist(), last.stop[:, 0].tolist(), strict=True))) == len(
        last.ranks
    )
    assert layout.tensors["down.bias"].shards.start.max() < 5


def test_plain_tensors_are_replicas_and_tied_ones_travel_once():
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    layout = layout_of(model, range(1, 4))
    assert layout_of(model.state_dict(), range(1, 4)) == layout
    assert layout_of(model.to("meta"), range(1, 4)).ranks == 4
    assert layout == Layout.cut(
        {"embed.weight": ((6, 4), "float32")},
        Mesh((3,), (1, 2, 3)),
        lambda name: (None,),
        aliases={"head.weight": "embed.weight"},
    )


def test_a_partial_tensor_is_refused():
    with seat(0):
        tensor = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (WORLD,)), [Partial()])
        with pytest.raises(
            LayoutMismatch, match=r"'w' has no slice that a rank could send; found .*; redistribute"
        ):
            layout_of({"w": tensor}, range(WORLD))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=4,
        attention_bias=True,
        mlp_bias=True,
    )
    return LlamaForCausalLM(config)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=4,
        num_experts=3,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("make_model", [llama, qwen3_moe])
def test_a_plan_of_transformers_gives_the_slices_that_transformers_cuts(make_model):
    from transformers import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    full = numbered(make_model())

    def make() -> dict[str, torch.Tensor]:
        model = make_model()
        numbered(model)
        names = ("pp", "dp_replicate", "fsdp", "tp")
        mesh = init_device_mesh("cpu", (1, 1, 1, WORLD), mesh_dim_names=names)
        model.maybe_distribute_model(
            model, DistributedConfig(tp_size=WORLD), TransformersDeviceMesh(mesh, mesh)
        )
        return dict(model.named_parameters())

    layout = check(full, make)
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in full.items()}
    plan = make_model().tp_plan
    assert mesh_layout(shapes, plan, Mesh.of(1, 1, WORLD)) == layout
    cut = {
        name
        for name, held in layout.tensors.items()
        if len({*map(tuple, held.shards.start.tolist())}) > 1
    }
    assert any("q_proj" in name for name in cut) and any("down_proj" in name for name in cut)
    assert not any("layernorm" in name for name in cut)


def test_a_plan_may_lack_the_prefix_and_name_experts_by_the_stack():
    shapes = {
        "model.layers.3.mlp.experts.gate_up_proj": ((4, 12, 6), "float32"),
        "model.norm.weight": ((6,), "float32"),
    }
    packed = mesh_layout(
        shapes, {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}, Mesh.of(1, 1, 2)
    )
    assert packed.local(1)["model.layers.3.mlp.experts.gate_up_proj"] == ((4, 6, 6), "float32")
    assert packed.tensors["model.layers.3.mlp.experts.gate_up_proj"].shards.start[
        :, 1
    ].tolist() == [0, 6, 3, 9]
    grouped = mesh_layout(
        shapes, {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}, Mesh.of(1, 1, 2)
    )
    assert grouped.local(1)["model.layers.3.mlp.experts.gate_up_proj"] == ((2, 12, 6), "float32")


def test_an_unknown_style_is_refused():
    with pytest.raises(
        LayoutMismatch,
        match=r"cuts tensor 'a.weight' in a way .*; found style 'diagonal'; use one of",
    ):
        mesh_layout({"a.weight": ((4, 4), "float32")}, {"a": "diagonal"}, Mesh.of(1, 1, 2))
