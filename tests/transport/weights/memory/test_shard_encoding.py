"""Ranks that quantise their shards make, to the bit, the slices of what one rank makes of whole
tensors.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transport.weights import Layout, LayoutMismatch, Mesh, Shards, reshard
from transport.weights.encoding import SCALE, Encoding
from transport.weights.tensor_encoder import Encoder

from ..sides import Local, execute, gather_then_shard, meshed, same
from .encoded import encoder_of

NAMES = frozenset({"o", "experts", "up"})


Full = dict[str, torch.Tensor]


@st.composite
def models(draw: Any) -> Full:
    """Matrices and a stack of them, some rows of zeros, some not finite; what is not quantised
    beside them.
    """
    few = st.integers(1, 9)
    width, inner = draw(few), draw(few)
    shapes = {
        "embed": (draw(few), width),
        "up": (inner, width),
        "o": (width, inner),
        "experts": (3, draw(few), inner),
        "norm": (width,),
    }
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    full = {
        name: torch.randn(shape, generator=random) * torch.logspace(-3, 3, shape[-1])
        for name, shape in shapes.items()
    }
    for poison in draw(
        st.lists(st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]), max_size=3)
    ):
        numbers = full[draw(st.sampled_from(sorted(NAMES)))].view(-1)
        numbers[draw(st.integers(0, len(numbers) - 1))] = poison
    if draw(st.booleans()):
        full["o"][0] = 0
    return {name: tensor.to(dtype) for name, tensor in full.items()}


def described(full: Full) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in full.items()
    }


def kept(made: Full, wanted: Any) -> Full:
    """Copies of what travels, cast as the writer casts."""
    return {
        name: made[name].to(getattr(torch, dtype)).clone() for name, (_, dtype) in wanted.items()
    }


def held_after(
    encoding: Encoding, layout: Layout, versions: list[Full], device: str = "cpu"
) -> tuple[Layout, list[Local], list[int]]:
    """What travels, what each rank holds of each version, and how many numbers the ranks agreed on
    at a time.
    """
    exchanges: list[int] = []
    encoders: list[Encoder] = []
    own: list[torch.Tensor] = []
    agreed: list[torch.Tensor] = []

    def agree(numbers: torch.Tensor) -> None:
        """Each rank is asked twice, for a lack of threads: what has it, and what does it make of
        what all have.
        """
        assert numbers.dtype is torch.int32, "a maximum of floats loses what is no number"
        if agreed:
            numbers.copy_(agreed[0])
        else:
            own.append(numbers.clone())

    shards = [
        {
            rank: {name: each.to(device) for name, each in local.items()}
            for rank, local in gather_then_shard(layout, full).items()
        }
        for full in versions
    ]
    everyone = range(layout.ranks)
    nothing = {
        name: torch.zeros((0,) * each.ndim, dtype=each.dtype, device=device)
        for name, each in versions[0].items()
    }
    encoders = [
        Encoder(encoding, layout, rank, nothing | shards[0][rank], agree) for rank in everyone
    ]
    found: list[Local] = []
    for local in shards:
        own.clear(), agreed.clear()
        for rank in everyone:
            encoders[rank].encode(nothing | local[rank])
        assert len(own) in (0, layout.ranks), "all take part, or none"
        if own:
            exchanges.append(len(own[0]))
            agreed.append(torch.stack(own).amax(0))
        made = [encoders[rank].encode(nothing | local[rank]) for rank in everyone]
        found.append({rank: kept(made[rank], encoders[0].layout.local(rank)) for rank in everyone})
    assert all(encoder.layout == encoders[0].layout for encoder in encoders)
    return encoders[0].layout, found, exchanges


def by_one_rank(encoding: Encoding, full: Full) -> Full:
    encoder = encoder_of(encoding, full)
    return kept(encoder.encode(full), encoder.layout.local(0))


@given(
    st.data(),
    models(),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([None, "float32", "bfloat16"]),
)
def test_shards_are_quantised_as_the_whole_is(
    data: Any, full: Full, form: str, through: str | None
) -> None:
    encoding = Encoding(dtype=through, quantized=form, names=NAMES)
    layout = data.draw(meshed(described(full)))
    second = {name: tensor.flip(0) * 2 for name, tensor in full.items()}
    sent, found, _ = held_after(encoding, layout, [full, second])
    for version, local in zip([full, second], found, strict=True):
        assert same(local, gather_then_shard(sent, by_one_rank(encoding, version)))


@pytest.mark.parametrize(
    ("cuts", "cut_rows"),
    [((0, None), 0), ((0, 0), 0), ((0, 1), 13 + 6), ((None, 1), 13 + 6), ((None, None), 0)],
    ids=["fsdp", "fsdp and rows", "fsdp and columns", "replicas and columns", "replicas"],
)
def test_ranks_agree_once_a_version_on_the_rows_that_are_cut_and_on_no_others(
    cuts: tuple[int | None, ...], cut_rows: int
) -> None:
    full = {"o": torch.randn(13, 8), "up": torch.randn(6, 8), "norm": torch.randn(8)}
    layout = Layout.cut(
        described(full), Mesh.of(2, 2), lambda name: cuts if name != "norm" else (0, None)
    )
    encoding = Encoding(dtype="bfloat16", quantized="int8", names=frozenset({"o", "up"}))
    _, _, exchanges = held_after(encoding, layout, [full] * 3)
    assert exchanges == ([cut_rows] * 3 if cut_rows else [])


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_what_shards_travel_as_arrives_as_slices_of_the_whole(form: str) -> None:
    """Trainer of fsdp x tp, uneven; readers that cut otherwise, and scales of rows that both sides
    cut.
    """
    full = {"o": torch.randn(13, 10), "up": torch.randn(7, 10), "norm": torch.randn(10)}
    encoding = Encoding(dtype="bfloat16", quantized=form, names=frozenset({"o", "up"}))
    trainer = Layout.cut(
        described(full),
        Mesh.of(3, 2),
        lambda name: {"o": (0, 1), "up": (0, 0), "norm": (0, None)}[name],
    )
    sent, (local,), _ = held_after(encoding, trainer, [full])
    one = by_one_rank(encoding, full)
    cut = {"o": 1, "up": 0, "up:scale": 0}
    reader = Layout.cut(described(one), Mesh.of(2), lambda name: (cut.get(name),))
    got, times = execute(reshard(sent, reader), local)
    assert all(bool((each == 1).all()) for rank in times.values() for each in rank.values())
    assert same(got, gather_then_shard(reader, one))


def test_an_encoding_is_the_same_after_its_way_through_a_message() -> None:
    for encoding in (
        Encoding(),
        Encoding(dtype="bfloat16", quantized="fp8", names=NAMES),
        Encoding(kept=("x",)),
    ):
        assert Encoding.from_plain(encoding.to_plain()) == encoding


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_shards_that_are_not_quantised_are_cast(dtype: str | None) -> None:
    full = {"o": torch.randn(4, 8), "steps": torch.tensor([3])}
    layout = Layout.cut(described(full), Mesh.of(2), lambda name: (0,))
    assert Encoding(dtype=dtype).layout(layout) == (layout if dtype is None else layout.cast(dtype))


def test_tied_shards_are_quantised_once() -> None:
    full = {"o": torch.randn(4, 8)}
    layout = replace(Layout.cut(described(full), Mesh.of(2), lambda name: (1,)), aliases={"p": "o"})
    sent, (local,), _ = held_after(Encoding(quantized="int8"), layout, [full])
    assert sent.aliases == {"p": "o"}
    assert set(local[0]) == {"o", "o" + SCALE}


def test_a_tensor_that_is_fused_into_another_is_refused() -> None:
    full = {"q": torch.randn(4, 8), "k": torch.randn(4, 8)}
    layout = Layout.cut(described(full), Mesh.of(2), lambda name: (0,)).fused("qk", ("q", "k"))
    with pytest.raises(
        LayoutMismatch,
        match="'q' cannot be quantized .* fused into 'qk'; offer it as a tensor of its",
    ):
        Encoding(quantized="int8").layout(layout)
    kept = Encoding(quantized="int8", names=frozenset()).layout(layout)
    assert kept == layout


def test_local_rows_that_hold_parts_of_several_are_refused() -> None:
    ends = np.array([[[0, 0], [2, 4]], [[2, 4], [4, 8]]])
    shards = Shards(
        np.array([0, 0]),
        ends[:, 0],
        ends[:, 1],
        np.array([[0, 0], [0, 4]]),
        np.array([[2, 8], [2, 8]]),
    )
    layout = Layout.whole({"o": ((4, 8), "float32")})
    layout = Layout(tensors={"o": replace(layout.tensors["o"], shards=shards)})
    with pytest.raises(
        LayoutMismatch,
        match="'o' cannot be quantized on rank 0; found 2 rows in its local tensor for 4",
    ):
        Encoder(
            Encoding(quantized="int8"), layout, 0, {"o": torch.zeros(2, 8)}, lambda numbers: None
        )


@pytest.mark.parametrize("name", ["nowhere", "norm"])
def test_a_named_tensor_that_cannot_be_quantised_is_refused(name: str) -> None:
    layout = Layout.fsdp({"o": ((4, 8), "float32"), "norm": ((8,), "float32")}, 2)
    with pytest.raises(LayoutMismatch, match=f"no floating matrix of this model; found '{name}'"):
        Encoding(quantized="int8", names=frozenset({"o", name})).layout(layout)


def settled(local: Full) -> Full:
    """The same with rows emptied that are not finite: each device makes its own bits of what is no
    number.
    """
    made = {name: each.cpu().clone() for name, each in local.items()}
    for name in [each for each in made if each.endswith(SCALE)]:
        lost = ~made[name][..., 0].isfinite()
        made[name][lost] = torch.inf
        made[name.removesuffix(SCALE)].view(torch.uint8)[lost] = 0
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_on_a_gpu_are_quantised_as_the_whole_is_there_and_here(
    form: str, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    full = {"o": torch.randn(513, 1030).to(dtype), "up": torch.randn(300, 1030).to(dtype)}
    full["o"][5, 7], full["up"][3] = float("nan"), 0
    encoding = Encoding(dtype="bfloat16", quantized=form, names=frozenset(full))
    layout = Layout.cut(described(full), Mesh.of(2, 2), lambda name: (0, 1))
    here = by_one_rank(encoding, full)
    there = by_one_rank(encoding, {name: tensor.cuda() for name, tensor in full.items()})
    assert same({0: settled(here)}, {0: settled(there)}) and not here["o" + SCALE][5].isfinite()
    sent, (found,), _ = held_after(encoding, layout, [full], device="cuda")
    on_host = {rank: settled(local) for rank, local in found.items()}
    wanted = gather_then_shard(sent, here)
    assert same(on_host, {rank: settled(local) for rank, local in wanted.items()})
