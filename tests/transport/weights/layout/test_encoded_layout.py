"""What travels for tensors that ranks share out: narrow shards, and a row's scale wherever a part
of the row is.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transport.weights import Layout, LayoutMismatch, Mesh
from transport.weights.encoding import SCALE, Encoding

from ..sides import gather_then_shard, meshed

SHAPES = {"w": ((5, 12), "float32"), "experts": ((3, 4, 6), "bfloat16"), "bias": ((7,), "float32")}


@given(meshed(SHAPES), st.sampled_from(["int8", "fp8"]))
def test_every_part_of_a_row_has_the_row_s_scale_beside_it(layout, form):
    encoded = Encoding(dtype="bfloat16", quantized=form).layout(layout)
    full = {}
    for name, (shape, _) in SHAPES.items():
        full[name] = torch.zeros(shape)
        if len(shape) > 1:
            full[name + SCALE] = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1).float()
            full[name] += full[name + SCALE]
    local = gather_then_shard(encoded, full)
    assert local.keys() == gather_then_shard(layout, {name: full[name] for name in SHAPES}).keys()
    for held in local.values():
        assert {name for name in held if name.endswith(SCALE)} == {
            n + SCALE for n in ("w", "experts") if n in held
        }
        for name in {"w", "experts"} & held.keys():
            assert (held[name + SCALE] == held[name].float()).all(), (
                "the scale of each row, by place"
            )
    narrow = {"int8": "int8", "fp8": "float8_e4m3fn"}[form]
    dtypes = {
        name: held.dtype for name, held in encoded.tensors.items() if not name.endswith(SCALE)
    }
    assert dtypes == {"w": narrow, "experts": narrow, "bias": "bfloat16"}


def test_a_flat_buffer_has_aliases_of_what_lies_in_it():
    layout = Layout.whole(SHAPES, aliases={"tied": "w"})
    assert layout.flat(0).aliases == {"tied": "w"}
    fused = Layout.cut(SHAPES, Mesh.of(2), lambda name: (0,), aliases={"tied": "w"})
    assert fused.fused("both", ["w"]).flat(0).aliases == {"tied": "both"}


def test_a_tensor_inside_of_another_is_refused():
    fused = Layout.cut(SHAPES, Mesh.of(2), lambda name: (0,)).fused("both", ["w"])
    with pytest.raises(LayoutMismatch, match=r"found it fused into 'both'; offer it"):
        Encoding(quantized="int8").layout(fused)
