"""The loop a researcher would write first, in one process: generate, score, one backward."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Reward = Callable[[str, str], float]
"""(completion, answer) -> reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Where the loop stood when it was measured."""

    step: int
    """Number of optimiser steps done."""
    seconds: float
    """Time spent in steps since the start, without the evaluations, in seconds."""
    accuracy: float
    """Mean reward on the held-out prompts, sampled at temperature 1."""
    reward_mean: float
    """Mean reward of the rollouts trained on since the last point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainRun:
    """What one run of the loop showed."""

    rollouts_per_s: float
    """Rollouts generated, scored and trained on per second of stepping."""
    seconds: float
    """Time spent in steps, in seconds."""
    generate_s: float
    """Part of it spent in `model.generate`, in seconds."""
    points: tuple[Point, ...]
    """Before the first step, every `eval_every` steps and after the last; empty without held-out
    rows."""


def load(folder: str | Path) -> tuple[Any, Any]:
    """The policy and its tokenizer, from a Hugging Face folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int, *, greedy: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sample a completion of each prompt at temperature 1.

    Returns tokens [B, T] with left-padded prompts, their attention mask [B, T], which ends with the
    end token of each row, and the number of prompt positions.
    """
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    start = inputs["input_ids"].shape[1]
    tokens_B_T = model.generate(
        **inputs,
        max_new_tokens=max_tokens,
        do_sample=not greedy,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    ended_B_T = (tokens_B_T[:, start:] == tokenizer.eos_token_id).cumsum(1)
    before_end_B_T = ended_B_T - (tokens_B_T[:, start:] == tokenizer.eos_token_id).long() == 0
    return tokens_B_T, torch.cat([inputs["attention_mask"], before_end_B_T.long()], dim=1), start


def accuracy(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, str]],
    reward: Reward,
    max_tokens: int,
    *,
    greedy: bool = False,
    batch_size: int = 256,
) -> float:
    """Mean reward over `rows`, one completion each."""
    total = 0.0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens, _, start = generate(
            model, tokenizer, [row["prompt"] for row in batch], max_tokens, greedy=greedy
        )
        completions = tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
        total += sum(
            reward(text, row["answer"]) for text, row in zip(completions, batch, strict=True)
        )
    return total / len(rows)


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens_B_T: torch.Tensor,
    attention_B_T: torch.Tensor,
    start: int,
    advantage_B: torch.Tensor,
    grad_clip: float,
) -> None:
    """One step of policy gradient: summed over tokens, divided by the number of rollouts."""
    positions_B_T = (attention_B_T.cumsum(1) - 1).clamp(min=0)
    logits_B_T_V = model(
        input_ids=tokens_B_T[:, :-1],
        attention_mask=attention_B_T[:, :-1],
        position_ids=positions_B_T[:, :-1],
        use_cache=False,
        logits_to_keep=tokens_B_T.shape[1] - start,
    ).logits
    new_logprobs_B_T = (
        logits_B_T_V.log_softmax(-1).gather(-1, tokens_B_T[:, start:, None]).squeeze(-1)
    )
    loss = -(advantage_B[:, None] * new_logprobs_B_T * attention_B_T[:, start:]).sum() / len(
        tokens_B_T
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()


def plain_loop(
    policy_folder: str | Path,
    prompts: Iterable[dict[str, str]],
    reward: Reward,
    steps: int,
    *,
    max_tokens: int,
    prompts_per_step: int = 32,
    group_size: int = 8,
    learning_rate: float = 2e-4,
    grad_clip: float = 1.0,
    held_out: Sequence[dict[str, str]] = (),
    eval_every: int = 100,
    seed: int = 0,
    stop_at: float | None = None,
    timeout_s: float = 3600.0,
    say: Callable[[Point], None] = lambda point: None,
) -> PlainRun:
    """Train the policy for a number of steps, one after the other, and measure the pace.

    Args:
        prompts: rows {"prompt", "answer"}, gone over again and again in a seeded order.
        held_out: rows for the accuracy over time; none: it is not measured.
        stop_at: end early once the held-out accuracy has reached this.
        timeout_s: end early after so many seconds of stepping.
        say: called with every measured point.
    """
    torch.manual_seed(seed)
    model, tokenizer = load(policy_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    picks = _forever(list(prompts), seed)
    points: list[Point] = []
    rewards: list[float] = []
    seconds = generate_s = 0.0

    def measure(step: int) -> bool:
        if not held_out:
            return False
        share = accuracy(model, tokenizer, held_out, reward, max_tokens)
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        rewards.clear()
        points.append(Point(step=step, seconds=seconds, accuracy=share, reward_mean=mean))
        say(points[-1])
        return stop_at is not None and share >= stop_at

    step = 0
    measure(0)
    while step < steps and seconds < timeout_s:
        began = time.perf_counter()
        batch = [next(picks) for _ in range(prompts_per_step)]
        rows = [row for row in batch for _ in range(group_size)]
        tokens, attention, start = generate(
            model, tokenizer, [row["prompt"] for row in rows], max_tokens
        )
        generate_s += time.perf_counter() - began
        completions = tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
        scores = [reward(text, row["answer"]) for text, row in zip(completions, rows, strict=True)]
        scores_P_G = torch.tensor(scores).view(prompts_per_step, group_size)
        advantage_B = (scores_P_G - scores_P_G.mean(1, keepdim=True)).flatten()
        update(model, optimizer, tokens, attention, start, advantage_B, grad_clip)
        seconds += time.perf_counter() - began
        rewards += scores
        step += 1
        if (step % eval_every == 0 or step == steps) and measure(step):
            break
    rate = step * prompts_per_step * group_size / seconds if seconds else 0.0
    return PlainRun(
        rollouts_per_s=rate, seconds=seconds, generate_s=generate_s, points=tuple(points)
    )


def _forever(rows: list[dict[str, str]], seed: int) -> Iterator[dict[str, str]]:
    order = random.Random(seed)
    while True:
        order.shuffle(rows)
        yield from rows
