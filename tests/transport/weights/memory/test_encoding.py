"""What travels in place of a tensor: the numbers a generator would have made, in a quarter or half
of the bytes.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from operators.engine.precision.linear import FORMATS, pack
from transport.weights import FlatLayout, LayoutMismatch, tensor_encoder
from transport.weights.encoding import QUANTIZED, Encoding
from transport.weights.tensor_encoder import quantize

from .encoded import decode, encoder_of, flat_layout

FORMS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def model(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens.weight": (11, 16),
        "layers.0.q_proj.weight": (24, 16),
        "layers.0.q_proj.bias": (24,),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.experts.up": (3, 8, 16),
        "lm_head.weight": (11, 16),
    }
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    return {**tensors, "steps": torch.tensor([3])}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    st.lists(floats, min_size=1, max_size=40),
    st.integers(1, 7),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_narrow_numbers_are_those_of_a_generator_that_quantises_by_itself(
    numbers, rows, form, dtype
):
    full = torch.from_numpy(np.resize(np.array(numbers, np.float32), (rows, len(numbers))))
    finite = full.clamp(-6e4, 6e4)
    ours = torch.empty(full.shape, dtype=FORMS[form]), torch.empty(rows, 1)
    theirs = torch.empty(full.shape, dtype=FORMS[form]), torch.empty(rows, 1)
    quantize(finite, *ours, top=QUANTIZED[form].top, through=dtype)
    pack(finite.to(dtype), FORMATS[form], *theirs)
    assert all(
        torch.equal(bits(mine), bits(other)) for mine, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_formats_of_both_rooms_are_the_same(form):
    assert (getattr(torch, QUANTIZED[form].dtype), QUANTIZED[form].top) == (
        FORMATS[form].dtype,
        FORMATS[form].top,
    )
    assert FORMATS["int8_dynamic"].dtype is FORMATS["int8"].dtype
    assert FORMATS["int8_dynamic"].top == FORMATS["int8"].top


@pytest.mark.parametrize("form", FORMS)
def test_narrowing_in_slices_gives_what_the_whole_gives(monkeypatch, form):
    full = torch.randn(3, 37, 12)
    found = []
    for slice_numbers in (1 << 20, 100):
        monkeypatch.setitem(tensor_encoder.SLICE, "cpu", slice_numbers)
        values, scale = torch.empty(full.shape, dtype=FORMS[form]), torch.empty(3, 37, 1)
        quantize(full, values, scale, top=QUANTIZED[form].top, through=torch.float32)
        found.append((bits(values), bits(scale)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite_is_not_finite_when_it_arrives(form, poison):
    tensors = model()
    tensors["layers.0.q_proj.weight"][3, 5] = poison
    into = {"layers.0.q_proj.weight": torch.zeros(24, 16)}
    decode(encoder_of(Encoding(quantized=form), tensors).encode(tensors), into)
    rows = into["layers.0.q_proj.weight"].isfinite().all(1)
    assert not rows[3]
    assert rows.sum() == 23


def test_matrices_travel_narrow_and_embeddings_norms_biases_heads_and_integers_do_not():
    layout = flat_layout(Encoding(dtype="bfloat16", quantized="int8"), model())
    assert {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors} == {
        "embed_tokens.weight": ("bfloat16", (11, 16)),
        "layers.0.q_proj.weight": ("int8", (24, 16)),
        "layers.0.q_proj.weight:scale": ("float32", (24, 1)),
        "layers.0.q_proj.bias": ("bfloat16", (24,)),
        "layers.0.input_layernorm.weight": ("bfloat16", (16,)),
        "layers.0.experts.up": ("int8", (3, 8, 16)),
        "layers.0.experts.up:scale": ("float32", (3, 8, 1)),
        "lm_head.weight": ("bfloat16", (11, 16)),
        "steps": ("int64", (1,)),
    }


def test_named_tensors_alone_travel_narrow_where_names_are_given():
    layout = flat_layout(Encoding(quantized="fp8", names=frozenset({"lm_head.weight"})), model())
    assert {spec.name for spec in layout.tensors if spec.dtype == "float8_e4m3fn"} == {
        "lm_head.weight"
    }


@pytest.mark.parametrize("name", ["nowhere", "layers.0.q_proj.bias", "steps"])
def test_a_named_tensor_that_cannot_be_narrow_is_refused(name):
    with pytest.raises(LayoutMismatch, match=f"no floating matrix of this model; found '{name}'"):
        flat_layout(Encoding(quantized="int8", names=frozenset({name})), model())


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_without_a_narrow_format_the_layout_is_that_of_a_cast(dtype):
    tensors = model()
    assert flat_layout(Encoding(dtype=dtype), tensors) == FlatLayout.of(tensors, dtype=dtype)
    assert encoder_of(Encoding(dtype=dtype), tensors).encode(tensors) == tensors


@pytest.mark.parametrize(
    "knobs", [{"dtype": "int8"}, {"dtype": "complex64"}, {"quantized": "int4"}]
)
def test_an_encoding_that_is_not_known_is_refused(knobs):
    with pytest.raises(LayoutMismatch, match="weights cannot travel with that"):
        Encoding(**knobs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_encoded_is_decoded_into_any_dtype_within_its_rounding(form, dtype):
    tensors = model()
    into = {
        name: torch.zeros_like(tensor, dtype=dtype if tensor.ndim else None)
        for name, tensor in tensors.items()
    }
    encoded = encoder_of(Encoding(dtype="bfloat16", quantized=form), tensors).encode(tensors)
    decode(encoded, into)
    for name, tensor in tensors.items():
        narrowed = name + ":scale" in encoded
        step = 2**-7 + ({"int8": 0.5 / 127, "fp8": 2**-4}[form] if narrowed else 0)
        top = tensor.abs().amax(-1, keepdim=True)
        assert ((into[name].double() - tensor.double()).abs() <= top.double() * step).all()


def test_encoding_a_second_version_takes_no_memory_and_overwrites_the_first():
    encoded = encoder_of(Encoding(quantized="int8"), model())
    first, second = (encoded.encode(model(seed)) for seed in (1, 2))
    name = "layers.0.q_proj.weight"
    assert first[name].data_ptr() == second[name].data_ptr()
    fresh = encoder_of(Encoding(quantized="int8"), model()).encode(model(2))
    assert torch.equal(second[name], fresh[name])


def test_tied_matrices_travel_narrow_once_under_whichever_name_they_are_published():
    weight = torch.randn(4, 8)
    encoded = encoder_of(Encoding(quantized="int8"), {"a.weight": weight, "b.weight": weight})
    assert [spec.name for spec in encoded.layout.tensors.values()] == ["a.weight", "a.weight:scale"]
    both, other = (
        encoded.encode({"a.weight": weight, "b.weight": weight}),
        encoded.encode({"b.weight": weight}),
    )
    assert both.keys() == other.keys() == {"a.weight", "a.weight:scale"}


@pytest.mark.parametrize("change", [{}, {"layers.0.q_proj.weight": torch.zeros(24, 15)}])
def test_another_model_than_the_encoder_was_made_for_is_refused(change):
    tensors = model()
    encoded = encoder_of(Encoding(quantized="int8"), tensors)
    del tensors["layers.0.q_proj.weight"]
    with pytest.raises(LayoutMismatch, match="'layers.0.q_proj.weight' cannot be quantized; found"):
        encoded.encode({**tensors, **change})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_versions_arrive_narrow_over_every_executor(place, form, adopt):
    encoded = encoder_of(Encoding(dtype="bfloat16", quantized=form), model())
    mine = {
        spec.name: torch.nn.Parameter(
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)), requires_grad=False
        )
        for spec in encoded.layout.tensors.values()
    }
    writer, reader = (
        place.writer(encoded.layout.flat(0), checksum="tensors"),
        place.reader(attach=mine, adopt=adopt),
    )
    for version in (1, 2, 3):
        assert writer.publish(version, encoded.encode(model(version)))
        place.settle(writer, reader)
        halves = model(version, torch.bfloat16)
        expected = encoder_of(Encoding(quantized=form), halves).encode(halves)
        assert all(torch.equal(bits(mine[name].data), bits(expected[name])) for name in mine)


def test_a_version_that_goes_out_later_has_the_numbers_it_was_published_with(place):
    encoded = encoder_of(Encoding(quantized="int8"), model())
    writer, name = place.writer(encoded.layout.flat(0)), "layers.0.q_proj.weight"
    first, second = place.reader("first"), place.reader("second")
    trained = model(1)
    held = [
        {
            spec.name: torch.nn.Parameter(
                torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)), requires_grad=False
            )
            for spec in encoded.layout.tensors.values()
        }
        for _ in range(2)
    ]
    for version, reader, tensors in ((1, first, held[0]), (2, second, held[1])):
        reader.attach(tensors)
        writer.publish(version, encoded.encode(trained))
        place.settle(writer, reader)
    assert not writer.publish(3, encoded.encode(trained))
    expected = encoded.encode(trained)[name].clone()
    trained[name].neg_()
    place.settle(writer, first, second)
    place.settle(writer, first, second)
    assert first.version == 3
    assert torch.equal(held[0][name], expected)
    assert writer.version == 3
