"""One rollout in full, a part at a time: its texts, its tokens with their numbers, its group."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow import records
from dataflow.history.rollout_view import scores
from dataflow.live.rollouts import cut, matching_columns, number
from dataflow.tokens.rollout_tokens import NO_VERSION

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
