"""The three cases of the end-to-end bench: task, policy, reward and sizes, the same for every
system.

even         sorting letters, answers of 3 to 10 letters: generation and training alike are short
             and regular.
tail         the policy itself makes a heavy tail of lengths: its first character decides between a
             short mode and a long one, each with its own rate of stopping. The reward is as good as
             a coin.
slow_scorer  sorting with a scorer that takes 50 ms of wall time per rollout, 32 of them at once at
             most.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.end_to_end.pace import PROMPTS_PER_STEP
from graphs.tasks import sorting
from operators.rewards.match import exact
from operators.warm_start import warm_start

Row = dict[str, str]
Reward = Callable[[str, str], float]
"""(completion, answer) -> reward."""

CASES = ("even", "tail", "slow_scorer")
SYSTEMS = ("plain", "sync", "async", "trl")
ASYNC_STALENESS = 4

SCORER_S = 0.05
"""Wall time of one call of the slow scorer, in seconds."""
SCORER_CALLS = 32
"""Calls of the slow scorer at once, in every system."""

SHORT, LONG = "abcd", "efgh"
"""Letters of the two modes of the tail's policy."""
LONG_SHARE = 0.08
"""Share of the completions in the long mode."""
SHORT_MEDIAN = 30
"""Tokens after which half of the short completions have ended."""
LONG_MEAN = 200
"""Mean tokens of the long completions, if none were cut off."""
TAIL_TOKENS = 448
"""Most tokens of a completion in the tail."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task at one size."""

    name: str
    policy: Path
    """Folder of the policy; `make_policy` puts it there."""
    rows: tuple[Row, ...]
    """Training prompts {"prompt", "answer"}."""
    held_out: tuple[Row, ...] = ()
    """Evaluation prompts; none: accuracy is not asked."""
    reward: Reward
    calls: int = 1
    """Calls of the reward at once."""
    call_s: float = 0.0
    """Wall time that a call takes by sleeping, in seconds."""
    max_tokens: int
    lr: float
    prompts_per_step: int = PROMPTS_PER_STEP
    """Groups of GROUP_SIZE rollouts in a step."""
    dtype: str = "float32"
    """In which our graphs multiply; the other systems do in float32."""
    steps: dict[str, int]
    """Counted steps, by system."""
    warmup: dict[str, int]
    """Steps before the counted ones, by system: for the asynchronous graph enough to fill its
    pipeline."""
    eval_every: int = 0
    """Steps between evaluations; 0: none."""
    level: float | None = None
    """Held-out accuracy whose time is taken."""


def slow_exact(completion: str, answer: str) -> float:
    """Whether the completion is the answer, as a scorer would say that asks somebody else."""
    time.sleep(SCORER_S)
    return exact(completion, answer)


def coin(completion: str, answer: str) -> float:
    """1 for about every second completion, whatever its length."""
    return float(completion[-1:] in "aceg")


def make_case(name: str, policies: Path, *, quick: bool) -> Case:
    """A case by its name; `quick` is for a smoke test: the same path with few steps and short
    tails.
    """
    words = tuple(sorting.rows(20_000, seed=0))
    held_out = tuple(sorting.rows(512, seed=1, held_out=True))
    sort = Case(
        name="even",
        policy=policies / ("bench-sorting-quick" if quick else "bench-sorting"),
        rows=words,
        held_out=held_out[:64] if quick else held_out,
        reward=exact,
        max_tokens=sorting.MAX_TOKENS,
        lr=2e-4,
        steps=_all(3 if quick else 100),
        warmup=_all(1 if quick else 5),
        eval_every=2 if quick else 20,
        level=0.0 if quick else 0.6,
    )
    slow = replace(
        sort,
        name="slow_scorer",
        held_out=(),
        eval_every=0,
        level=None,
        reward=slow_exact,
        calls=SCORER_CALLS,
        call_s=SCORER_S,
        steps=_all(2 if quick else 16),
        warmup=_all(1 if quick else 5),
    )
    tail = Case(
        name="tail",
        policy=policies / ("bench-tail-quick" if quick else "bench-tail"),
        rows=tuple(_tail_prompts(4_000)),
        reward=coin,
        max_tokens=24 if quick else TAIL_TOKENS,
        lr=1e-5,
        steps=_all(1) if quick else {"plain": 2, "trl": 2, "sync": 6, "async": 12},
        warmup=_all(1) if quick else {"plain": 1, "trl": 1, "sync": 1, "async": 6},
    )
    return {"even": sort, "tail": tail, "slow_scorer": slow}[name]


def make_policy(case: Case, *, quick: bool) -> Path:
    """Warm-start the case's policy in its folder, unless it stands there already."""
    if case.name == "tail":
        return warm_start(
            case.policy,
            examples=tail_examples(64 if quick else 6_400),
            alphabet=SHORT + LONG + "=",
            layers=1 if quick else 2,
            width=16 if quick else 64,
            heads=2 if quick else 4,
            steps=2 if quick else 400,
            batch_size=16,
            max_positions=TAIL_TOKENS + 8,
            seed=0,
        )
    return warm_start(
        case.policy,
        examples=((row["prompt"], row["answer"]) for row in case.rows),
        alphabet=sorting.ALPHABET,
        layers=1 if quick else 2,
        width=16 if quick else 128,
        heads=2 if quick else 4,
        steps=2 if quick else 95,
        seed=0,
    )


def tail_examples(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(prompt, completion): after each letter a completion ends with the probability of its
    mode.
    """
    draw = random.Random(f"tail-{seed}")
    going_on = {SHORT: 0.5 ** (1 / SHORT_MEDIAN), LONG: 1 - 1 / LONG_MEAN}
    for row in _tail_prompts(count, seed):
        letters = LONG if draw.random() < LONG_SHARE else SHORT
        length = 1 + int(math.log(1 - draw.random()) / math.log(going_on[letters]))
        yield row["prompt"], "".join(draw.choices(letters, k=min(length, TAIL_TOKENS - 1)))


def _tail_prompts(count: int, seed: int = 0) -> Iterator[Row]:
    draw = random.Random(f"tail-prompts-{seed}")
    for _ in range(count):
        yield {"prompt": "".join(draw.choices(SHORT + LONG, k=3)) + "=", "answer": ""}


def _all(steps: int) -> dict[str, int]:
    return dict.fromkeys(SYSTEMS, steps)
