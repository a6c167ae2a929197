"""What rank 0 says to the other ranks as plain values: prompts that start, and a declaration to build from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.folder.partial_rollouts import Stretch
from dataflow.model import Model
from operators.engine.knobs import GeneratorKnobs
from operators.engine.results import Start
from operators.engine.sampler import Sampling
from operators.engine.stops import StopStrings


def plain_start(start: Start) -> dict[str, Any]:
    """A prompt that starts, for msgpack."""
    return {
        "prompt": np.ascontiguousarray(start.prompt, np.int64).tobytes(),
        "limit": int(start.limit),
        "tickets": [int(ticket) for ticket in start.tickets],
        "seeds": [int(seed) for seed in start.seeds],
        "sampling": None if start.sampling is None else dataclasses.asdict(start.sampling),
        "stop": None if start.stop is None else list(start.stop.strings),
        "parts": [None if part is None else _plain_part(part) for part in start.parts],
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
        parts=[None if part is None else _part_of(part) for part in plain["parts"]],
    )


def _plain_part(part: Stretch) -> dict[str, Any]:
    return {
        "tokens": np.ascontiguousarray(part.tokens, np.int32).tobytes(),
        "logprobs": np.ascontiguousarray(part.logprobs, np.float32).tobytes(),
        "versions": np.ascontiguousarray(part.versions, np.int32).tobytes(),
        "masks": None if part.masks is None else [np.asarray(mask, np.int32).tobytes() for mask in part.masks],
    }


def _part_of(plain: Mapping[str, Any]) -> Stretch:
    masks = plain["masks"]
    return Stretch(
        begin=0,
        tokens=np.frombuffer(plain["tokens"], np.int32),
        logprobs=np.frombuffer(plain["logprobs"], np.float32),
        versions=np.frombuffer(plain["versions"], np.int32),
        masks=None if masks is None else [np.frombuffer(mask, np.int32) for mask in masks],
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
