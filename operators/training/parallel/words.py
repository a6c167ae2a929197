"""What rank 0 tells the others as plain values: the rows of a step, parts of them, functions to call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.rollout_tokens import RolloutTokens, gather
from operators.training.learner.packing import Array
from operators.training.learner.rows import StepRows


def chosen(rows: StepRows, rollouts: Array) -> StepRows:
    """Some of the rollouts, in that order."""
    positions, offsets = gather(rows.offsets, rollouts)
    return StepRows(
        tokens=rows.tokens.take(positions),
        offsets=offsets,
        groups_R=rows.groups_R[rollouts],
        rollout_ids_R=rows.rollout_ids_R[rollouts],
        oldest_R=rows.oldest_R[rollouts],
        columns_R={name: values[rollouts] for name, values in rows.columns_R.items()},
        columns_S={name: values[positions] for name, values in rows.columns_S.items()},
    )


def plain_rows(rows: StepRows) -> dict[str, Any]:
    """For msgpack; `rows_of` gives them back."""
    return {
        "tokens": rows.tokens.plain(),
        "arrays": {
            name: plain_array(getattr(rows, name)) for name in ("offsets", "groups_R", "rollout_ids_R", "oldest_R")
        },
        "columns_R": {name: plain_array(values) for name, values in rows.columns_R.items()},
        "columns_S": {name: plain_array(values) for name, values in rows.columns_S.items()},
    }


def rows_of(plain: Mapping[str, Any]) -> StepRows:
    """The rows again."""
    return StepRows(
        tokens=RolloutTokens.of_plain(plain["tokens"]),
        **{name: array_of(values) for name, values in plain["arrays"].items()},
        columns_R={name: array_of(values) for name, values in plain["columns_R"].items()},
        columns_S={name: array_of(values) for name, values in plain["columns_S"].items()},
    )


def plain_array(values: Array) -> list[Any]:
    """Numbers [n] as their type and their bytes."""
    return [values.dtype.str, np.ascontiguousarray(values).tobytes()]


def array_of(plain: list[Any]) -> Array:
    """The numbers again, writable."""
    return np.frombuffer(plain[1], np.dtype(plain[0])).copy()


def name_of(function: Callable[..., Any]) -> str:
    """Where other ranks, which are forks of this process, find a module's function."""
    return f"{function.__module__}:{function.__qualname__}"


def function_of(name: str) -> Callable[..., Any]:
    """That function again."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for each in path.split("."):
        found = getattr(found, each)
    return found  # type: ignore[no-any-return]


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values and paths, for msgpack; `arguments_of` gives them back."""
    paths = {name: str(value) for name, value in arguments.items() if isinstance(value, Path)}
    return {"paths": paths, "values": {name: value for name, value in arguments.items() if name not in paths}}


def arguments_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments again."""
    return {**plain["values"], **{name: Path(value) for name, value in plain["paths"].items()}}
