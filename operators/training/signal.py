"""Which scorers gave all rollouts of a group the same score, so that nothing could be learned from
them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.records import COMPLETION, GROUP_ID, PROMPT
from operators.credit.groups import ROUNDING

_SHOWN = 60


def silent_scores(groups: Sequence[pa.RecordBatch], scores: Mapping[str, str]) -> dict[str, str]:
    """Those of these columns with values that are equal within each group of rows; none without
    groups.
    """
    return {
        name: where
        for name, where in scores.items()
        if groups and all(_is_silent(rows, name) for rows in groups)
    }


def no_signal(groups: Sequence[pa.RecordBatch], scores: Mapping[str, str]) -> dict[str, Any] | None:
    """The silent scorers of a step, as "'reward' (file:line)", and a row with what they gave; None
    where there are none.
    """
    silent = silent_scores(groups, scores)
    if not silent:
        return None
    return {
        "scorers": [f"'{name}' ({where})" for name, where in silent.items()],
        "example": example(groups[0], silent),
    }


def example(rows: pa.RecordBatch, names: Mapping[str, str]) -> str:
    """A row for people: `reward 0.0 for the completion 'blue' of 'What is 2 + 3?'`."""
    row = rows.slice(0, 1).to_pylist()[0]
    figures = ", ".join(f"{name} {row[name]}" for name in names)
    return f"{figures} for the completion {_short(row[COMPLETION])} of {_short(row[PROMPT])}"


def _is_silent(rows: pa.RecordBatch, name: str) -> bool:
    if (
        name not in rows.schema.names
        or len(pc.unique(rows.column(GROUP_ID))) != 1
        or rows.num_rows < 2
    ):
        return False
    values = rows.column(name).drop_null()
    plain_values = values.to_pylist()
    return bool(plain_values) and all(_alike(plain_values[0], value) for value in plain_values)


def _alike(first: Any, value: Any) -> bool:
    if first == value:
        return True
    if isinstance(first, list) and isinstance(value, list):
        return len(first) == len(value) and all(map(_alike, first, value))
    return (
        isinstance(first, float)
        and isinstance(value, float)
        and math.isclose(first, value, rel_tol=ROUNDING)
    )


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
