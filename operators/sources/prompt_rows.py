"""Turns rows as they were found into a checked table of prompts, and counts what it leaves out."""

import difflib
import itertools
import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RecordError
from dataflow.records import CHAT_TEMPLATE_KWARGS, PROMPT, PROMPT_ID, TOOLS, Columns
from dataflow.system.text import is_sound
from operators.sources.row_files import Fault, FoundRow

LAYOUT_COLUMNS = (TOOLS, CHAT_TEMPLATE_KWARGS)
"""What a row of a chat says of how it is laid out; such columns travel as JSON."""
_ROWS_AT_ONCE = 8192
_SAMPLE_ROWS, _SAMPLE_PROMPTS = 50, 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a row becomes a prompt."""

    columns: tuple[str, ...]
    """The user's columns."""
    prompt_column: str = PROMPT
    id_column: str | None = None
    make: Callable[[Any], Any] | None = None
    """The user's function from a row to a prompt, several, or None."""
    chat: bool = False
    """Whether prompts are chat messages."""
    nullable: frozenset[str] = frozenset()
    """Of the user's columns those that a row may lack, or have as null."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which prompts to take, and what to do with bad rows."""

    start: int = 0
    limit: int | None = None
    drops_bad: bool = False


@dataclass
class Report:
    """What was left out, and what looks odd."""

    bad: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By kind of fault: rows, and the first of them."""
    skipped: int = 0
    """Rows for which the user's function returned None or nothing."""
    duplicates: int = 0
    """Prompts that stood before with the same text."""

    @property
    def dropped(self) -> int:
        """Bad rows."""
        return sum(count for count, _ in self.bad.values())

    def add(self, kind: str, place: str, count: int = 1) -> None:
        """Count bad rows."""
        total, first = self.bad.get(kind, (0, place))
        self.bad[kind] = (total + count, first)


@dataclass(frozen=True)
class MadePrompt:
    """A prompt."""

    id: str
    prompt: str
    values: tuple[Any, ...]
    """Of the user's columns."""


def sample_columns(
    source_rows: Iterable[FoundRow], recipe: Recipe
) -> tuple[dict[str, pa.DataType], list[Fault]]:
    """Types of the user's columns in the first prompts; the faults of these rows if none gave a
    prompt.
    """
    rows: list[MadePrompt] = []
    faults: list[Fault] = []
    for row in itertools.islice(source_rows, _SAMPLE_ROWS):
        for prompt in prompts_of(row, recipe, {}):
            if isinstance(prompt, MadePrompt):
                rows.append(prompt)
            else:
                faults.append(prompt)
        if len(rows) >= _SAMPLE_PROMPTS:
            break
    columns = list(zip(*(prompt.values for prompt in rows), strict=True)) or [()] * len(
        recipe.columns
    )
    types = {name: _type_of(values) for name, values in zip(recipe.columns, columns, strict=True)}
    return types, [] if rows else faults


def load(
    source_rows: Iterable[FoundRow], recipe: Recipe, types: Columns, selection: Selection
) -> tuple[pa.Table, Report]:
    """All prompts as a table (prompt_id, prompt, the user's columns), and what was left out.

    RecordError for the first bad row unless they are to be dropped, and when no prompt is left.
    """
    report = Report()
    fields = [
        (PROMPT_ID, pa.string()),
        (PROMPT, pa.string()),
        *((name, types[name]) for name in recipe.columns),
    ]
    schema = pa.schema(fields)
    most = None if selection.limit is None else selection.start + selection.limit
    prompts = itertools.islice(_good(source_rows, recipe, types, selection, report), most)
    batches = []
    while chunk := list(itertools.islice(prompts, _ROWS_AT_ONCE)):
        columns = [[prompt.id for prompt in chunk], [prompt.prompt for prompt in chunk]]
        columns += [
            list(values) for values in zip(*(prompt.values for prompt in chunk), strict=True)
        ]
        arrays = [
            pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)
        ]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    table = _unique_ids(pa.Table.from_batches(batches, schema), recipe, selection, report).slice(
        selection.start
    )
    report.duplicates = len(table) - pc.count_distinct(table.column(PROMPT)).as_py()
    if not len(table):
        raise RecordError(_nothing_left(recipe, selection, report))
    return table, report


def prompts_of(
    source_row: FoundRow, recipe: Recipe, types: Columns
) -> Iterator[MadePrompt | Fault]:
    """The prompts of a row, or what is wrong with it."""
    if source_row.fault is not None:
        yield source_row.fault
        return
    if recipe.make is None:
        yield _made(source_row.row, str(source_row.number), recipe, types)
        return
    try:
        results = recipe.make(source_row.row)
        is_many = not isinstance(results, str | Mapping | None)
        results = list(results) if is_many else [] if results is None else [results]
    except Exception as error:
        yield _function_fault(recipe.make, error)
        return
    for number, row in enumerate(results):
        yield _made(
            row,
            f"{source_row.number}.{number}" if is_many else str(source_row.number),
            recipe,
            types,
            source_row.row,
        )


def _good(
    source_rows: Iterable[FoundRow],
    recipe: Recipe,
    types: Columns,
    selection: Selection,
    report: Report,
) -> Iterator[MadePrompt]:
    for row in source_rows:
        is_empty = True
        for prompt in prompts_of(row, recipe, types):
            is_empty = False
            if isinstance(prompt, MadePrompt):
                yield prompt
            elif selection.drops_bad:
                report.add(prompt.kind, row.place)
            else:
                raise RecordError(
                    f'{row.place} {prompt.detail}; {prompt.do}, or Prompts(on_bad="drop")'
                )
        report.skipped += is_empty


def _made(
    row: Any, number: str, recipe: Recipe, types: Columns, raw: Any = None
) -> MadePrompt | Fault:
    if isinstance(row, str):
        row = {recipe.prompt_column: row}
    if not isinstance(row, Mapping):
        do = "give rows as dicts or strings, or convert them with rows=..."
        return Fault(kind="not a row", detail=f"is a {type(row).__name__}, not a dict", do=do)
    prompt = _prompt(row, recipe)
    if isinstance(prompt, Fault):
        return prompt
    values: list[Any] = []
    for name in LAYOUT_COLUMNS if recipe.chat else ():
        if row.get(name) and name not in recipe.columns:
            detail = f"has '{name}', which says how its chat is laid out, and is not kept"
            return Fault(
                kind=f"unread '{name}'",
                detail=detail,
                do="name it in columns=, or drop it with rows=...",
            )
    for name in recipe.columns:
        if recipe.chat and name in LAYOUT_COLUMNS:
            values.append(_as_json(row.get(name)))
            continue
        if name in recipe.nullable and row.get(name) is None:
            values.append(None)
            continue
        value = _value(row, name, types.get(name))
        if isinstance(value, Fault):
            return value
        values.append(value)
    if recipe.id_column is not None:
        source = row if recipe.id_column in row or not isinstance(raw, Mapping) else raw
        identity = _value(source, recipe.id_column, None)
        if isinstance(identity, Fault):
            return identity
        number = f"{identity}.{number.partition('.')[2]}" if "." in number else str(identity)
    return MadePrompt(number, prompt, tuple(values))


def _prompt(row: Mapping[str, Any], recipe: Recipe) -> str | Fault:
    name = recipe.prompt_column
    value = _value(row, name, None)
    if isinstance(value, Fault):
        return value
    if isinstance(value, list | tuple) and recipe.chat:
        return _messages(value, name)
    if isinstance(value, list | tuple):
        do = "set chat=True"
        return Fault(
            kind=f"chat messages in '{name}'", detail=f"has a list in '{name}', not a text", do=do
        )
    if not isinstance(value, str):
        detail = f"has {value!r:.60} ({type(value).__name__}) in '{name}', not a text"
        return Fault(
            kind=f"wrong type in '{name}'",
            detail=detail,
            do="make it a text, or convert it with rows=...",
        )
    if not value:
        return Fault(kind=f"empty '{name}'", detail=f"has an empty text in '{name}'", do="fill it")
    return (
        json.dumps([{"role": "user", "content": value}], ensure_ascii=False)
        if recipe.chat
        else value
    )


def _messages(value: Sequence[Any], name: str) -> str | Fault:
    is_chat = bool(value) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and (message.get("content") is not None or message.get("tool_calls"))
        for message in value
    )
    if is_chat:
        try:
            text = json.dumps([_filled(message) for message in value], ensure_ascii=False)
            text.encode()
            return text
        except (TypeError, ValueError):
            pass
    return Fault(
        kind=f"broken chat in '{name}'",
        detail=f"has {value!r:.60} in '{name}', which is no list of messages",
        do='write each as {"role": ..., "content": ...}',
    )


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is null: in a table, each has the keys of all."""
    return {name: value for name, value in message.items() if value is not None}


def _as_json(value: Any) -> str | None:
    """What lays a chat out, as JSON, without nulls that a table has put in; None for nothing."""
    if isinstance(value, str) or not value:
        return value or None

    def without(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: without(inner) for name, inner in part.items() if inner is not None}
        return [without(inner) for inner in part] if isinstance(part, list | tuple) else part

    return json.dumps(without(value), ensure_ascii=False, default=str)


def _value(row: Mapping[str, Any], name: str, kind: pa.DataType | None) -> Any:
    """The value of a column, or the fault."""
    if name not in row:
        close = difflib.get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        detail = f"has no column '{name}': it has {list(row)[:12]}{hint}"
        return Fault(
            kind=f"no column '{name}'",
            detail=detail,
            do=f"add '{name}', name another, or use rows=...",
        )
    value = row[name]
    if value is None:
        return Fault(
            kind=f"null in '{name}'",
            detail=f"has null in '{name}'",
            do="fill it, or skip it with rows=...",
        )
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if not _is_finite(value):
        return Fault(
            kind=f"no number in '{name}'",
            detail=f"has {value!r:.60} in '{name}', which is no number that is finite",
            do="fill it, or skip it with rows=...",
        )
    is_kind = kind is not None and _is_kind(value, kind)
    if not is_kind and not is_sound(value):
        return Fault(
            kind=f"broken text in '{name}'",
            detail=f"has half a character in '{name}'",
            do="mend the text",
        )
    if kind is not None and not is_kind:
        return Fault(
            kind=f"wrong type in '{name}'",
            detail=(
                f"has {value!r:.60} ({type(value).__name__}) in '{name}', where others have {kind}"
            ),
            do=(
                "make them alike, or write it as JSON in a text"
                if isinstance(value, dict | list)
                else (
                    f"make them alike, or state the type with columns={{'{name}':"
                    f" {type(value).__name__}}}"
                )
            ),
        )
    return value


def _is_finite(value: Any) -> bool:
    """Whether every fraction in it is finite: elsewhere NaN stands for a missing one."""
    if isinstance(value, float):
        return math.isfinite(value)
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return all(map(_is_finite, inner))


def _is_kind(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_string(kind):
        return isinstance(value, str) and is_sound(value)
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if pa.types.is_struct(kind):  # Arrow leaves keys out that the type does not have
        fields = {field.name: field.type for field in kind}
        return isinstance(value, Mapping) and all(
            key in fields and (element is None or _is_kind(element, fields[key]))
            for key, element in value.items()
        )
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return isinstance(value, list) and all(
            _is_kind(element, kind.value_type) for element in value
        )
    if pa.types.is_floating(kind) and isinstance(value, float):
        return True
    if pa.types.is_integer(kind) and not isinstance(value, int):
        return False
    try:
        pa.array([value], kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
        return False
    return True


def _type_of(values: Sequence[Any]) -> pa.DataType:
    for some in (values, values[:1]):
        try:
            kind = pa.array(some).type
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            continue
        if not pa.types.is_null(kind):
            return _without_nulls(kind)
    return pa.string()


def _without_nulls(kind: pa.DataType) -> pa.DataType:
    """The type, with text where the first rows had nothing but null."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_nulls(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_nulls(field.type)) for field in kind])
    return kind


def _function_fault(make: Callable[[Any], Any], error: Exception) -> Fault:
    code = getattr(make, "__code__", None)
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if code is not None and frame.f_code.co_filename == code.co_filename
    ]
    at = f" ({Path(code.co_filename).name}:{lines[-1]})" if code is not None and lines else ""
    return Fault(
        kind="rows= failed",
        detail=f"made rows= raise {type(error).__name__}: {error}{at}",
        do="mend the function, or have it return None for such rows",
    )


def _unique_ids(table: pa.Table, recipe: Recipe, selection: Selection, report: Report) -> pa.Table:
    """The table without rows whose id stood before; RecordError unless they are to be dropped."""
    if recipe.id_column is None or not len(table):
        return table
    codes = pc.dictionary_encode(table.column(PROMPT_ID)).combine_chunks()
    codes = (
        codes.indices.to_numpy()
        if isinstance(codes, pa.DictionaryArray)
        else codes.chunk(0).indices.to_numpy()
    )
    firsts = np.sort(np.unique(codes, return_index=True)[1])
    if len(firsts) == len(table):
        return table
    twice = int(np.setdiff1d(np.arange(len(table)), firsts)[0])
    place = f"id '{table.column(PROMPT_ID)[twice]}' in column '{recipe.id_column}'"
    if not selection.drops_bad:
        raise RecordError(
            f"{place} stands more than once (again at prompt {twice}); name a column that is"
            " unique, or "
            f'leave id_column out, or Prompts(on_bad="drop")'
        )
    report.add("id more than once", place, len(table) - len(firsts))
    return table.take(pa.array(firsts))


def _nothing_left(recipe: Recipe, selection: Selection, report: Report) -> str:
    reasons = {kind: count for kind, (count, _) in report.bad.items()}
    if reasons:
        first = next(place for _, place in report.bad.values())
        return (
            f"no prompt is left: all rows were dropped ({reasons}, the first at {first}); mend the"
            " data"
        )
    if report.skipped:
        return f"no prompt is left: rows= skipped all {report.skipped} rows; check what it returns"
    if selection.start:
        return f"no prompt is left behind start={selection.start}; lower it"
    return "there are no rows at all, so nothing can be issued; give a source with at least one row"
