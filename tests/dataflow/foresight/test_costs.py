"""Costs on paper, against what models and counters say, and against themselves."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from torch.utils.flop_counter import FlopCounterMode

from bench.foresight.published import slowest, stragglers
from dataflow.errors import GraphError
from dataflow.foresight.catalogue import CATALOGUE, device_kind
from dataflow.foresight.command import read_devices
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.generation import GeneratorReplica, generate, sustain
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.rates import ASSUMED, Parts
from dataflow.foresight.training import BACKWARD, Learners
from transport.weights import LayoutMismatch
from transport.weights.costs.decoder import NAMED, Decoder

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}


MIXTURE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "tied": transformers.Qwen3Config(**SHAPE | {"tie_word_embeddings": True, "head_dim": 16}),
    "experts": transformers.Qwen3MoeConfig(**SHAPE, **MIXTURE, num_experts=8, head_dim=8),
    "latent": transformers.DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4},
        **MIXTURE,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
}


def made(name: str, device: str = "meta") -> tuple[torch.nn.Module, Counts]:
    config = CONFIGS[name]
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model, counts(Decoder.from_config(json.loads(config.to_json_string())))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_without_norms_biases_and_routers(name: str) -> None:
    model, found = made(name)
    small = ("norm", "bias", "mlp.gate.")
    assert found.parameters == sum(
        each.numel()
        for path, each in model.named_parameters()
        if not any(part in path for part in small)
    )


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_operations_of_a_forward_pass_are_those_that_torch_counts(name: str, tokens: int) -> None:
    model, found = made(name, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, tokens, dtype=torch.long), use_cache=False)
    # the angles, by a product of their own; once per batch row
    rotary = 2 * tokens * CONFIGS[name].head_dim
    assert counter.get_total_flops() == pytest.approx(
        found.forward(2 * tokens, tokens), abs=2 * rotary
    )


def test_the_names_of_the_paper_are_as_large_as_they_say() -> None:
    sizes = {name: counts(decoder).parameters / 1e9 for name, decoder in NAMED.items()}
    assert sizes == pytest.approx(
        {"llama-8b": 8.03, "llama-70b": 70.6, "llama-405b": 405.9}, rel=0.002
    )


def test_a_mixture_s_tensors_are_refused_and_its_counts_are_not() -> None:
    mixture = Decoder.from_config(json.loads(CONFIGS["experts"].to_json_string()))
    with pytest.raises(LayoutMismatch, match="a mixture of experts"):
        mixture.tensors("bfloat16")
    found = counts(mixture)
    assert found.active < found.touched(4) < found.parameters
    assert found.touched(1) == pytest.approx(found.active) and found.touched(1e4) == pytest.approx(
        found.parameters - found.ends
    )


@pytest.mark.parametrize(
    ("asked", "nearest"), [("H10", "H100"), ("L40", "L40S"), ("mi300", "MI300X"), ("409", "")]
)
def test_a_kind_that_nobody_knows_is_refused_with_those_known_and_the_nearest(
    asked: str, nearest: str
) -> None:
    with pytest.raises(
        GraphError,
        match=f"(did you mean {nearest}. )?those known are A100, A100-40, A10G, B200, .*RTX40",
    ):
        device_kind(asked)


def test_a_kind_is_known_however_its_name_is_written() -> None:
    for kind in CATALOGUE.values():
        dashed = kind.name.replace("RTX", "rtx_")
        for name in (kind.name, kind.name.lower(), dashed, f"NVIDIA {kind.name}"):
            assert device_kind(name) is kind, name
    for name in ("4090", "RTX-4090", "GeForce RTX 4090", "rtx 4090 24GB"):
        assert device_kind(name) is CATALOGUE["RTX4090"], name
    assert (
        device_kind("a100-80gb") is CATALOGUE["A100"]
        and device_kind("A100_40") is CATALOGUE["A100-40"]
    )
    assert [host.name for host in read_devices("1xa100-40+1xrtx_4090").hosts] == [
        "A100-40-0",
        "RTX4090-0",
    ]


def test_what_a_device_cannot_compute_in_is_refused() -> None:
    with pytest.raises(
        GraphError, match="A100 has no matrix products in fp8; found rates for bfloat16"
    ):
        device_kind("A100").rate("fp8")


@given(mean=st.floats(2, 3000), most=st.floats(3100, 30000), sigma=st.floats(0, 1.5))
@examples(30)
def test_lengths_have_the_mean_that_was_asked_for(mean: float, most: float, sigma: float) -> None:
    found = Lengths.drawn(mean, most, sigma)
    assert found.mean == pytest.approx(mean, rel=0.01) and found.most <= most
    assert (
        found.longer_than(np.array([0.0]))[0] == 1 and found.longer_than(np.array([most]))[0] == 0
    )


@pytest.mark.parametrize(("mean", "most"), [(0.5, 10), (10, 10), (20, 10)])
def test_a_mean_that_cannot_be_had_is_refused(mean: float, most: float) -> None:
    with pytest.raises(GraphError, match="cannot be had"):
        Lengths.drawn(mean, most)


EIGHT = counts(NAMED["llama-8b"])


ON_H100 = GeneratorReplica(model=EIGHT, kind=CATALOGUE["H100"])


LENGTHS = Lengths.drawn(500, 2000)


def test_a_model_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    large = GeneratorReplica(
        model=counts(NAMED["llama-405b"]), kind=CATALOGUE["H100"], tensor_parallel=8
    )
    with pytest.raises(
        GraphError, match=r"a model of 812 GB leaves no room .* on 8 x H100 of 80 GB; give it more"
    ):
        large.at_once(1000, ASSUMED)


def test_a_step_of_one_rollout_takes_as_long_as_its_weights_are_read() -> None:
    step = ON_H100.step(1, 0, ASSUMED)
    assert step.memory == pytest.approx(EIGHT.active * 2 / 3.35e12, rel=1e-3)
    assert step.compute < 0.01 * step.memory


@given(rollouts=st.floats(1, 900), more=st.floats(1, 2), tensor=st.sampled_from([1, 2, 4, 8]))
@examples(40)
def test_more_rollouts_never_take_less_time_and_never_more_each(
    rollouts: float, more: float, tensor: int
) -> None:
    replica = replace(ON_H100, tensor_parallel=tensor)
    less, most = (
        generate(replica, LENGTHS, 100, n, ASSUMED).seconds(ASSUMED)
        for n in (rollouts, rollouts * more)
    )
    assert less <= most * (1 + 1e-9) and most / (rollouts * more) <= less / rollouts * 1.02


@given(rollouts=st.floats(64, 900))
@examples(20)
def test_a_batch_whose_places_are_taken_again_is_faster_than_one_that_empties(
    rollouts: float,
) -> None:
    emptied = generate(ON_H100, LENGTHS, 100, rollouts, ASSUMED).seconds(ASSUMED)
    assert (
        sustain(ON_H100, LENGTHS, 100, rollouts, ASSUMED, at_once=rollouts).seconds(ASSUMED)
        < emptied
    )


def test_replicas_that_wait_for_each_other_wait_for_the_longest_rollout_of_all() -> None:
    alone, among = (
        generate(ON_H100, LENGTHS, 100, 16, ASSUMED, of=of).seconds(ASSUMED) for of in (16, 2048)
    )
    assert generate(ON_H100, LENGTHS, 100, 16, ASSUMED).seconds(ASSUMED) == alone < among
    most = LENGTHS.most * (ON_H100.step(16, 100 + LENGTHS.most, ASSUMED).seconds(ASSUMED))
    assert LENGTHS.most * ON_H100.step(1, 100, ASSUMED).seconds(ASSUMED) < among < most * 1.05


def test_the_longest_of_many_more_is_longer() -> None:
    few, many = (Lengths.drawn(500, 100_000, samples=samples) for samples in (2048, 16384))
    assert few.most < many.most and few.mean == pytest.approx(many.mean, rel=1e-3)
    assert Lengths.of([5, 5]).spread == 0 and Lengths.of([1, 3]).spread == 0.5


@given(rollouts=st.floats(0.5, 4000), stages=st.sampled_from([1, 2, 4, 16]))
@examples(30)
def test_a_pipeline_decodes_parts_of_a_batch_at_once_or_the_whole_batch_in_each_stage(
    rollouts: float, stages: int
) -> None:
    parts, whole = (
        replace(ON_H100, pipeline_parallel=stages, interleaves=each).step(rollouts, 1000, ASSUMED)
        for each in (True, False)
    )
    # stages one after the other: no faster than one device
    assert whole == ON_H100.step(rollouts, 1000, ASSUMED)
    assert parts == replace(ON_H100).step(rollouts / max(1, min(stages, rollouts)), 1000, ASSUMED)


def test_a_trainer_s_state_leaves_less_room_and_is_named_where_it_leaves_none() -> None:
    beside = replace(ON_H100, reserved_bytes=12e9)
    lost = ON_H100.at_once(4000, ASSUMED) - beside.at_once(4000, ASSUMED)
    assert lost == pytest.approx(12e9 / (4000 * ON_H100.cache_bytes))
    with pytest.raises(GraphError, match=r"of 16 GB and 70 GB of a trainer leaves no room"):
        replace(ON_H100, reserved_bytes=70e9).at_once(1000, ASSUMED)


def test_an_all_reduce_of_few_bytes_takes_longer_with_each_doubling_of_nodes_at_any_rates() -> None:
    fixed = [
        replace(ON_H100, tensor_parallel=ranks).step(1, 0, ASSUMED).fixed
        for ranks in (1, 8, 16, 32)
    ]
    each = 2 * EIGHT.layers
    assert np.diff(fixed) == pytest.approx([each * 12e-6, each * 40e-6, each * 40e-6])


def test_gradients_are_sent_twice_by_every_rank_that_has_others_beside_it() -> None:
    ranks = Learners(model=EIGHT, kind=CATALOGUE["H100"], ranks=16)
    assert replace(ranks, tensor_parallel=8, pipeline_parallel=2).sums().links == 0
    assert ranks.sums().links == pytest.approx(2 * 15 / 16 * 4 * EIGHT.parameters / 400e9)
    cut = replace(ranks, ranks=64, tensor_parallel=8).sums()
    assert cut.links == pytest.approx(2 * 7 / 8 * 4 * EIGHT.parameters / 8 / 50e9)
    within = replace(ranks, ranks=8).sums()
    assert within.links == pytest.approx(2 * 7 / 8 * 4 * EIGHT.parameters / 450e9)


@pytest.mark.parametrize(("replicas", "each"), [(4, 128), (8, 64), (16, 32)])
def test_the_replica_with_most_tokens_has_as_many_more_as_lengths_that_are_drawn_say(
    replicas: int, each: int
) -> None:
    lengths = Lengths.drawn(800, 28000, 1.0)
    sums = np.random.default_rng(0).choice(lengths.tokens, (400, replicas, each)).sum(2)
    learners = Learners(model=EIGHT, kind=CATALOGUE["H100"], ranks=replicas)
    found = slowest(learners, lengths, replicas * each)
    assert found == pytest.approx((sums.max(1) / sums.mean(1)).mean(), rel=0.06)
    assert (
        slowest(replace(learners, ranks=1), lengths, 10)
        == 1
        == slowest(learners, Lengths.of([7, 7]), 64)
    )


def test_a_step_waits_for_all_groups_that_begin_with_it_or_for_fewer_the_more_may_begin_early() -> (
    None
):
    def waits(ahead: float) -> float:
        return stragglers(ON_H100, LENGTHS, 100, 64, ASSUMED, group=16, ahead=ahead).seconds(
            ASSUMED
        )

    alone = ON_H100.step(64 * LENGTHS.mean / LENGTHS.most, 100 + LENGTHS.most / 2, ASSUMED).seconds(
        ASSUMED
    )
    assert waits(0) == pytest.approx(LENGTHS.most * alone)
    heavy = Lengths.of([10] * 999 + [1000])
    assert heavy.longest_of(1, 0.99) == 10 and heavy.longest_of(
        16, 0.99
    ) == 1000 == heavy.longest_of(16, 1)
    found = [waits(ahead) for ahead in (0, 0.1, 0.5, 0.9, 1, 4)]
    assert found == sorted(found, reverse=True) and found[3] > found[4] == found[5] == 0


def test_key_value_heads_that_are_fewer_than_ranks_are_held_several_times() -> None:
    at = {ranks: replace(ON_H100, tensor_parallel=ranks).cache_bytes for ranks in (1, 8, 16)}
    assert at[1] == at[8] == at[16] / 2 == 2 * 32 * 2 * 8 * 128


def test_a_pipeline_is_idle_as_long_as_it_fills_and_empties() -> None:
    one = Learners(model=EIGHT, kind=CATALOGUE["H100"], ranks=16)
    cut = replace(one, pipeline_parallel=4)
    forward = 2 + BACKWARD
    alone, piped = (each.passes(64, 1000, forward=forward, sequences=64) for each in (one, cut))
    assert piped.compute / alone.compute == pytest.approx((16 + 3) / 16)
    assert alone.compute == pytest.approx(forward * EIGHT.forward(64000, 500) / (16 * 989e12))


def test_parts_add_up_and_are_scaled_by_their_own_rates() -> None:
    parts = Parts(memory=1, compute=2, links=3, fixed=4) + Parts(memory=1) * 2
    rates = replace(ASSUMED, memory=0.5, compute=0.25)
    assert parts.seconds(rates) == (3 + 3) / 0.5 + 2 / 0.25 + 4
