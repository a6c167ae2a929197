"""An engine that gives its memory back in the midst of rollouts draws what it would have drawn."""

import numpy as np
from replaying import drive

from operators.engine.decode import put_aside
from operators.engine.interface import PromptStart
from operators.engine.sampler import Sampling
from operators.models.read_weights import Shelf


def asked():
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 32, random.integers(3, 40)) for _ in range(3)]
    return [
        PromptStart(
            prompt=prompt,
            limit=len(prompt) + 20,
            tickets=range(3 * i, 3 * i + 3),
            seeds=[7 * i + c for c in range(3)],
        )
        for i, prompt in enumerate(prompts)
    ]


def test_rollouts_go_on_after_their_engine_slept_with_the_tokens_they_would_have_drawn(
    make_model, make_engine, tmp_path
):
    knobs = {"sampling": Sampling(temperature=1.2), "end_tokens": []}
    expected = drive(make_engine(make_model("llama"), **knobs), asked())
    engine, shelf, slept = make_engine(make_model("llama"), **knobs), Shelf(tmp_path), []

    def at_step(step):
        if step in (2, 9, 10):
            shelf.park(put_aside(engine))
            weights = sum(weight.untyped_storage().nbytes() for weight in engine.model.parameters())
            slept.append((weights, engine.cache.layers, engine.rows.n))
            shelf.back()
            engine.adopted(engine.version)

    found = drive(engine, asked(), at_step)
    assert slept == [(0, [], 0)] * 3
    assert found.keys() == expected.keys()
    for ticket, row in found.items():
        assert row["tokens"].tolist() == expected[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], expected[ticket]["logprobs"], atol=2e-5)
    shelf.close()
