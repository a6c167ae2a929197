"""A few rollouts of a run to look at: the best, the worst, and some by chance, from files spread
over its steps.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dataflow.records import (
    ERROR,
    GROUP_ID,
    LOGPROBS,
    MASK,
    PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    TOKENS,
    VERSIONS,
)
from dataflow.runs.tables import ADDED, SOURCE, STEP, rollout_batches, rollout_schema
from dataflow.runs.which import TRAINED, Part

MOST_FILES = 40
EACH = 3
_LARGE = {TOKENS, MASK, LOGPROBS, VERSIONS}
_SHOWN = {*PROMPT_COLUMNS, *ROLLOUT_COLUMNS, *ADDED}


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What was found; the same for the same files."""

    best: Sequence[Mapping[str, Any]] = ()
    worst: Sequence[Mapping[str, Any]] = ()
    random: Sequence[Mapping[str, Any]] = ()
    failed: Sequence[Mapping[str, Any]] = ()
    """With an error."""
    by: str = ""
    """The figure that tells best from worst; empty: there is none."""
    looked: int = 0
    """Rollouts that were looked at."""
    files: int = 0
    of_files: int = 0


@dataclass(frozen=True, order=True)
class _Ranked:
    value: float
    seen: int
    row: Mapping[str, Any] = field(compare=False)

    @property
    def group(self) -> tuple[Any, ...]:
        return self.row.get(SOURCE), self.row.get(STEP), self.row.get(GROUP_ID)


def examples_of(parts: Sequence[Part], by: str = "reward", most: int = EACH) -> Examples:
    """From at most `MOST_FILES` files of steps. by: the figure of a rollout. Errors:
    RunFolderError.
    """
    steps = [part for part in parts if part.outcome == TRAINED]
    stride = max(1, -(-len(steps) // MOST_FILES))
    chosen = steps[::-1][::stride][::-1]
    if not chosen:
        return Examples()
    schema = rollout_schema(chosen)
    columns = [field.name for field in schema if _is_small(field)]
    has = by in columns and not pa.types.is_string(schema.field(by).type)
    best: list[_Ranked] = []
    worst: list[_Ranked] = []
    sample: list[Mapping[str, Any]] = []
    failed: list[Mapping[str, Any]] = []
    chance, row_count = random.Random(0), 0
    for batch in rollout_batches(chosen, columns=columns):
        for row in batch.to_pylist():
            row_count += 1
            if row.get(ERROR) is not None:
                if len(failed) < most:
                    failed.append(row)
                continue
            if len(sample) < most:
                sample.append(row)
            elif (at := chance.randrange(row_count)) < most:
                sample[at] = row
            if has and isinstance(value := row[by], int | float) and value == value:
                _keep(best, _Ranked(float(value), row_count, row), most)
                _keep(worst, _Ranked(-float(value), row_count, row), most)
    return Examples(
        best=[ranked.row for ranked in sorted(best, reverse=True)],
        worst=[ranked.row for ranked in sorted(worst, reverse=True)],
        random=sample,
        failed=failed,
        by=by if has else "",
        looked=row_count,
        files=len(chosen),
        of_files=len(steps),
    )


def scores_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph added to a rollout, without what stands in every one."""
    return {name: value for name, value in row.items() if name not in _SHOWN and value is not None}


def _keep(ranked_rows: list[_Ranked], new: _Ranked, most: int) -> None:
    """Hold the `most` largest, one of each group; of equal ones the later."""
    same = next((ranked for ranked in ranked_rows if ranked.group == new.group), None)
    if same is not None:
        if new > same:
            ranked_rows[ranked_rows.index(same)] = new
    elif len(ranked_rows) < most:
        ranked_rows.append(new)
    elif new > (least := min(ranked_rows)):
        ranked_rows[ranked_rows.index(least)] = new


def _is_small(field: pa.Field) -> bool:
    return (
        field.name not in _LARGE
        and not pa.types.is_list(field.type)
        and not pa.types.is_nested(field.type)
    )
