"""What rank 0 says to the other ranks as plain values: prompts that start, and a declaration to build from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.model import Model
from dataflow.rollout_tokens import RolloutTokens
from operators.engine.knobs import GeneratorKnobs
from operators.engine.results import Start
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings


def plain_start(start: Start) -> dict[str, Any]:
    """A prompt that starts, for msgpack."""
    return {
        "prompt": np.ascontiguousarray(start.prompt, np.int64).tobytes(),
        "limit": int(start.limit),
        "tickets": [int(ticket) for ticket in start.tickets],
        "seeds": [int(seed) for seed in start.seeds],
        "sampling": None if start.sampling is None else dataclasses.asdict(start.sampling),
        "stop": None if start.stop is None else list(start.stop.strings),
        "partial": [None if rollout is None else rollout.tokens.plain() for rollout in start.partial],
    }


def start_of(plain: Mapping[str, Any], stops: Callable[[Sequence[str]], StopStrings]) -> Start:
    """The prompt again; `stops` gives the same object for the same strings."""
    return Start(
        prompt=np.frombuffer(plain["prompt"], np.int64),
        limit=plain["limit"],
        tickets=plain["tickets"],
        seeds=plain["seeds"],
        sampling=None if plain["sampling"] is None else Sampling(**plain["sampling"]),
        stop=None if plain["stop"] is None else stops(plain["stop"]),
        partial=[
            None if tokens is None else PartialRollout(begin=0, tokens=RolloutTokens.of_plain(tokens))
            for tokens in plain["partial"]
        ],
    )


def plain_declaration(declaration: GeneratorKnobs) -> dict[str, Any]:
    """A generator's knobs, for msgpack."""
    return dataclasses.asdict(declaration)


def declaration_of(plain: Mapping[str, Any]) -> GeneratorKnobs:
    """The generator again."""
    knobs: dict[str, Any] = {
        knob: tuple(value) if isinstance(value, list) else value for knob, value in plain.items() if knob != "model"
    }
    return GeneratorKnobs(Model(**plain["model"]), **knobs)
