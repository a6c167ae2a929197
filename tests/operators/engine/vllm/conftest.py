"""Engines on a scripted process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from operators.engine.interface import PromptStart
from operators.engine.sampler import Sampling
from operators.engine.vllm.engine import VllmEngine

SCRIPTED = Path(__file__).with_name("scripted.py")


@pytest.fixture
def scripted(folder: Path) -> Iterator[Callable[..., VllmEngine]]:
    """Makes engines on `scripted.py`; its rules are `rules`."""
    made: list[VllmEngine] = []

    def make(rules: dict[str, Any] | None = None, **knobs: Any) -> VllmEngine:
        given = {
            "slots": 8,
            "context_tokens": 64,
            "sampling": Sampling(),
            "end_tokens": [],
            "deadline_s": 60.0,
            **knobs,
        }
        environment = {**os.environ, "RULES": json.dumps(rules or {})}
        made.append(
            VllmEngine(
                folder, python=sys.executable, server=SCRIPTED, environment=environment, **given
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def start() -> Callable[..., PromptStart]:
    """A prompt [7, 8, 9] whose rollouts draw `most` tokens; a rollout's seed is the first token it
    draws.
    """

    def make(seeds: list[int], most: int = 5, first: int = 0, **more: Any) -> PromptStart:
        prompt = more.pop("prompt", np.array([7, 8, 9]))
        tickets = range(first, first + len(seeds))
        return PromptStart(
            prompt=prompt, limit=len(prompt) + most, tickets=tickets, seeds=seeds, **more
        )

    return make
