"""The batches of the trainer bench: groups of rollouts as Arrow rows, and the same as padded
tensors.

tail   completions of a log-normal distribution whose 99th percentile is 10 times its median of 48
       tokens.
even   completions of 128 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from bench.generator.cases import EVEN_TOKENS, GROUP_SIZE, PAD, SIZES, tail_lengths
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, AnyArray, schema

CASES = ("tail", "even")
PROMPT_TOKENS = (100, 200)
"""Shortest and longest prompt of a group."""
COLUMNS = {**PROMPT_COLUMNS, **ROLLOUT_COLUMNS, "advantage": pa.float64()}


@dataclass(frozen=True)
class Rollouts:
    """What one optimiser step trains, in groups of GROUP_SIZE that share a prompt."""

    prompts: list[AnyArray]
    """Tokens of each rollout's prompt."""
    completions: list[AnyArray]
    """Tokens of each rollout's completion."""
    logprobs: list[AnyArray]
    """The generator's, of each completion token."""
    advantage: AnyArray
    """One number per rollout, none of them 0."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return sum(map(len, self.completions))


def make_rollouts(case: str, groups: int, size: str, seed: int = 0) -> Rollouts:
    """The batch of a case; no advantage is 0, so that no system may leave a rollout out."""
    draw = np.random.default_rng(seed)
    count, vocabulary = groups * GROUP_SIZE, SIZES[size].vocabulary
    lengths = [EVEN_TOKENS] * count if case == "even" else tail_lengths(count, count, seed)
    prompts = [
        draw.integers(PAD + 1, vocabulary, draw.integers(*PROMPT_TOKENS, endpoint=True))
        for _ in range(groups)
    ]
    completions = [draw.integers(PAD + 1, vocabulary, length) for length in lengths]
    likely = -np.log(vocabulary)
    return Rollouts(
        prompts=[prompts[index // GROUP_SIZE] for index in range(count)],
        completions=completions,
        logprobs=[likely + 0.1 * draw.standard_normal(length) for length in lengths],
        advantage=np.where(np.arange(count) % 2, 1.0, -1.0) * (0.5 + draw.random(count)),
    )


def as_groups(rollouts: Rollouts) -> list[pa.RecordBatch]:
    """The rows that a trainer gets: one Arrow batch per group."""
    rows = []
    for index, (prompt, completion, logprobs) in enumerate(
        zip(rollouts.prompts, rollouts.completions, rollouts.logprobs, strict=True)
    ):
        before, after = len(prompt), len(completion)
        rows.append(
            {
                "group_id": index // GROUP_SIZE,
                "prompt_id": str(index // GROUP_SIZE),
                "prompt": "",
                "group_size": GROUP_SIZE,
                "min_version": 0,
                "round_size": 0,
                "rollout_id": index,
                "position": index % GROUP_SIZE,
                "completion": "",
                "tokens": [*prompt.tolist(), *completion.tolist()],
                "mask": [False] * before + [True] * after,
                "logprobs": [0.0] * before + logprobs.tolist(),
                "versions": [-1] * before + [0] * after,
                "finish_reason": "stop",
                "error": None,
                "advantage": rollouts.advantage[index],
            }
        )
    return [
        pa.RecordBatch.from_pylist(rows[first : first + GROUP_SIZE], schema=schema(COLUMNS))
        for first in range(0, len(rows), GROUP_SIZE)
    ]


@dataclass(frozen=True)
class Padded:
    """Rows of equal width [B, P or C]; masks are 1 where there is a token."""

    prompt_ids: Tensor
    """Padded at the left."""
    prompt_mask: Tensor
    completion_ids: Tensor
    """Padded at the right."""
    completion_mask: Tensor
    logprobs: Tensor
    advantage: Tensor
    """[B]."""


def as_padded(rollouts: Rollouts) -> Padded:
    """What a loop over tensors trains: prompts padded at the left, completions at the right."""
    count = len(rollouts.prompts)
    widest, longest = max(map(len, rollouts.prompts)), max(map(len, rollouts.completions))
    prompts, completions = np.full((count, widest), PAD), np.full((count, longest), PAD)
    logprobs = np.zeros((count, longest), np.float32)
    for index, (prompt, completion) in enumerate(
        zip(rollouts.prompts, rollouts.completions, strict=True)
    ):
        prompts[index, widest - len(prompt) :] = prompt
        completions[index, : len(completion)] = completion
        logprobs[index, : len(completion)] = rollouts.logprobs[index]
    return Padded(
        prompt_ids=torch.from_numpy(prompts),
        prompt_mask=torch.from_numpy(prompts != PAD).long(),
        completion_ids=torch.from_numpy(completions),
        completion_mask=torch.from_numpy(completions != PAD).long(),
        logprobs=torch.from_numpy(logprobs),
        advantage=torch.from_numpy(rollouts.advantage).float(),
    )
