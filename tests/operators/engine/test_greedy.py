"""Greedy decoding from slots is what `model.generate` gives, for each family, whatever shares the
slots.
"""

import functools

import numpy as np
import pytest
import torch
from replaying import drive

from operators.engine.interface import STOPPED, TOO_LONG, PromptStart
from operators.engine.sampler import Sampling


def starts(prompts, limits, copies=1):
    return [
        PromptStart(
            prompt=np.array(prompt),
            limit=limit,
            tickets=range(i * copies, (i + 1) * copies),
            seeds=range(copies),
        )
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


PROMPTS = [
    np.random.default_rng(size).integers(2, 32, size) for size in (1, 3, 9, 5, 33, 16, 17, 2, 7)
]


@pytest.fixture(scope="module")
def generated(shared_model):
    """By family: what `generate` gives to each prompt."""

    @functools.cache
    def of(family):
        kept = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
        model = shared_model(family, "oracle")
        return [
            model.generate(torch.tensor(p)[None], **kept)[0, len(p) :].tolist() for p in PROMPTS
        ]

    return of


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "mixtral"]
)
def test_greedy_output_is_that_of_generate(family, generated, shared_model, make_engine):
    engine = make_engine(
        shared_model(family, "engine"), slots=3, sampling=Sampling(temperature=0.0)
    )
    found = drive(engine, starts(PROMPTS, [len(p) + 14 for p in PROMPTS]))
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, generated(family), strict=True)):
        assert found[i]["tokens"].tolist() == prompt.tolist() + tokens
        assert found[i]["reason"] == (STOPPED if tokens[-1] == 1 else TOO_LONG)


def test_the_cache_grows_without_changing_the_output(make_model, make_engine):
    model = make_model()
    prompt = np.arange(2, 12)
    expected = model.generate(
        torch.tensor(prompt)[None], max_new_tokens=90, do_sample=False, eos_token_id=None
    )
    engine = make_engine(
        model, slots=2, context_tokens=128, sampling=Sampling(temperature=0.0), end_tokens=[]
    )
    found = drive(engine, starts([prompt, prompt], [20, 100]))
    assert found[1]["tokens"].tolist() == expected[0].tolist()
    assert found[0]["tokens"].tolist() == expected[0, :20].tolist()


def test_rollouts_of_one_prompt_share_its_prefill(make_model, make_engine):
    model = make_model()
    engine = make_engine(
        model, slots=8, context_tokens=32, sampling=Sampling(temperature=0.0), end_tokens=[]
    )
    fed = []
    forward = engine._forward
    engine._forward = lambda new: (
        fed.append(engine.rows.n + sum(prefix.new for prefix in new)) or forward(new)
    )
    found = drive(engine, starts([np.arange(2, 9)], [12], copies=8))
    assert fed == [7, 8, 8, 8, 8]
    assert len({tuple(row["tokens"].tolist()) for row in found.values()}) == 1
