"""Whatever the layouts of both sides, each rank gets exactly the bytes of its boxes of the full
tensors.
"""

import random

import pytest
import torch

from transport.weights import Layout, Mesh, ShardedReader

from ..sharded_rig import FAST, backed, full, plane, shards, until

MODEL = {
    "embed": ((31, 8), "float32"),
    "q": ((16, 24), "float32"),
    "k": ((8, 24), "float32"),
    "v": ((8, 24), "float32"),
    "out": ((24, 16), "float32"),
    "norm": ((24,), "float32"),
    "scale": ((), "float32"),
    "steps": ((3,), "int64"),
}


def tp(ranks: int, dtype: str = "float32") -> Layout:
    """Rows of q, k, v fused into one tensor, columns of out, the rest whole."""
    cuts = {"q": 0, "k": 0, "v": 0, "out": 1, "embed": 0}
    return (
        Layout.cut(MODEL, Mesh.of(ranks), lambda name: (cuts.get(name),))
        .fused("qkv", ["q", "k", "v"])
        .cast(dtype)
    )


def fsdp(ranks: int) -> Layout:
    return Layout.fsdp(MODEL, ranks)


def grid() -> Layout:
    """2-D: FSDP x tensor parallel; each dimension that is cut, cut by one of them or both."""
    cuts = {"q": (0, 1), "k": (None, 0), "v": (0, 0), "out": (1, 0), "embed": (0, None)}
    return Layout.cut(MODEL, Mesh.of(2, 2), lambda name: cuts.get(name, (None, None)))


def assert_bytes(group, tensors) -> None:
    for rank, mine in enumerate(group.tensors):
        wanted = shards(group.layout, rank, tensors)
        assert mine.keys() == wanted.keys()
        for name in mine:
            assert torch.equal(mine[name].detach(), wanted[name]), (rank, name)


BACKENDS = ("gloo", "shared_memory", "cuda_ipc")


@pytest.fixture(params=BACKENDS)
def backend(request, tmp_path):
    """Knobs of both ends; a GPU's memory is in files here."""
    return backed(request.param, tmp_path)


@pytest.mark.parametrize("hold", ["snapshot", "until_settle"])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (fsdp(1), Layout.whole(MODEL)),
        (fsdp(3), tp(2)),
        (tp(2), fsdp(3)),
        (grid(), tp(1)),
        (fsdp(2), tp(2, "bfloat16")),
        (fsdp(2).cast("bfloat16"), tp(1)),
        (Layout.whole(MODEL, ranks=2), grid()),
    ],
    ids=["one", "fsdp-tp", "tp-fsdp", "grid-one", "cast-down", "cast-up", "replicas-grid"],
)
def test_every_rank_gets_the_bytes_of_its_own_boxes(tmp_path, source, destination, hold, backend):
    address = f"ipc://{tmp_path}/w"
    with plane(source, destination, address, hold=hold, bucket_bytes=512, **backend) as (
        trainer,
        group,
    ):
        for version in (0, 1, 2):
            assert all(writer.settle(10.0) for writer in trainer.writers)
            tensors = trainer.publish(version)
            until(lambda version=version: group.versions == {version}, group)
            assert_bytes(group, tensors)


@pytest.mark.parametrize(
    ("seed", "backend"), [(seed, BACKENDS[seed % 2]) for seed in range(12)], indirect=["backend"]
)
def test_random_layouts_get_the_bytes_of_a_gather_and_a_cut(tmp_path, seed, backend):
    draw = random.Random(seed)

    def layout() -> Layout:
        shape = draw.choice([(1,), (2,), (3,), (2, 2), (4,)])
        cuts = {
            name: tuple(draw.choice([None, *range(len(size))]) for _ in shape)
            for name, (size, _) in MODEL.items()
        }
        return Layout.cut(MODEL, Mesh.of(*shape), cuts.__getitem__)

    source, destination = layout(), layout()
    bucket = draw.choice([64, 300, 1 << 20])
    with plane(source, destination, f"ipc://{tmp_path}/w", bucket_bytes=bucket, **backend) as (
        trainer,
        group,
    ):
        for version in (1, 2):
            tensors = trainer.publish(version)
            until(lambda version=version: group.versions == {version}, group)
            assert_bytes(group, tensors)


def test_what_the_layout_does_not_describe_keeps_its_values(tmp_path, backend):
    source = Layout.whole({"a": ((4, 8), "float32"), "b": ((4, 8), "float32")})
    both = source.fused("ab", ["a", "b"])
    part = Layout(tensors={"b": both.tensors["b"]})
    with plane(source, part, f"ipc://{tmp_path}/w", **backend) as (trainer, group):
        group.close()
        mine = {"ab": torch.nn.Parameter(torch.full((8, 8), 77.0))}
        reader = ShardedReader(
            part, 0, f"ipc://{tmp_path}/w", "other", deadlines=FAST, memory=backend["memory"]
        )
        reader.attach(mine)
        for version in (1, 2, 3):
            tensors = trainer.publish(version)
            assert reader.wait(version, 20.0) == version
            assert torch.equal(mine["ab"][4:].detach(), tensors["b"])
            assert bool((mine["ab"][:4] == 77).all())
        reader.close()


def test_tied_tensors_travel_once_and_stay_tied(tmp_path):
    source = Layout.whole({"embed": ((6, 4), "float32")}, aliases={"head": "embed"})
    with plane(source, source, f"ipc://{tmp_path}/w") as (trainer, group):
        tensors = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        assert torch.equal(group.tensors[0]["embed"].detach(), tensors["embed"])
    assert full(source, 1).keys() == {"embed"}
