"""What ranks of an engine tell each other comes through as it was."""

from __future__ import annotations

import dataclasses

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask
from operators.engine.interface import PromptStart
from operators.engine.parallel.lockstep import CODEC, EngineSettings, StartMessage, Step
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.generator import Generator


def through(message):
    return CODEC.decode(CODEC.encode(message))


def test_a_start_and_a_declaration_come_through_as_they_were(tokenizer):
    stop = StopStrings(tokenizer, ("ab", "c"))
    start = PromptStart(
        prompt=np.array([3, 4, 5]),
        limit=9,
        tickets=range(2),
        seeds=[-7, 1 << 62],
        sampling=Sampling(temperature=0.5, top_p=0.9),
        stop=stop,
        partial=[
            None,
            PartialRollout(
                begin=0,
                tokens=RolloutTokens.drawn(
                    [7, 8],
                    [-1.5, -2.5],
                    [3, 4],
                    SamplingMask.of([np.array([7], np.int32), np.array([], np.int32)]),
                ),
            ),
        ],
    )
    step = through(Step(7, (StartMessage.of(start),)))
    assert step.state == 7
    found = step.prompts[0].start(lambda strings: stop if strings == ("ab", "c") else None)
    assert found.prompt.tolist() == [3, 4, 5] and found.prompt.dtype == np.int64
    assert list(found.tickets) == [0, 1] and list(found.seeds) == [-7, 1 << 62]
    assert (found.limit, found.sampling, found.stop) == (9, start.sampling, stop)
    none, partial = found.partial
    assert none is None and partial is not None
    tokens = partial.tokens
    assert (tokens.ids.tolist(), tokens.logprobs.tolist(), tokens.versions.tolist()) == (
        [7, 8],
        [-1.5, -2.5],
        [3, 4],
    )
    assert tokens.mask.all() and [mask.tolist() for mask in tokens.sampling_mask.lists()] == [
        [7],
        [],
    ]
    declaration = Generator(
        Model("somewhere", dtype="bfloat16"), stop=("a", "b"), top_k=3, name="sampler"
    )
    settings = EngineSettings(
        declaration=declaration,
        node="n",
        rank=1,
        size=2,
        device="cpu",
        threads=1,
        folder="f",
        site=None,
        attempt=0,
        quantized="int8",
        limits=Limits(exchange_s=7.0),
        aside="g",
    )
    found = through(settings)
    assert found.limits == settings.limits
    again = found.declaration
    for item in dataclasses.fields(declaration):
        assert getattr(again, item.name) == getattr(declaration, item.name)
