"""A run's rollouts as pages of a table: from the newest step back, a bounded number of files at a
time.
"""

import collections
import functools
import math
import time
from collections.abc import Mapping, Sequence
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
from dataflow.history.rollout_view import scores
from dataflow.runs.which import counted_files
from dataflow.tokens.ragged import staleness_at
from dataflow.tokens.rollout_tokens import NO_VERSION

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


# One rollout in full, a part at a time: its texts, its tokens with their numbers, its group.


TEXT = 4_000
"""Characters of a text that are shown at once."""
MORE_TEXT = 16_000
"""Of one that is asked for."""
TOKENS = 1_500
"""That are told at once."""
GROUP = 64
"""Rollouts of a group that are shown side by side."""
RATIO = "importance ratio"


def rollout_of(table: pa.Table, row: int) -> dict[str, Any]:
    """A rollout: its texts as far as they are shown at once, its columns, its group. Errors:
    LookupError.
    """
    rollout = _row(table, row)
    texts = {
        name: part(rollout, name, 0, TEXT)
        for name in (records.PROMPT, records.COMPLETION, records.ERROR)
    }
    tokens = rollout.get(records.TOKENS) or []
    columns = {
        name: cut(_text_of(value), 400)
        for name, value in scores(rollout).items()
        if name not in texts
    }
    alike = [
        name for name in (records.GROUP_ID, records.PROMPT_ID, records.OF_SOURCE) if name in rollout
    ]
    same = functools.reduce(
        pc.and_, [pc.equal(table.column(name), rollout[name]) for name in alike]
    )
    rows = pc.indices_nonzero(same.combine_chunks()).to_pylist()
    return {
        "rollout_id": rollout[records.ROLLOUT_ID],
        "group_id": rollout[records.GROUP_ID],
        "prompt_id": cut(rollout[records.PROMPT_ID]),
        "position": rollout[records.POSITION],
        "finish_reason": rollout[records.FINISH_REASON],
        "texts": texts,
        "columns": columns,
        "tokens": len(tokens),
        "colours": [*_ratio(rollout), *matching_columns(rollout, len(tokens))],
        "has_ratio": bool(_ratio(rollout)),
        "no_ratio": _no_ratio(rollout),
        "turns": turns_of(rollout.get(records.MASK) or []),
        "group": [_member(table, at) for at in rows[:GROUP]],
        "group_count": len(rows),
    }


def turns_of(mask: Sequence[bool]) -> int:
    """How many stretches of tokens the policy chose: the turns that it had in an episode."""
    chosen = np.asarray(mask, np.int8)
    return int(np.count_nonzero(np.diff(chosen, prepend=0) == 1))


def part(
    row: Mapping[str, Any], name: str, begin: int, most: int = MORE_TEXT
) -> dict[str, Any] | None:
    """Some characters of a text, from one on, and how many it has; None where it is null. Errors:
    LookupError.
    """
    if name not in (records.PROMPT, records.COMPLETION, records.ERROR):
        raise LookupError(f"a rollout has no text '{cut(name, 40)}'")
    text = row.get(name)
    if text is None:
        return None
    begin = max(0, begin)
    return {"text": text[begin : begin + most], "begin": begin, "of": len(text)}


def text_of(table: pa.Table, row: int, name: str, begin: int) -> dict[str, Any] | None:
    """The same of a file's row."""
    return part(_row(table, row), name, begin)


def tokens_of(
    table: pa.Table, row: int, begin: int, colour: str, vocabulary: Mapping[int, str] | None
) -> dict[str, Any]:
    """Some tokens from one on: id, text where there is a vocabulary, whether the policy chose it,
    and a number.

    Errors: LookupError where no such number is stored.
    """
    rollout = _row(table, row)
    ids, mask = rollout[records.TOKENS], rollout[records.MASK]
    if colour == RATIO and _ratio(rollout):
        new, old = (
            np.array(rollout[records.NEW_LOGPROBS], np.float64),
            np.array(rollout[records.LOGPROBS], np.float64),
        )
        ratios = np.exp(new - old).tolist()
        numbers: list[Any] = [None if math.isnan(ratio) else ratio for ratio in ratios]
    elif colour in matching_columns(rollout, len(ids)):
        numbers = rollout[colour]
    else:
        raise LookupError(f"this rollout has no '{cut(colour, 40)}' by token")
    begin = max(0, begin)
    some = slice(begin, begin + TOKENS)
    texts = [
        None if vocabulary is None else cut(vocabulary.get(token, ""), 60) for token in ids[some]
    ]
    chosen_numbers = [
        value
        for value, is_chosen in zip(numbers, mask, strict=True)
        if is_chosen and value is not None
    ]
    return {
        "begin": begin,
        "of": len(ids),
        "ids": ids[some],
        "texts": texts,
        "chosen": mask[some],
        "numbers": [number(value) for value in numbers[some]],
        "least": number(min(chosen_numbers, default=None)),
        "most": number(max(chosen_numbers, default=None)),
    }


def _row(table: pa.Table, row: int) -> dict[str, Any]:
    if not 0 <= row < table.num_rows:
        raise LookupError(f"this file has {table.num_rows} rollouts, and none with number {row}")
    rollout: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
    return rollout


def _ratio(row: Mapping[str, Any]) -> list[str]:
    """Whether the trainer's own log-probabilities are stored beside the generator's, of a rollout
    that weights drew.
    """
    new, old = row.get(records.NEW_LOGPROBS), row.get(records.LOGPROBS)
    drawn = max(row.get(records.VERSIONS) or [NO_VERSION]) > NO_VERSION
    return (
        [RATIO]
        if drawn and isinstance(new, list) and isinstance(old, list) and len(new) == len(old)
        else []
    )


def _no_ratio(row: Mapping[str, Any]) -> str:
    """Why there is none."""
    if records.NEW_LOGPROBS not in row:
        return "not stored: the trainer keeps no new_logprobs, or this was an evaluation"
    return (
        "not stored: no weights drew it"
        if row[records.NEW_LOGPROBS]
        else "not stored: its step did not train it"
    )


def _text_of(value: Any) -> str:
    return "no value" if value is None else str(number(value))


def _member(table: pa.Table, at: int) -> dict[str, Any]:
    small = [
        name for name in table.schema.names if not pa.types.is_list(table.schema.field(name).type)
    ]
    row = table.select(small).slice(at, 1).to_pylist()[0]
    columns = {name: cut(_text_of(value)) for name, value in scores(row).items()}
    length = pc.sum(table.column(records.MASK).slice(at, 1).combine_chunks().flatten()).as_py() or 0
    return {
        "row": at,
        "rollout_id": row[records.ROLLOUT_ID],
        "position": row[records.POSITION],
        "length": length,
        "finish_reason": row[records.FINISH_REASON],
        "error": cut(row[records.ERROR]),
        "completion": cut(row[records.COMPLETION], 600),
        "columns": columns,
    }
