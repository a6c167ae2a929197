"""Nearly all steps are replayed, whatever starts in them and however single rows are sampled:
counted, by the engine's own scheduling over a model without layers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from operators.engine.cuda.graphs import Repeats
from operators.engine.decode import Engine
from operators.engine.interface import PromptStart
from operators.engine.sampler import Sampling

SLOTS, STEPS, END, VOCABULARY = 64, 300, 0, 24


class EndsNowAndThen(torch.nn.Module):
    """Every token ends the rollout with the same probability, whatever came before."""

    def __init__(self, mean_tokens):
        super().__init__()
        self.head = torch.nn.Linear(1, VOCABULARY, bias=False)
        self.logits = torch.zeros(VOCABULARY)
        self.logits[END] = math.log((VOCABULARY - 1) / (mean_tokens - 1))

    def get_output_embeddings(self):
        return self.head

    def forward(self, *, input_ids, logits_to_keep, **_):
        kept = input_ids.shape[1] if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return SimpleNamespace(logits=self.logits.expand(1, kept, -1))


def played(mean_tokens, *, group, prompt_tokens, otherwise, captured=True):
    """An engine after so many steps with all slots taken, and in how many all of it was
    replayed."""
    engine = Engine(
        EndsNowAndThen(mean_tokens),
        slots=SLOTS,
        context_tokens=4096,
        sampling=Sampling(),
        end_tokens=[END],
        cache_bytes=1 << 24,
        graphs=Repeats(),
        lag=1,
    )
    if captured:
        engine.capture(lambda: True)
    computed_beside, modular = [], engine._modular
    engine._modular = lambda new, **live: (
        computed_beside.append(engine.steps) or modular(new, **live)
    )
    rng, ticket = np.random.default_rng(0), 0
    while engine.steps < STEPS:
        starts = []
        for _ in range(engine.free // group):
            sampling = Sampling(temperature=0.9) if rng.random() < otherwise else None
            tickets = range(ticket, ticket + group)
            prompt = rng.integers(1, VOCABULARY, prompt_tokens)
            starts.append(
                PromptStart(
                    prompt=prompt, limit=4096, tickets=tickets, seeds=tickets, sampling=sampling
                )
            )
            ticket += group
        engine.step(starts)
    replays = engine.graphed.replays
    assert replays.calls in (STEPS, STEPS - 1), "all steps but the first have live rows"
    return replays.replayed / STEPS, 1 - len(computed_beside) / STEPS


@pytest.mark.parametrize("otherwise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(
    ("mean_tokens", "group", "prompt_tokens"),
    [(250, 8, 200), (60, 8, 200), (60, 1, 40), (25, 1, 60)],
)
def test_at_least_95_of_100_steps_are_replayed(mean_tokens, group, prompt_tokens, otherwise):
    replayed, _ = played(mean_tokens, group=group, prompt_tokens=prompt_tokens, otherwise=otherwise)
    assert replayed >= 0.95


def test_of_agents_short_turns_the_new_tokens_are_replayed_too():
    replayed, wholly = played(25, group=1, prompt_tokens=60, otherwise=0.2)
    assert replayed >= 0.95 and wholly >= 0.95
