"""A server's step by data sheets and seven constants."""

from dataclasses import astuple, replace
from itertools import pairwise

import pytest

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import CATALOGUE, device_kind
from dataflow.foresight.counts import counts
from dataflow.foresight.steps import MEASURED, ServerConstants, Serving, WeightFormat, step
from transport.weights.costs.decoder import NAMED, Decoder, Experts

H100, B200 = device_kind("H100"), device_kind("B200")


LLAMA = counts(NAMED["llama-8b"])


MIXED = counts(
    Decoder(
        layers=48,
        width=2048,
        inner=0,
        heads=32,
        kv_heads=4,
        vocabulary=151936,
        head_width=128,
        experts=Experts(number=128, per_token=8, inner=768),
    )
)


ONLY_MEMORY = ServerConstants(
    memory=1, products=0, tiles=0, links=0, hop_s=0, layer_s=0, mixture_s=0
)


def test_a_token_reads_all_weights_once_and_its_cache_and_multiplies_with_each_weight() -> None:
    found = step(LLAMA, WeightFormat(), H100, ranks=1, batch=4, seen=1000)
    # of the embedding, a row
    read = 2 * (LLAMA.parameters - LLAMA.ends) + 4 * 1000 * 2 * LLAMA.cache
    assert found.memory == pytest.approx(read / 3.35e12)
    assert found.products == pytest.approx(4 * 2 * LLAMA.active / 989e12)
    assert (found.tiles, found.links, found.hops, found.layers, found.mixtures) == (0, 0, 0, 32, 0)
    assert found.busy == found.memory + found.products


def test_prompts_that_come_in_add_products_and_bytes_between_ranks_and_read_nothing() -> None:
    without, with_ = (
        step(LLAMA, WeightFormat(), H100, ranks=4, batch=8, seen=500, prompts=p, prompts_seen=p / 2)
        for p in (0, 100)
    )
    forward = 8 * 100 * 2 * (LLAMA.active - LLAMA.ends) + 4 * LLAMA.mixing * 8 * 100 * 50
    assert with_.products - without.products == pytest.approx(forward / 4 / 989e12)
    assert with_.links == pytest.approx(101 * without.links)
    assert (with_.memory, with_.hops, with_.layers) == (
        without.memory,
        without.hops,
        without.layers,
    )


def test_experts_are_read_where_tokens_go_to_them_and_multiplied_in_whole_tiles() -> None:
    one, many = (step(MIXED, WeightFormat(), H100, ranks=1, batch=b, seen=0) for b in (1, 4096))
    assert one.memory == pytest.approx(
        2 * (MIXED.attention + MIXED.ends + MIXED.experts * 8 / 128) / 3.35e12
    )
    assert many.memory == pytest.approx(
        2 * (MIXED.attention + MIXED.ends + MIXED.experts) / 3.35e12
    )
    assert one.tiles == pytest.approx(64 * 2 * MIXED.experts_per_token / 989e12)
    # tiles are full
    assert many.tiles == pytest.approx(4096 * 2 * MIXED.experts_per_token / 989e12)
    narrow = step(MIXED, WeightFormat(experts="fp4"), B200, ranks=1, batch=1, seen=0)
    assert narrow.tiles == pytest.approx(8 * 2 * MIXED.experts_per_token / 9000e12)


def test_four_bits_are_multiplied_as_the_device_can() -> None:
    def products(form: str, kind: str) -> float:
        return (
            step(
                MIXED, WeightFormat(experts=form), device_kind(kind), ranks=1, batch=64, seen=0
            ).tiles
            * 1e12
        )

    assert products("mxfp4", "H100") == products("bfloat16", "H100")
    # A100's instructions
    assert products("int4", "H100") == pytest.approx(2 * products("bfloat16", "H100"))
    assert products("int4", "B200") == pytest.approx(4 * products("bfloat16", "B200"))
    with pytest.raises(GraphError, match="A100 has no matrix products in fp8"):
        step(LLAMA, WeightFormat(dense="fp8"), device_kind("A100"), ranks=1, batch=1, seen=0)


@pytest.mark.parametrize("kind", CATALOGUE)
def test_more_ranks_shorten_what_is_read_and_multiplied_and_lengthen_what_is_exchanged(
    kind: str,
) -> None:
    steps = [
        step(LLAMA, WeightFormat(), device_kind(kind), ranks=n, batch=32, seen=800)
        for n in (1, 2, 4, 8)
    ]
    for few, many in pairwise(steps):
        assert few.memory == pytest.approx(2 * many.memory) and few.products == pytest.approx(
            2 * many.products
        )
        assert few.links < many.links and few.hops < many.hops
    long = [
        step(LLAMA, WeightFormat(), device_kind(kind), ranks=n, batch=32, seen=1e9).memory
        for n in (8, 16)
    ]
    assert long[1] == pytest.approx(long[0], rel=1e-3)  # eight key/value heads: two ranks hold each


def test_a_replica_decodes_as_its_constants_say_and_takes_in_a_prompt_besides() -> None:
    serving = Serving(model=LLAMA, form=WeightFormat(), kind=H100, constants=ONLY_MEMORY)
    assert (
        serving.decode(4, 1000)
        == step(LLAMA, WeightFormat(), H100, ranks=1, batch=4, seen=1000).memory
    )
    assert serving.prompt(500) == pytest.approx(0.0, abs=1e-12)
    twice = replace(ONLY_MEMORY, products=2.0)
    forward = LLAMA.forward(500, 250) - 500 * 2 * LLAMA.ends
    assert replace(serving, constants=twice).prompt(500) == pytest.approx(2 * forward / 989e12)


def test_what_no_server_was_measured_at_is_extrapolated_and_ranks_over_nodes_are_refused() -> None:
    near, far = (
        Serving(model=LLAMA, form=WeightFormat(), kind=device_kind(each))
        for each in ("H100", "H20")
    )
    near.decode(64, 2000)
    near.prompt(1000)
    assert "extrapolated" not in near.source and "extrapolated to H20" in far.source
    near.decode(1000, 2000)
    near.prompt(20000)
    assert near.source.endswith(
        "; extrapolated to 1,000 rollouts at once (measured from 4 to 512), 20,000 tokens of a"
        " prompt (measured from 1 to 8,192)"
    )
    with pytest.raises(
        GraphError, match="16 ranks of tensor parallelism span nodes of 8 H100, but no measured"
    ):
        Serving(model=LLAMA, form=WeightFormat(), kind=H100, ranks=16)


def test_the_constants_that_were_measured_make_a_step_slower_than_data_sheets_do() -> None:
    found = step(LLAMA, WeightFormat(), H100, ranks=2, batch=16, seen=1000)
    assert all(each > 0 for each in astuple(MEASURED))
    assert found.busy < MEASURED.seconds(found) < 4 * found.busy
