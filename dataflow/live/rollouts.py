"""A run's rollouts as pages of a table: from the newest step back, a bounded number of files at a
time.
"""

import collections
import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow import records
from dataflow.errors import RunError
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.which import counted_files
from dataflow.tokens.ragged import staleness_at

FILES = 24
"""That one question looks into, if they are not too large together."""
BYTES = 96 << 20
CPU_S, WALL_S = 1.0, 8.0
"""Of a processor, and in all: what has no priority may get little of one."""
ROWS = 50
"""Of a page."""
KEPT_ROWS = 200_000
"""Of files that were looked into, which a page further on needs again."""
SHORT = 160
"""Characters of a text in a table."""
UNREAD = (
    records.TOKENS,
    records.LOGPROBS,
    records.SAMPLING_MASK,
    records.REF_LOGPROBS,
    records.VALUES,
    records.NEW_LOGPROBS,
)
KINDS = ("step", "eval")
_FIXED = frozenset((*records.PROMPT_COLUMNS, *records.ROLLOUT_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """A question to the table."""

    kind: str = "step"
    """step: what was trained; eval: what an evaluation read."""
    node: str = ""
    """The trainer or evaluation, where several keep their own folder."""
    upto: int | None = None
    """The newest step to look at; None: the newest there is."""
    search: str = ""
    """In prompt, completion and error, small and capital letters alike."""
    sort: str = "step"
    down: bool = True
    page: int = 0


class Rollouts:
    """Those of one run.

    consumes: files of rollouts whose steps the ledger has taken in
    produces: rows of a table
    waits for: the disk
    unblocked by: bounds on files, bytes and seconds
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._cache: collections.OrderedDict[tuple[Path, int], list[dict[str, Any]]] = (
            collections.OrderedDict()
        )

    def nodes(self) -> list[str]:
        """Of which there are files; empty: of the only trainer."""
        path = self._folder.rollouts
        below = (
            sorted(entry.name for entry in path.iterdir() if entry.is_dir())
            if path.is_dir()
            else []
        )
        return [
            node for node in ("", *below) if next((path / node).glob("*-*.arrow"), None) is not None
        ]

    def table(self, row_filter: RolloutFilter) -> dict[str, Any]:
        """A page of rows, and of which steps they are."""
        files = self._files(row_filter)
        ahead = [
            (step, path)
            for step, path in reversed(files)
            if row_filter.upto is None or step <= row_filter.upto
        ]
        rows: list[dict[str, Any]] = []
        looked: list[int] = []
        problems: list[str] = []
        size, worked, began = 0, time.thread_time(), time.monotonic()
        for step, path in ahead[:FILES]:
            spent, passed = time.thread_time() - worked, time.monotonic() - began
            if looked and (size > BYTES or spent > CPU_S or passed > WALL_S):
                break
            looked.append(step)
            try:
                size += path.stat().st_size
                rows += self._matching(path, step, row_filter)
            except (OSError, RunError, pa.ArrowException, ValueError, KeyError) as error:
                problems.append(f"step {step}: {error}")
        rows = in_order(rows, row_filter.sort, row_filter.down)
        begin = row_filter.page * ROWS
        older = [step for step, _ in ahead[len(looked) :]]
        return {
            "rows": rows[begin : begin + ROWS],
            "count": len(rows),
            "page": row_filter.page,
            "rows_a_page": ROWS,
            "columns": _columns(rows),
            "steps": [min(looked), max(looked)] if looked else None,
            "older": older[0] if older else None,
            "files": len(files),
            "problems": problems[:5],
            "newest": files[-1][0] if files else None,
        }

    def file(self, kind: str, node: str, step: int) -> Path:
        """Where the rollouts of a step are. Errors: LookupError where there are none."""
        for at, path in self._files(RolloutFilter(kind=kind, node=node)):
            if at == step:
                return path
        raise LookupError(f"there is no file of rollouts of step {step} any more, or not yet")

    def _files(self, row_filter: RolloutFilter) -> list[tuple[int, Path]]:
        if row_filter.kind not in KINDS or row_filter.node not in ("", *self.nodes()):
            raise LookupError(f"this run has no rollouts of {row_filter.kind} '{row_filter.node}'")
        return counted_files(self._folder, row_filter.kind, row_filter.node)

    def _matching(self, path: Path, step: int, row_filter: RolloutFilter) -> list[dict[str, Any]]:
        if not row_filter.search:
            key = (path, path.stat().st_mtime_ns)
            rows = self._cache.get(key)
            if rows is None:
                rows = self._cache[key] = short_rows(
                    read_arrow(path, UNREAD), step, row_filter.kind
                )
                while sum(map(len, self._cache.values())) > KEPT_ROWS and len(self._cache) > 1:
                    self._cache.popitem(last=False)
            return rows
        table = read_arrow(path, UNREAD)
        hits = [
            pc.match_substring(table.column(name), row_filter.search, ignore_case=True).fill_null(
                False
            )
            for name in (records.PROMPT, records.COMPLETION, records.ERROR)
        ]
        hit = functools.reduce(np.logical_or, [column.to_numpy() for column in hits])
        rows = short_rows(table, step, row_filter.kind)
        return [row for row, matches in zip(rows, hit.tolist(), strict=True) if matches]


def short_rows(table: pa.Table, step: int, kind: str) -> list[dict[str, Any]]:
    """A file's rollouts, each in a few short values: where it is, its texts cut, its numbers.

    `length` counts tokens that the policy chose; `staleness` how many versions its oldest token is
    behind those that the step began with.
    """
    masks = table.column(records.MASK).combine_chunks()
    chosen = _sums(masks)
    trained = kind == "step"
    ages = (
        staleness_at(step, table.column(records.VERSIONS)).to_pylist()
        if trained
        else [None] * table.num_rows
    )
    names = [
        name
        for name in table.schema.names
        if name not in _FIXED
        and (
            pa.types.is_integer(kind_of := table.schema.field(name).type)
            or pa.types.is_floating(kind_of)
            or pa.types.is_boolean(kind_of)
        )
    ]
    columns = (
        records.ROLLOUT_ID,
        records.GROUP_ID,
        records.POSITION,
        records.FINISH_REASON,
        *names,
    )
    plain = table.select(columns).to_pylist()
    texts = {
        name: [cut(text) for text in table.column(name).to_pylist()]
        for name in (records.PROMPT, records.COMPLETION, records.ERROR)
    }
    return [
        {
            "kind": kind,
            "step": step,
            "row": at,
            **{name: number(value) for name, value in row.items()},
            **{name: column[at] for name, column in texts.items()},
            "length": int(chosen[at]),
            "staleness": ages[at],
        }
        for at, row in enumerate(plain)
    ]


def cut(text: str | None, most: int = SHORT) -> str | None:
    """A text's beginning; where something is left out it ends with a sign for that."""
    return text if text is None or len(text) <= most else f"{text[:most]}…"


def number(value: Any) -> Any:
    """A value that JSON knows: what is no finite number is a word."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sums(masks: pa.ListArray) -> Any:
    offsets = masks.offsets.to_numpy()
    counts = np.r_[0, np.cumsum(masks.values.to_numpy(zero_copy_only=False).astype(np.int64))]
    return counts[offsets[1:]] - counts[offsets[:-1]]


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """The columns that scorers, filters and models added."""
    own_columns = ("kind", "step", "row", "length", "staleness")
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(
            dict.fromkeys(name for name in row if name not in _FIXED and name not in own_columns)
        )
    return list(columns)


def in_order(rows: list[dict[str, Any]], name: str, down: bool) -> list[dict[str, Any]]:
    """Rows by one of their values: whichever way, those with a number first, those with none at all
    last.
    """
    values = [row.get(name) for row in rows]
    numbers = [
        row
        for row, value in zip(rows, values, strict=True)
        if isinstance(value, bool | int | float)
    ]
    texts = [row for row, value in zip(rows, values, strict=True) if isinstance(value, str)]
    for some in (numbers, texts):
        some.sort(key=lambda row: row[name], reverse=down)
    return [
        *numbers,
        *texts,
        *(row for row, value in zip(rows, values, strict=True) if value is None),
    ]


def matching_columns(row: Mapping[str, Any], tokens: int) -> list[str]:
    """Columns with a number for each token."""
    return [
        name
        for name, value in row.items()
        if name not in (records.TOKENS, records.MASK)
        and isinstance(value, list)
        and len(value) == tokens
        and all(isinstance(item, int | float) or item is None for item in value)
    ]
