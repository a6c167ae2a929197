"""A KV-cache that nobody sizes takes what is left of its device beside all else that must fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataflow.planning.memory_need import FILLED
from operators.engine.budget import Budget, EnginePasses, default_budget, measured
from operators.engine.pages import PAGE
from operators.engine.sampler import Sampling
from operators.models.folders import ModelError

GB = 10**9
PREFILL = 4096
"""Tokens that one pass computes at most."""
H100 = int(79.2 * 2**30)
PASS, STEP = 3 * GB, GB // 2
"""What the fake device says of a prefill and a decode step, beside pages."""


class FakeMemory:
    """A device of which so much is taken; passes are made, and take what is said."""

    def __init__(self, whole: int, taken: int, *peaks: int) -> None:
        self.whole, self.taken, self.peaks = whole, taken, list(peaks)

    def free(self) -> tuple[int, int]:
        return self.whole - self.taken, self.whole

    def peak(self, work: Callable[[], object]) -> int:
        work()
        return self.peaks.pop(0)


def passes(
    calls: list[int], *, token_bytes: int, context: int = 8192, **knobs: Any
) -> EnginePasses:
    def forward(tokens: torch.Tensor, at: torch.Tensor, kept: Any, layout: Any) -> torch.Tensor:
        calls.append(len(tokens))
        return torch.zeros(len(kept) if isinstance(kept, torch.Tensor) else len(tokens), 2)

    return EnginePasses(
        forward=forward,
        draw=lambda logits: None,
        kernel=None,
        device=torch.device("cpu"),
        slots=256,
        context_tokens=context,
        new_tokens=PREFILL,
        token_bytes=token_bytes,
        **{"captured": 512, **knobs},
    )


def of_model(weights: int, *, token_bytes: int, arriving: int | None = None) -> Budget:
    """A generator's in bfloat16 on an H100, as a version of the same size arrives."""
    engine = passes([], token_bytes=token_bytes)
    memory = FakeMemory(H100, weights, PASS + engine.prefill_bytes, STEP)
    return measured(engine, memory, arriving=weights if arriving is None else arriving)


@pytest.mark.parametrize("billions", [5.2, 7.6, 14.8])
def test_weights_a_version_that_arrives_passes_graphs_and_cache_fit_together(
    billions: float,
) -> None:
    """Keys and values of 7B: 28 layers, 4 heads of 128, in bfloat16."""
    weights = int(2 * billions * GB)
    budget = of_model(weights, token_bytes=2 * 28 * 4 * 128 * 2)
    taken = 2 * weights + PASS + STEP + budget.cache
    assert FILLED * H100 - 2 <= taken <= FILLED * H100
    assert budget.cache > 5 * GB


def test_where_two_versions_do_not_fit_the_refusal_has_the_parts_and_says_what_to_do() -> None:
    """A rank of eight of 405B in fp8."""
    with pytest.raises(
        ModelError, match=r"cannot hold one rollout.*arriving version takes 51.*tensor_parallel"
    ):
        of_model(51 * GB, token_bytes=2 * 126 * 128 * 2)
    assert of_model(51 * GB, token_bytes=2 * 126 * 128 * 2, arriving=0).cache > 10 * GB


def test_the_largest_prefill_and_a_step_of_all_slots_are_made_before_the_cache() -> None:
    for context in (64, 4096, 8192):
        calls: list[int] = []
        engine = passes(calls, token_bytes=4, context=context)
        measured(engine, FakeMemory(10 * GB, 0, GB, GB), arriving=0)
        assert calls == [PREFILL, 256 + 512]
    calls = []
    engine = passes(calls, token_bytes=4, captured=0)
    assert measured(engine, FakeMemory(10 * GB, 0, GB), arriving=0).graphs == 0
    assert calls == [PREFILL]


@pytest.mark.parametrize(
    ("context", "prefixes"),
    [
        (1000, [(1000, 0)] * 4 + [(96, 0)]),
        (4096, [(4096, 0)]),
        (8192, [(8192, 256)]),
        (40960, [(40960, 2304)]),
    ],
)
def test_the_largest_pass_is_at_the_end_of_the_longest_prompt(
    context: int, prefixes: list[tuple[int, int]]
) -> None:
    """Its keys and values are gathered from all the pages before it."""
    engine = passes([], token_bytes=4, context=context)
    assert engine.prefixes == prefixes
    assert engine.prefill_bytes == sum(-(-length // PAGE) for length, _ in prefixes) * PAGE * 4


def test_pages_of_the_prefill_are_no_part_of_what_stays_taken() -> None:
    engine = passes([], token_bytes=1000)
    memory = FakeMemory(10 * GB, GB, 8192 * 1000 + 77, 5)
    budget = measured(engine, memory, arriving=GB)
    assert budget == Budget(free=9 * GB, whole=10 * GB, arriving=GB, passes=77, graphs=5)


def test_an_engine_takes_the_pages_that_its_budget_allows(
    shared_model: Any, make_engine: Any
) -> None:
    """The passes are those of its own model."""
    model = shared_model("llama", "engine")
    own = make_engine(model).token_bytes
    rest = 10**6

    def budget(engine: EnginePasses) -> int:
        pages = engine.prefill_bytes
        free = 7 * PAGE * own + rest
        whole = round(free / FILLED)
        memory = FakeMemory(whole, 0, pages + rest)
        return default_budget(engine, memory=memory)

    sampling = Sampling(top_p=0.9, repetition_penalty=1.2)
    assert make_engine(model, sampling=sampling, budget=budget).pages.count == 7
