"""Quantised weights: bounds of rounding, the model they stand for, and versions that arrive over
the weight plane.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataflow import Model
from operators.engine import attention
from operators.engine.build import adapt
from operators.engine.decode import Engine
from operators.engine.interface import PromptStart
from operators.engine.pages import PAGE
from operators.engine.precision import (
    FORMATS,
    cast,
    fault,
    linear_weights,
    quantise,
    unrounded,
)
from operators.engine.precision import linear as linear_layers
from operators.engine.precision.intake import quantized_names
from operators.engine.precision.linear import (
    FEW_ROWS,
    QuantisedExperts,
    QuantisedLinear,
    pack,
    per_token,
    unpack,
)
from operators.engine.sampler import Sampling
from operators.models.folders import ModelError
from transport.weights import FlatLayout, Hub, WeightReader, WeightWriter
from transport.weights.encoding import Encoding
from transport.weights.layout.from_torch import layout_of
from transport.weights.tensor_encoder import Encoder

WHOLE_STEPS = 2


"""Of what rounding does, the most that last bits do by rounding: it moves a number by half a step,
they by a whole."""


IDS = torch.from_numpy(np.random.default_rng(0).integers(2, 32, (3, 20)))


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def packed(weight, form):
    values = torch.empty(weight.shape, dtype=form.dtype)
    scale = torch.empty(*weight.shape[:-1], 1)
    pack(weight, form, values, scale)
    return values, scale


def narrow_layers(model):
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, QuantisedLinear | QuantisedExperts)
    }


class Rounding(torch.nn.Linear):
    """The reference of layers that quantise inputs: float64, one number after the other."""

    form = FORMATS["int8_dynamic"]

    def forward(self, inputs):
        rows = inputs.reshape(-1, inputs.shape[-1]).double()
        scale = (rows.abs().amax(-1, keepdim=True).float() / self.form.top).double()
        exact = (rows.float() / torch.where(scale > 0, scale, 1).float()).clamp(
            -self.form.top, self.form.top
        )
        values = exact.round() if self.form.dtype is torch.int8 else exact.to(self.form.dtype)
        bias = None if self.bias is None else self.bias.double()
        out = F.linear(values.double() * scale, self.weight.double(), bias)
        return out.view(*inputs.shape[:-1], -1).to(inputs.dtype)


def stands_for(model, narrow, *, rounds=True):
    """A copy of the full `model` that holds the numbers which the layers of `narrow` stand for.

    rounds: it rounds inputs where they do.
    """
    oracle = copy.deepcopy(model)
    for path, layer in narrow_layers(narrow).items():
        numbers = unpack(layer.weight, layer.scale, torch.float32)
        if isinstance(layer, QuantisedExperts):
            oracle.get_parameter(path).data = numbers
            oracle.set_experts_implementation("eager")
            continue
        plain = oracle.get_submodule(path)
        plain.weight.data = numbers
        if layer.form.inputs and rounds:
            plain.__class__ = type("Rounding", (Rounding,), {"form": layer.form})
    return oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_int8_weight_is_off_by_half_a_scale_at_most(dtype):
    spread = torch.logspace(-6, 3, 300, dtype=torch.float64)[:, None]
    weight = (
        torch.randn(300, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        * spread
    ).to(dtype)
    values, scale = packed(weight, FORMATS["int8"])
    off = (weight.double() - values.double() * scale.double()).abs()
    assert (off <= scale.double() * 0.5 * (1 + 1e-4)).all()
    assert values.abs().max() == 127
    if dtype is torch.bfloat16:
        assert torch.equal(scale, scale.bfloat16().float())


def test_an_fp8_weight_is_off_by_half_a_unit_in_its_last_place_at_most():
    weight = torch.randn(300, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values, scale = packed(weight.float(), FORMATS["fp8"])
    off = (weight - values.double() * scale.double()).abs()
    assert (off <= torch.maximum(weight.abs() * 2**-4, scale.double() * 2**-10) * (1 + 1e-4)).all()
    assert values.float().abs().max() == 448


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_rows_and_tokens_of_zeros_stay_zero_and_none_is_not_finite(form):
    values, scale = packed(torch.zeros(3, 8), form)
    assert not unpack(values, scale, torch.float32).any()
    tokens, width = per_token(torch.zeros(2, 8), form)
    assert not (tokens.float() * width).any()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_gives_logits_that_are_not(make_model, weights, poison):
    model = make_model()
    model.model.layers[1].mlp.down_proj.weight[3, 5] = poison
    quantise(model, weights)
    assert not logits(model).isfinite().any()


def test_quantising_in_slices_gives_what_the_whole_gives(monkeypatch):
    weight = torch.randn(37, 12)
    whole = packed(weight, FORMATS["int8"])
    monkeypatch.setitem(linear_layers.SLICE, "cpu", 100)
    assert all(map(torch.equal, packed(weight, FORMATS["int8"]), whole))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [0.0, float("nan"), -float("inf")])
def test_parts_of_rows_are_quantised_as_whole_rows_are(form, dtype, poison):
    weight = torch.randn(3, 5, 12).to(dtype)
    weight[1, 2, 9], weight[0, 4] = poison, 0
    parts, own = weight.split([7, 5], -1), []

    def made(part, largest):
        values, scale = torch.empty(part.shape, dtype=form.dtype), torch.empty(3, 5, 1)
        pack(part.contiguous(), form, values, scale, largest)
        return values, scale

    for part in parts:
        made(part, lambda mine: own.append(mine.clone()))
    assert {each.dtype for each in own} == {torch.int32}, (
        "a maximum of floats loses what is no number"
    )
    found = [made(part, lambda mine: mine.copy_(torch.maximum(*own))) for part in parts]
    values, scale = packed(weight, form)
    assert torch.equal(
        torch.cat([each for each, _ in found], -1).view(torch.uint8), values.view(torch.uint8)
    )
    assert all(torch.equal(each.view(torch.int32), scale.view(torch.int32)) for _, each in found)


def test_slices_are_quantised_with_the_other_ranks_or_not_at_all(make_model):
    model = make_model()
    model._tp_size = 2
    with pytest.raises(
        ModelError, match="2 ranks share out is quantised with sliced=.*say how it is shared out"
    ):
        quantise(model, "int8")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral"])
@pytest.mark.parametrize("weights", FORMATS)
def test_a_quantised_model_computes_what_its_dequantised_weights_do(make_model, family, weights):
    model = make_model(family)
    narrow = copy.deepcopy(model)
    quantise(narrow, weights)
    layers = narrow_layers(narrow)
    assert len(layers) == (12 if family == "mixtral" else 14)
    plain, rounded = (logits(stands_for(model, narrow, rounds=rounds)) for rounds in (False, True))
    with unrounded(narrow):
        torch.testing.assert_close(logits(narrow), plain, rtol=1e-5, atol=1e-5)
    assert (logits(narrow) - rounded).abs().max() <= WHOLE_STEPS * (
        rounded - plain
    ).abs().max() + 1e-5
    assert (plain - logits(model)).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("tokens", [1, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("features", [33, 128])
def test_a_layer_of_half_width_agrees_with_float64(dtype, weights, tokens, features):
    torch.manual_seed(0)
    linear = torch.nn.Linear(features, 21, dtype=dtype).requires_grad_(False)
    layer = QuantisedLinear(linear, FORMATS[weights])
    inputs = torch.randn(tokens, features, dtype=dtype)
    given = inputs.double()
    if layer.form.inputs:
        values, width = per_token(inputs, layer.form)
        given = values.double() * width.double()
    expected = F.linear(given, layer.weight.double() * layer.scale.double(), linear.bias.double())
    assert layer(inputs).dtype is dtype
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=2**-7, atol=2**-7)


def test_a_library_whose_integers_saturate_is_not_used(monkeypatch):
    """As oneDNN's do on a processor with VNNI that it may not use (ONEDNN_MAX_CPU_ISA=AVX2)."""

    def saturating(x, weight):
        pairs = (
            ((x.int() + 128)[:, None, :] * weight.t().int()[None]).unflatten(-1, (-1, 2)).sum(-1)
        )
        return (pairs.clamp(-32768, 32767).sum(-1) - 128 * weight.int().sum(0)).int()

    torch.manual_seed(0)
    layer = QuantisedLinear(torch.nn.Linear(128, 96), FORMATS["int8_dynamic"])
    inputs = torch.randn(40, 128)
    values, width = per_token(inputs, layer.form)
    exact = F.linear(
        values.double() * width.double(),
        layer.weight.double() * layer.scale.double(),
        layer.bias.double(),
    )
    monkeypatch.setattr(torch, "_int_mm", saturating)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(
        linear_layers, "_multiplies_integers", linear_layers._multiplies_integers.__wrapped__
    )
    torch.testing.assert_close(layer(inputs).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_token_of_the_dynamic_format_has_one_result_whatever_is_beside_it(make_model):
    layer = QuantisedLinear(torch.nn.Linear(128, 96), FORMATS["int8_dynamic"])
    inputs = torch.randn(50, 128)
    together = layer(inputs)
    assert all(torch.equal(layer(inputs[i : i + 1])[0], together[i]) for i in range(50))


@pytest.mark.parametrize("weights", FORMATS)
def test_what_is_not_quantised_keeps_its_name_and_memory(make_model, weights):
    model = make_model("qwen2")
    before = dict(model.state_dict())
    intake = quantise(model, weights)
    after = model.state_dict()
    narrow = {f"{path}.weight" for path in narrow_layers(model)}
    assert set(after) == set(before) | {name.replace(".weight", ".scale") for name in narrow}
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in set(before) - narrow)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert list(intake.tensors) == [name for name, _ in make_model("qwen2").named_parameters()]


def test_staging_takes_no_memory(make_model):
    model = make_model(hidden_size=64, intermediate_size=128)
    intake = quantise(model, "int8")
    own = {parameter.data_ptr() for parameter in model.parameters()}
    staged = [tensor for tensor in intake.tensors.values() if tensor.data_ptr() not in own]
    assert len(staged) == 14
    assert sum(tensor.untyped_storage().nbytes() for tensor in staged) == 4 * len(staged)


def test_layers_that_share_a_weight_share_the_quantised_one(make_model):
    def shared():
        model = make_model()
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    model = shared()
    intake = quantise(model, "int8", adopt="copy")
    intake.tensors["model.layers.0.mlp.up_proj.weight"].data.mul_(3)
    intake.adopted()
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    assert first.weight is second.weight
    assert first.scale is second.scale
    torch.testing.assert_close(
        logits(model), logits(stands_for(shared(), model)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("adopt", ["view", "copy"])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("mixtral", {})],
)
def test_versions_from_the_trainer_are_quantised_and_the_last_one_counts(
    make_model, adopt, weights, family, changes
):
    hub = Hub()
    model = make_model(family, seed=0, **changes)
    policies = [make_model(family, seed=seed, **changes) for seed in (1, 2, 3)]
    intake = quantise(model, weights, adopt=adopt)
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    writer = WeightWriter(FlatLayout.of(dict(policies[0].named_parameters())), hub)
    reader = WeightReader(hub, "generator", adopt=adopt)
    reader.attach(intake.tensors)
    for version, policy in enumerate(policies):
        writer.publish(version, dict(policy.named_parameters()))
        assert reader.wait(version, timeout_s=5) == version
        intake.adopted()
        fresh = copy.deepcopy(policy)
        quantise(fresh, weights)
        assert torch.equal(logits(model), logits(fresh))
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    if adopt == "view":
        narrow = {f"{path}.weight" for path in narrow_layers(model)} | set(narrow_layers(model))
        staged = {name: tensor for name, tensor in intake.tensors.items() if name in narrow}
        reader.close()
        assert all(tensor.untyped_storage().nbytes() == 4 for tensor in staged.values())
    intake.adopted()
    assert torch.equal(logits(model), logits(fresh))
    writer.close()


@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_versions_from_the_trainer_are_cast_and_the_last_one_counts(make_model, adopt):
    hub = Hub()
    model = make_model("qwen2", seed=0, tie_word_embeddings=True)
    policies = [make_model("qwen2", seed=seed, tie_word_embeddings=True) for seed in (1, 2, 3)]
    expected = []
    for policy in policies:
        narrow = copy.deepcopy(policy)
        for weight in narrow.parameters():
            weight.data = weight.data.bfloat16()
        expected.append(logits(narrow))
    intake = cast(model, torch.bfloat16, adopt=adopt)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    writer = WeightWriter(FlatLayout.of(dict(policies[0].named_parameters())), hub)
    reader = WeightReader(hub, "generator", adopt=adopt)
    reader.attach(intake.tensors)
    for version, policy in enumerate(policies):
        writer.publish(version, dict(policy.named_parameters()))
        assert reader.wait(version, timeout_s=5) == version
        intake.adopted()
        assert torch.equal(logits(model), expected[version])
    reader.close()
    if adopt == "view":
        assert all(tensor.untyped_storage().nbytes() == 4 for tensor in intake.tensors.values())
    intake.adopted()
    assert torch.equal(logits(model), expected[-1])
    writer.close()


NARROW = {"int8": "int8", "int8_dynamic": "int8", "fp8": "fp8"}


@pytest.mark.parametrize("adopt", ["view", "copy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("mixtral", {})],
)
def test_versions_that_the_trainer_quantised_give_the_same_bits(
    make_model, adopt, dtype, weights, family, changes
):
    hub = Hub()
    model = make_model(family, seed=0, **changes).to(dtype)
    policies = [make_model(family, seed=seed, **changes) for seed in (1, 2, 3)]
    intake = quantise(model, weights, adopt=adopt, arrives_quantised=True)
    encoding = Encoding(
        dtype=str(dtype).removeprefix("torch."),
        quantized=NARROW[weights],
        names=linear_weights(policies[0]),
    )
    tensors = dict(policies[0].named_parameters())
    encoder = Encoder(encoding, layout_of(tensors, [0]), 0, tensors)
    writer = WeightWriter(encoder.layout.flat(0), hub)
    reader = WeightReader(hub, "generator", adopt=adopt)
    reader.attach(intake.tensors)
    for version, policy in enumerate(policies):
        writer.publish(version, encoder.encode(dict(policy.named_parameters())))
        assert reader.wait(version, timeout_s=5) == version
        intake.adopted()
        fresh = copy.deepcopy(policy).to(dtype)
        quantise(fresh, weights)
        assert torch.equal(logits(model), logits(fresh))
    reader.close()
    writer.close()
    assert torch.equal(logits(model), logits(fresh))


def test_a_version_that_arrives_narrow_is_adopted_by_turning_pointers(make_model):
    hub = Hub()
    model, policy = make_model(), make_model(seed=1)
    intake = quantise(model, "int8", arrives_quantised=True)
    encoding = Encoding(quantized="int8", names=linear_weights(policy))
    tensors = dict(policy.named_parameters())
    encoder = Encoder(encoding, layout_of(tensors, [0]), 0, tensors)
    writer, reader = WeightWriter(encoder.layout.flat(0), hub), WeightReader(hub, "generator")
    reader.attach(intake.tensors)
    writer.publish(0, encoder.encode(dict(policy.named_parameters())))
    reader.wait(0, timeout_s=5)
    (segment,) = hub.segments.values()
    low, high = segment.buffer.data_ptr(), segment.buffer.data_ptr() + segment.buffer.numel()
    layers = narrow_layers(model).values()
    assert all(
        low <= part.data_ptr() < high for layer in layers for part in (layer.weight, layer.scale)
    )
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("gemma2", {}), ("mixtral", {})],
)
def test_the_narrow_tensors_are_told_by_a_models_config_alone(
    make_model, family, changes, tmp_path
):
    model = make_model(family, **changes)
    model.config.save_pretrained(tmp_path)
    names = quantized_names(Model(str(tmp_path)))
    assert names == linear_weights(model)
    quantise(model, "int8")
    assert len(names) == len(narrow_layers(model))


def test_greedy_decoding_with_quantised_weights_is_that_of_the_dequantised_ones(make_model):
    model = make_model()
    narrow = copy.deepcopy(model)
    quantise(narrow, "int8")
    knobs = {
        "do_sample": False,
        "max_new_tokens": 20,
        "attention_mask": torch.ones(1, 5, dtype=torch.int64),
    }
    found, expected = (
        m.generate(IDS[:1, :5], **knobs) for m in (narrow, stands_for(model, narrow))
    )
    assert torch.equal(found, expected)


def decoded(model, *, steps=12, kernel=None, token_bytes=0):
    """What an engine draws for two prompts: (tokens, logprobs, start) of each rollout, by
    ticket.
    """
    engine = Engine(
        model,
        slots=6,
        context_tokens=64,
        sampling=Sampling(temperature=0.8),
        end_tokens=[],
        kernel=kernel,
        token_bytes=token_bytes,
        cache_bytes=1 << 20,
    )
    starts = [
        PromptStart(prompt=IDS[0, :9].numpy(), limit=9 + steps, tickets=[0, 1, 2], seeds=[5, 6, 7]),
        PromptStart(prompt=IDS[1, :4].numpy(), limit=4 + steps, tickets=[3, 4], seeds=[8, 9]),
    ]
    rows = {}
    for _ in range(steps):
        for row in engine.step(starts):
            rows[row.ticket] = (row.tokens.ids, row.tokens.logprobs, row.start)
        starts = []
    assert set(rows) == set(range(5))
    return rows


def forward_logprobs(tokens, model):
    """Of every token under one forward pass, 0 for the first: float32 [length]."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    full = torch.log_softmax(logits(model, ids[None])[0].float() / 0.8, -1)
    return np.concatenate([[0.0], full[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


def worst_logprob(rows, model):
    """Largest difference of recorded log-probabilities from a full forward pass, in nats."""
    return max(
        np.abs(forward_logprobs(tokens, model) - found)[start:].max()
        for tokens, found, start in rows.values()
    )


@pytest.mark.parametrize("quantised_first", [True, False])
@pytest.mark.parametrize("weights", FORMATS)
def test_recorded_logprobs_are_those_of_the_quantised_policy(make_model, weights, quantised_first):
    model = make_model()
    oracle = copy.deepcopy(model)
    if quantised_first:
        quantise(model, weights)
    proof = adapt(model, "tiny")
    if not quantised_first:
        quantise(model, weights)
    plain, rounding = (stands_for(oracle, model, rounds=rounds) for rounds in (False, True))
    with unrounded(model):
        rows = decoded(model, kernel=proof.kernel, token_bytes=proof.token_bytes)
    assert worst_logprob(rows, plain) < 1e-5
    rows = decoded(model, kernel=proof.kernel, token_bytes=proof.token_bytes)
    passed = {
        ticket: (tokens, forward_logprobs(tokens, plain), start)
        for ticket, (tokens, _, start) in rows.items()
    }
    assert worst_logprob(rows, rounding) <= WHOLE_STEPS * worst_logprob(passed, rounding) + 1e-5


@pytest.mark.parametrize("weights", FORMATS)
def test_a_wrong_cache_is_refused_whatever_the_layers_do_with_their_inputs(
    make_model, weights, monkeypatch
):
    model = make_model()
    quantise(model, weights)
    decode = attention.decode

    def forgetful(query, key, value, keys, values, layout, *given):
        keys[layout.table[:, 0].long(), :, 5] = 0
        return decode(query, key, value, keys, values, layout, *given)

    monkeypatch.setattr(attention, "decode", forgetful)
    with pytest.raises(ModelError, match="its logits differ"):
        adapt(model, "tiny")
    assert all(layer.rounds == layer.form.inputs for layer in narrow_layers(model).values())


@pytest.mark.parametrize("weights", FORMATS)
def test_a_wrong_kernel_is_left_out_whatever_the_layers_do_with_their_inputs(
    make_model, weights, monkeypatch
):
    def narrow(query, key, value, keys, values, layout, scale, window, softcap):
        return attention.decode(query, key, value, keys, values, layout, scale, 20, softcap)

    def of_two_pages(query, key, value, keys, values, layout, scale, window, softcap):
        attended = attention.decode(query, key, value, keys, values, layout, scale, window, softcap)
        return attended * (layout.positions < 2 * PAGE)[:, None, None]

    for kernel, kept in (
        (attention.decode, attention.decode),
        (narrow, None),
        (of_two_pages, None),
    ):
        model = make_model()
        quantise(model, weights)
        monkeypatch.setattr(
            "operators.engine.build.native_kernel", lambda model, found=kernel: found
        )
        assert adapt(model, "tiny").kernel is kept


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("weights", ["model", *FORMATS])
def test_a_bfloat16_engine_is_as_close_to_a_forward_pass_as_that_is_to_float32(
    make_model, family, weights
):
    model = make_model(family).to(torch.bfloat16)
    oracle = copy.deepcopy(model)
    proof = adapt(model, "tiny")
    if weights != "model":
        quantise(model, weights)
        quantise(oracle, weights)
    rows = decoded(model, steps=40, kernel=proof.kernel, token_bytes=proof.token_bytes)
    exact = copy.deepcopy(oracle).float()
    passed = {
        ticket: (tokens, forward_logprobs(tokens, oracle), start)
        for ticket, (tokens, _, start) in rows.items()
    }
    assert worst_logprob(rows, oracle) <= 2 * worst_logprob(passed, exact)
    drawn = np.concatenate([logprobs[start:] for _, logprobs, start in rows.values()])
    assert np.mean(drawn == torch.from_numpy(drawn).bfloat16().float().numpy()) < 0.1


def test_fp8_is_refused_where_the_gpu_cannot_and_rehearsed_on_the_cpu():
    gpu = torch.device("cuda:0")
    assert fault("fp8", device=torch.device("cpu"), dtype=torch.float32, capability=None) is None
    assert fault("fp8", device=gpu, dtype=torch.bfloat16, capability=(9, 0)) is None
    assert "8.0" in fault("fp8", device=gpu, dtype=torch.bfloat16, capability=(8, 0))
    assert "float32" in fault("fp8", device=gpu, dtype=torch.float32, capability=(9, 0))
    assert fault("int8", device=gpu, dtype=torch.float32, capability=(7, 0)) is None


def test_what_cannot_be_quantised_says_so_and_leaves_the_model_alone(make_model):
    model = make_model()
    before = logits(model)
    with pytest.raises(ModelError, match="not known"):
        quantise(model, "int4")
    assert torch.equal(logits(model), before)
    quantise(model, "int8")
    with pytest.raises(ModelError, match="nothing to quantise"):
        quantise(model, "int8")
