"""Recorded log-probabilities and versions are true per token, in any company and over weight
updates.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from log_distribution import log_distribution
from replaying import drive, replayed
from rigs.examples import examples

from operators.engine.interface import PromptStart
from operators.engine.rows import Rows
from operators.engine.sampler import Sampling


def many(count, seed=0, copies=4):
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt = random.integers(2, 32, random.integers(1, 12))
        tickets = range(i * copies, (i + 1) * copies)
        limit = len(prompt) + int(random.integers(1, 20))
        found.append(
            PromptStart(
                prompt=prompt, limit=limit, tickets=tickets, seeds=[t * 7919 for t in tickets]
            )
        )
    return found


@pytest.fixture
def adapted(make_model, make_engine):
    made = functools.cache(make_model)
    return lambda family="llama", **knobs: make_engine(made(family), **knobs)


ALL = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "mixtral"]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_k=12), Sampling(temperature=1.3, top_p=0.8)],
    ids=str,
)
def test_logprobs_equal_a_full_forward_pass(family, sampling, make_engine, shared_model):
    rows = list(
        drive(make_engine(shared_model(family, "engine"), sampling=sampling), many(12)).values()
    )
    tokens = [torch.tensor(row["tokens"].astype(np.int64)) for row in rows]
    with torch.no_grad():
        whole = shared_model(family, "oracle")(
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        ).logits
    for row, ids, logits in zip(rows, tokens, whole, strict=True):
        start = row["start"]
        expected = log_distribution(logits[start - 1 : len(ids) - 1], sampling).gather(
            1, ids[start:, None]
        )
        np.testing.assert_allclose(row["logprobs"][start:], expected[:, 0], atol=1e-5)
        assert not row["logprobs"][:start].any()
        assert (row["versions"][:start] == -1).all() and (row["versions"][start:] == 0).all()


@pytest.mark.parametrize("family", ALL)
def test_a_rollout_over_two_updates_names_the_weights_of_every_token(family, make_model, adapted):
    engine = adapted(family, slots=12, end_tokens=[])
    versions = {version: make_model(family, seed=version) for version in range(3)}

    def update(step):
        if step in (5, 11):
            engine.model.load_state_dict(versions[engine.version + 1].state_dict())
            engine.adopted(engine.version + 1)

    rows = drive(engine, many(9), update)
    spanning = [row for row in rows.values() if len(set(row["versions"][row["start"] :])) > 1]
    assert len(spanning) >= 5
    for row in rows.values():
        assert (np.diff(row["versions"][row["start"] :]) >= 0).all()
        expected = replayed(versions, row["tokens"], row["versions"], row["start"])
        np.testing.assert_allclose(row["logprobs"][row["start"] :], expected, atol=1e-5)


def test_a_seed_gives_the_same_tokens_in_any_company(adapted):
    alone = {}
    for start in many(8):
        alone |= drive(adapted(slots=4), [start])
    for slots, order in ((64, 1), (7, 1), (12, -1)):
        together = drive(adapted(slots=slots), many(8)[::order])
        assert together.keys() == alone.keys()
        for ticket, row in together.items():
            assert row["tokens"].tolist() == alone[ticket]["tokens"].tolist()
            np.testing.assert_allclose(row["logprobs"], alone[ticket]["logprobs"], atol=1e-5)


def test_seeds_tell_rollouts_of_one_prompt_apart(adapted):
    start = PromptStart(prompt=np.array([5, 6]), limit=12, tickets=range(16), seeds=range(16))
    rows = drive(adapted(end_tokens=[], sampling=Sampling(temperature=4.0)), [start])
    assert len({tuple(row["tokens"].tolist()) for row in rows.values()}) == 16


@examples(25)
@given(
    slots=st.integers(4, 24),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    copies=st.integers(1, 4),
)
def test_no_rollout_is_lost_or_doubled_and_each_has_its_length(slots, lengths, copies, adapted):
    engine = adapted(slots=slots, end_tokens=[])
    work = [
        PromptStart(
            prompt=np.full(1 + i % 5, 3 + i % 7),
            limit=1 + i % 5 + length,
            tickets=range(i * copies, (i + 1) * copies),
            seeds=range(copies),
        )
        for i, length in enumerate(lengths)
    ]
    rows = drive(engine, work)
    assert sorted(rows) == list(range(len(lengths) * copies))
    for ticket, row in rows.items():
        assert len(row["tokens"]) == work[ticket // copies].limit
        assert row["tokens"][: row["start"]].tolist() == work[ticket // copies].prompt.tolist()
    assert engine.live == 0
    assert engine.drawn == sum(lengths) * copies
    assert (
        engine.looked
        == sum((1 + i % 5) * n + n * (n - 1) // 2 for i, n in enumerate(lengths)) * copies
    )


def test_a_freed_slot_is_refilled_at_the_next_step(adapted):
    engine = adapted(slots=2, end_tokens=[])
    work = [
        PromptStart(prompt=np.array([4]), limit=limit, tickets=[i], seeds=[i])
        for i, limit in enumerate((21, 3, 3, 3, 3, 3))
    ]
    drive(engine, work)
    assert engine.steps == 20, (
        "two slots: the long rollout in one, the five short ones one after the other beside it"
    )


def test_broken_weights_end_rows_with_an_error_and_the_engine_goes_on(make_model, adapted):
    engine = adapted(slots=4, end_tokens=[])
    good = {name: value.clone() for name, value in engine.model.state_dict().items()}
    work = [
        PromptStart(prompt=np.array([4, 5]), limit=12, tickets=[i], seeds=[i]) for i in range(8)
    ]

    def spoil(step):
        if step == 3:
            engine.model.lm_head.weight.fill_(float("nan"))
            engine.model.model.layers[0].self_attn.v_proj.weight.fill_(float("inf"))
        if step == 4:
            engine.model.load_state_dict(good)
        engine.adopted(engine.version)

    rows = drive(engine, work, spoil)
    assert [rows[i]["reason"] for i in range(8)] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert [len(rows[i]["tokens"]) for i in range(8)] == [5, 5, 5, 5, 12, 12, 12, 12]
    for i in range(4, 8):
        np.testing.assert_allclose(
            rows[i]["logprobs"][2:],
            replayed({0: make_model()}, rows[i]["tokens"], rows[i]["versions"], 2),
            atol=1e-5,
        )


@pytest.mark.parametrize("recomputes", ["keep", "recompute"])
def test_siblings_that_drew_the_same_are_computed_once_and_none_changes_by_a_bit(
    recomputes, make_engine, make_model, monkeypatch
):
    work = [
        PromptStart(
            prompt=np.arange(3, 3 + n),
            limit=n + 30,
            tickets=range(8 * i, 8 * i + 8),
            seeds=range(100),
        )
        for i, n in enumerate((3, 16, 17))
    ]
    computed = []

    def rows_of_a_run():
        sampling, updates = Sampling(temperature=0.05), []
        engine = make_engine(
            make_model("llama", initializer_range=0.2),
            end_tokens=[],
            sampling=sampling,
            on_update=recomputes,
        )
        if engine.fused is None:
            pytest.skip("only the fused step computes rows by themselves to the bit")
        fused, count = engine.fused, [0]

        class Counting:
            def __getattr__(self, name):
                return getattr(fused, name)

            def __call__(self, tokens, *rest):
                count[0] += len(tokens)
                return fused(tokens, *rest)

        engine.fused = Counting()

        def update(step):
            if step == 9:
                engine.model.load_state_dict(
                    make_model("llama", seed=1, initializer_range=0.2).state_dict()
                )
                engine.adopted(1)
                updates.append(step)

        rows = drive(engine, work, update)
        assert updates
        computed.append(count[0])
        return rows

    together = rows_of_a_run()
    monkeypatch.setattr(Rows, "distinct", lambda rows: None)
    apart = rows_of_a_run()
    assert computed[0] < 0.7 * computed[1]
    assert together.keys() == apart.keys() and len(together) == 24
    assert len({tuple(row["tokens"]) for row in together.values()}) > 6
    for ticket, row in together.items():
        for column in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(row[column], apart[ticket][column])
