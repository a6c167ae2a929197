"""Preference pairs: of each group the best rollout and the worst, by a figure; and how many groups
had none."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dataflow.errors import RunError
from dataflow.records import COMPLETION, ERROR, GROUP_ID, POSITION, PROMPT, PROMPT_ID, ROLLOUT_ID
from dataflow.runs.tables import SOURCE, STEP

REWARD = "reward"
SCHEMA = pa.schema(
    [
        (PROMPT, pa.string()),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("chosen_reward", pa.float64()),
        ("rejected_reward", pa.float64()),
        ("chosen_rollout_id", pa.int64()),
        ("rejected_rollout_id", pa.int64()),
        (PROMPT_ID, pa.string()),
        (GROUP_ID, pa.int64()),
        (SOURCE, pa.string()),
        (STEP, pa.int64()),
    ]
)
_NEEDED = (PROMPT, PROMPT_ID, COMPLETION, GROUP_ID, ROLLOUT_ID, POSITION, ERROR)


@dataclass
class Left:
    """Groups that gave no pair, by why."""

    alike: int = 0
    """All scored rollouts have the same reward: no signal, or a tie of all."""
    lonely: int = 0
    """Fewer than two rollouts were scored: the others failed."""
    same_text: int = 0
    """Best and worst say the same."""
    pairs: int = 0
    """Groups that gave one."""

    def __str__(self) -> str:
        """For people."""
        why = {
            "without signal (all rewards alike)": self.alike,
            "with fewer than two scored rollouts": self.lonely,
            "whose best and worst say the same": self.same_text,
        }
        return ", ".join(f"{count:,} groups {name}" for name, count in why.items() if count)


def columns_of(schema: pa.Schema, by: str) -> list[str]:
    """What is read for pairs. Errors: RunError where the rows have no such figure."""
    figures = [
        each.name
        for each in schema
        if pa.types.is_floating(each.type)
        or pa.types.is_integer(each.type)
        or pa.types.is_boolean(each.type)
    ]
    if by not in figures:
        raise RunError(
            f"pairs are made by a figure of each rollout, but '{by}' is none; give --by one of"
            f" {sorted(figures)}"
        )
    return [*_NEEDED, by]


def chosen_and_rejected(rows: Iterable[Mapping[str, Any]], by: str) -> tuple[Any, Any] | str:
    """The best of a group, the first of several, and the worst; or why there is no pair: the name
    in `Left`."""
    scored = [
        row
        for row in rows
        if row.get(ERROR) is None and row[by] is not None and math.isfinite(row[by])
    ]
    if len(scored) < 2:
        return "lonely"
    best, worst = max(scored, key=lambda row: row[by]), min(scored, key=lambda row: row[by])
    if best[by] == worst[by]:
        return "alike"
    return "same_text" if best[COMPLETION] == worst[COMPLETION] else (best, worst)


@dataclass
class Pairing:
    """Groups become pairs; the rows of a group come one after the other.

    consumes: batches of rollouts
    produces: batches of pairs
    waits for: -
    unblocked by: -
    """

    by: str
    left: Left = field(default_factory=Left)
    _open: list[dict[str, Any]] = field(default_factory=list)

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The pairs of these rollouts."""
        for batch in batches:
            found: list[dict[str, Any]] = []
            for row in batch.to_pylist():
                if self._open and _group(self._open[0]) != _group(row):
                    found += self._ended()
                self._open.append(row)
            if found:
                yield pa.RecordBatch.from_pylist(found, SCHEMA)
        if last := self._ended():
            yield pa.RecordBatch.from_pylist(last, SCHEMA)

    def _ended(self) -> list[dict[str, Any]]:
        """The pair of the group that is complete, if it gives one."""
        rows, self._open = self._open, []
        if not rows:
            return []
        found = chosen_and_rejected(rows, self.by)
        if isinstance(found, str):
            setattr(self.left, found, getattr(self.left, found) + 1)
            return []
        self.left.pairs += 1
        best, worst = found
        return [
            {
                PROMPT: best[PROMPT],
                "chosen": best[COMPLETION],
                "rejected": worst[COMPLETION],
                "chosen_reward": float(best[self.by]),
                "rejected_reward": float(worst[self.by]),
                "chosen_rollout_id": best[ROLLOUT_ID],
                "rejected_rollout_id": worst[ROLLOUT_ID],
                **{name: best.get(name) for name in (PROMPT_ID, GROUP_ID, SOURCE, STEP)},
            }
        ]


def _group(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get(SOURCE), row.get(STEP), row[GROUP_ID]
