"""How heads are dealt out to ranks, and which models cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from operators.models.folders import ModelError
from operators.models.heads import Heads, heads_of, settle_groups

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 9,
}


def model(kind: str = "Llama", queries: int = 12, keys: int = 4, **rest: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        num_attention_heads=queries, num_key_value_heads=keys, pad_token_id=0, **SIZES, **rest
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("ranks", "copies", "groups", "held"),
    [
        (1, 1, 3, [[0, 1, 2, 3]]),
        (2, 1, 3, [[0, 1], [2, 3]]),
        (4, 1, 3, [[0], [1], [2], [3]]),
        (12, 3, 1, [[rank // 3] for rank in range(12)]),
    ],
)
def test_each_rank_has_the_heads_that_its_queries_attend_to(ranks, copies, groups, held):
    heads = heads_of(model(), ranks, "tiny")
    assert heads == Heads(12, 4, ranks) and (heads.copies, heads.groups) == (copies, groups)
    width = 5
    for rank, mine in enumerate(held):
        first, last = heads.rows(4 * width, rank)
        assert (
            list(range(first // width, last // width)) == mine
            and not first % width
            and not last % width
        )
        queries = range(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        assert sorted({query * 4 // 12 for query in queries}) == mine
        assert [mine[number // groups] for number in range(len(queries))] == [
            query * 4 // 12 for query in queries
        ]


def test_the_attention_of_a_slice_is_told_its_groups():
    found = model(queries=8, keys=2)
    settle_groups(found, heads_of(found, 4, "tiny"))
    assert [layer.self_attn.num_key_value_groups for layer in found.model.layers] == [2]


@pytest.mark.parametrize(
    ("queries", "keys", "ranks"), [(12, 4, 6), (12, 4, 8), (12, 4, 5), (12, 4, 24)]
)
def test_ranks_that_do_not_divide_the_heads_are_refused(queries, keys, ranks):
    said = (
        rf"to {ranks} ranks: it has {queries} attention heads and {keys} key/value heads.*=1 or 2"
        r" or 4 or 12$"
    )
    with pytest.raises(ModelError, match=said):
        heads_of(model(queries=queries, keys=keys), ranks, "tiny")


def test_a_family_without_a_plan_is_refused():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    with pytest.raises(
        ModelError, match=r"no tensor-parallel plan for GPT2LMHeadModel.*tensor_parallel=1"
    ):
        heads_of(transformers.GPT2LMHeadModel(config), 2, "tiny")


def test_a_family_whose_keys_are_no_projection_of_their_own_is_refused_above_their_number():
    found = model("Phi3")
    assert heads_of(found, 4, "tiny").copies == 1
    with pytest.raises(
        ModelError, match=r"4 key/value heads, and no projections k_proj and v_proj.*=4 or less"
    ):
        heads_of(found, 12, "tiny")
