"""Reads rows from JSONL, JSON, Parquet, Arrow, folders of them, data sets of the hub, or any
iterable.
"""

import contextlib
import difflib
import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.errors import RecordError
from operators.sources.hub import HubData, one_split

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow", ".feather")
_ROWS_AT_ONCE = 4096
_MOST_ROWS = 10_000_000
_MOST_FILES = 100_000
_LONGEST_NAME = 4096
_FIRST_ROWS = 1000
_OTHER_TABLES = (".csv", ".tsv", ".jsonl.zst", ".json.zst", ".csv.gz", ".tsv.gz", ".xlsx")
_NO_TABLE = (pa.ArrowException, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a row."""

    kind: str
    """The same for all rows that have it, for counting."""
    detail: str
    """This row's case, as the middle of a sentence."""
    do: str
    """What the user can do."""


@dataclass(frozen=True)
class FoundRow:
    """A row as it was found, or what is wrong with it."""

    number: int
    """Rows before it in the source."""
    place: str
    """File and line, for messages."""
    row: Any
    fault: Fault | None = None


_FILE_NAME = Fault(
    kind="a file's name",
    detail="is the name of a file, not a prompt",
    do="give files alone, or {'prompt': ...}",
)


def names_file(row: Any) -> bool:
    """Whether a row is no prompt but names a file: a path, or one word that ends as data files do
    or is there.

    >>> names_file("train.parquet"), names_file("Explain package.json"), names_file("2+2=")
    (True, False, False)
    """
    if not isinstance(row, str):
        return isinstance(row, Path)
    if len(row) > _LONGEST_NAME or not ("." in row or "/" in row) or " " in row or "\n" in row:
        return False
    return row.endswith((*SUFFIXES, *_OTHER_TABLES)) or Path(row).expanduser().exists()


def source_fault(source: Any) -> str | None:
    """What is wrong with an object as a source of rows, and what to give instead; None where it may
    be one.
    """
    if isinstance(source, str | Path | pa.Table | pa.RecordBatch):
        return None
    if hasattr(source, "read"):
        return (
            f"got an open file ({source!r:.60}) as its source, whose lines are no rows; give its"
            " path"
        )
    if isinstance(source, Set):
        return (
            f"got a {type(source).__name__} as its source, whose order differs from process to"
            " process; sort it"
        )
    if isinstance(source, Mapping) and source and not isinstance(next(iter(source.values())), str):
        return (
            f"got a {type(source).__name__} of {list(source)[:8]} as its source; give one of them,"
            " or a list of rows"
        )
    if isinstance(source, Mapping | bytes | bytearray) or not hasattr(source, "__iter__"):
        return (
            f"got {type(source).__name__} {source!r:.60} as its source; give a path, a list of"
            " paths, an id on the hub, or an iterable of dicts or texts"
        )
    if hasattr(source, "columns") and not _gives_rows(source):
        return _frame_fault(source)
    files = (
        [names_file(row) for row in itertools.islice(source, _FIRST_ROWS)]
        if isinstance(source, list | tuple)
        else []
    )
    if any(files) and not all(files):
        return (
            f"got files ({source[files.index(True)]!r:.60}) beside rows"
            f" ({source[files.index(False)]!r:.60}) as its source; give files alone, or rows as"
            " dicts: {'prompt': ...}"
        )
    return None


def rows_of(source: Any) -> Any:
    """A source that can be read again: an iterator as `Replay`, a data frame of any library as a
    table of Arrow.

    A data frame iterates over its columns.
    """
    if isinstance(source, str | Path | Mapping | Sequence | pa.Table | pa.RecordBatch) or hasattr(
        source, "read"
    ):
        return source
    if (hasattr(source, "__arrow_c_stream__") or hasattr(source, "columns")) and not _gives_rows(
        source
    ):
        with contextlib.suppress(*_NO_TABLE):
            return pa.table(source)
    return Replay(source) if isinstance(source, Iterator) else source


def _gives_rows(source: Any) -> bool:
    can_peek = hasattr(source, "__iter__") and not isinstance(source, Iterator)
    return can_peek and isinstance(next(iter(source), None), Mapping)


def _frame_fault(frame: Any) -> str | None:
    """Why a data frame, which iterates over the names of its columns, is no table of Arrow."""
    try:
        pa.table(frame)
    except _NO_TABLE as error:
        why = " ".join(str(error).split())
        return (
            f"got a {type(frame).__name__} as its source that is no table of Arrow"
            f" ({type(error).__name__}: {why:.200}); make the values of each column alike, or give"
            " its rows as dicts"
        )
    return None


class Replay:
    """An iterator that can be read again: what was drawn from it is kept."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self._rows = rows
        self._drawn: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for at in itertools.count():
            if at == len(self._drawn):
                try:
                    self._drawn.append(next(self._rows))
                except StopIteration:
                    return
            yield self._drawn[at]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where rows are read from."""

    source: Any
    """Path, paths, id on the hub, alone or as hf:NAME[/CONFIG][:SPLIT], or iterable of rows."""
    split: str | None = None
    """Of a data set that has several."""
    config: str | None = None
    """Of a data set on the hub that has several."""
    columns: tuple[str, ...] | None = None
    """The only ones needed, where the format can leave others unread; None: all."""

    @property
    def named(self) -> tuple[Path, ...] | None:
        """The files and folders that it names, be they there or not; None where it is an iterable
        of rows.
        """
        if isinstance(self.source, str | Path):
            return (Path(self.source).expanduser(),)
        # rows of others may cost a session each
        is_cheap = isinstance(self.source, list | tuple | Replay)
        if (
            not is_cheap
            or source_fault(self.source) is not None
            or not names_file(next(iter(self.source), None))
        ):
            return None
        names = list(itertools.islice(self.source, _MOST_FILES))
        return (
            tuple(Path(name).expanduser() for name in names)
            if all(map(names_file, names))
            else None
        )

    @property
    def is_here(self) -> bool:
        """Whether its rows can be looked at now."""
        return self.named is None or all(path.exists() for path in self.named)

    @property
    def shown(self) -> str:
        """What messages call it."""
        if self.named is None:
            return type(self.source).__name__
        if isinstance(self.source, str | Path):
            return f"'{self.source}'"
        return f"'{self.named[0]}'" + (
            f" and {len(self.named) - 1} more" if len(self.named) > 1 else ""
        )

    def __iter__(self) -> Iterator[FoundRow]:
        """Every row; RecordError when the source cannot be read at all."""
        if self.named is None:
            return self._iterate(self.source)
        if self.is_here:
            return self._number(_file_rows(file, self.columns) for file in self._files())
        if (missing := self.missing) is not None:
            raise RecordError(missing)
        assert self.hub is not None, "nothing else is neither here nor missing"
        return self._iterate(self.hub.rows())

    @property
    def hub(self) -> HubData | None:
        """The data set on the hub that it names, where that is no file or folder here."""
        is_text = isinstance(self.source, str) and not self.source.endswith(SUFFIXES)
        return (
            HubData.named(self.source, self.config, self.split)
            if is_text and not self.is_here
            else None
        )

    @property
    def missing(self) -> str | None:
        """What is wrong with a path that is not there and is no id on the hub either; None where
        all is well.
        """
        missing = next((path for path in self.named or () if not path.exists()), None)
        return None if missing is None or self.hub is not None else _missing(missing)

    def nested_types(self) -> dict[str, pa.DataType]:
        """Columns of structs and of lists of them, where the files themselves say what they hold;
        of files that differ the fields of all, which are null where a file has none. RecordError
        where they contradict one another.
        """
        schemas = [getattr(self.source, "schema", None)]
        if self.named is not None:
            columnar = (".parquet", ".arrow", ".feather")
            schemas = (
                [_schema_of(file) for file in self._files() if file.suffix in columnar]
                if self.is_here
                else []
            )
        fields: dict[str, pa.Field] = {}
        for field in itertools.chain.from_iterable(
            schema for schema in schemas if isinstance(schema, pa.Schema)
        ):
            if self.columns is not None and field.name not in self.columns:
                continue
            try:
                both = [
                    pa.schema([candidate])
                    for candidate in (fields.get(field.name), field)
                    if candidate is not None
                ]
                fields[field.name] = pa.unify_schemas(both, promote_options="permissive").field(0)
            except pa.ArrowException as error:
                raise RecordError(
                    f"the files of {self.shown} hold unlike values in '{field.name}' ({error});"
                    " make them alike, or write them as JSON in a text"
                ) from error
        return {name: field.type for name, field in fields.items() if _is_nested(field.type)}

    def count(self) -> int | None:
        """Rows, where counting is cheap."""
        if self.named is None:
            return len(self.source) if isinstance(self.source, Sequence | pa.Table) else None
        if not self.is_here:
            return None
        try:
            counts = [_file_count(file) for file in self._files()]
        except (RecordError, OSError, pa.ArrowInvalid):
            return None
        return None if None in counts else sum(cast(list[int], counts))

    def _files(self) -> list[Path]:
        return [file for path in self.named or () for file in _files(path, self.split)]

    def _iterate(self, rows: Iterable[Any]) -> Iterator[FoundRow]:
        if isinstance(rows, pa.Table | pa.RecordBatch):
            rows = itertools.chain.from_iterable(_batch_rows([rows]))
        shown = self.shown
        for number, row in enumerate(rows):
            if number >= _MOST_ROWS:
                raise RecordError(
                    f"the iterable of prompts gave {number} rows and has more; set"
                    " Prompts(limit=...)"
                )
            yield FoundRow(
                number, f"row {number} of {shown}", row, _FILE_NAME if names_file(row) else None
            )

    def _number(
        self, files: Iterable[Iterator[tuple[str, Any, Fault | None]]]
    ) -> Iterator[FoundRow]:
        for number, (place, row, fault) in enumerate(itertools.chain.from_iterable(files)):
            yield FoundRow(number, place, row, fault)


_Rows = Iterator[tuple[str, Any, Fault | None]]


def _files(path: Path, split: str | None) -> list[Path]:
    """The data files of a file or folder; RecordError when there are none, or several splits."""
    if path.is_file():
        return [path]
    names = sorted(entry.name for entry in path.iterdir())
    if "dataset_dict.json" in names:
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return _files(path / one_split(str(path), splits, split), None)
    if "state.json" in names:
        state = json.loads((path / "state.json").read_text())
        return [path / entry["filename"] for entry in state["_data_files"]]
    paths = sorted(
        file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES)
    )
    files = [file for file in paths if file.name not in ("dataset_info.json", "dataset_infos.json")]
    if split is not None:
        words = {file: re.split(r"[^A-Za-z]+", str(file.relative_to(path))) for file in files}
        files = [file for file in files if split in words[file]]
    if not files:
        of_split = f" of split '{split}'" if split else ""
        raise RecordError(
            f"folder '{path}' has no prompts{of_split}: it holds {names[:8]}; give a folder with"
            f" files ending in {', '.join(SUFFIXES)}, or one that save_to_disk wrote"
        )
    return files


def _file_rows(path: Path, columns: tuple[str, ...] | None) -> _Rows:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise RecordError(
            f"'{path}' ends in '{path.suffix}', which is not read; convert it to one of"
            f" {', '.join(SUFFIXES)}, or read it yourself and give Prompts the rows"
        )
    try:
        yield from reader(path, columns)
    except (OSError, EOFError, pa.ArrowInvalid) as error:
        raise RecordError(
            f"'{path}' cannot be read as {path.suffix or 'JSON lines'} ({type(error).__name__}:"
            f" {error}); check that it is whole, and that its name ends in what it is:"
            f" {', '.join(SUFFIXES)}"
        ) from error


def _json_lines(path: Path, columns: tuple[str, ...] | None) -> _Rows:
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else Path.open
    with opened(path, "rb") as file:
        if ".json" in path.suffixes and _begins_list(file):
            for number, row in enumerate(_json_list(path, file.read())):
                yield f"row {number} of '{path}'", row, None
            return
        for number, line in enumerate(file, 1):
            if line := (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
                row, fault = _parsed(line)
                yield f"line {number} of '{path}'", row, fault


def _begins_list(file: Any) -> bool:
    start = file.read(256).lstrip()
    file.seek(0)
    return bool(start.startswith(b"["))


def _json_list(path: Path, text: bytes) -> list[Any]:
    try:
        return cast(list[Any], json.loads(text))
    except ValueError as error:
        raise RecordError(
            f"'{path}' is no JSON list ({error}); mend it there, or write one row a line and call"
            " it .jsonl"
        ) from error


def _parsed(line: bytes) -> tuple[Any, Fault | None]:
    try:
        return json.loads(line.decode()), None
    except UnicodeDecodeError as error:
        detail = f"is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}"
        return None, Fault(kind="not UTF-8", detail=detail, do="save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        return None, Fault(kind="broken JSON", detail=f"is no JSON: {error}", do="mend the line")


def _parquet(path: Path, columns: tuple[str, ...] | None) -> _Rows:
    with pq.ParquetFile(path) as file:
        chosen = [name for name in file.schema_arrow.names if columns is None or name in columns]
        batches = file.iter_batches(_ROWS_AT_ONCE, columns=chosen or None, use_threads=False)
        for number, row in enumerate(itertools.chain.from_iterable(_batch_rows(batches))):
            yield f"row {number} of '{path}'", row, None


def _arrow(path: Path, columns: tuple[str, ...] | None) -> _Rows:
    with pa.memory_map(str(path)) as file:
        batches = _arrow_batches(file)
        if columns is not None:
            batches = (
                batch.select([name for name in batch.schema.names if name in columns])
                for batch in batches
            )
        for number, row in enumerate(itertools.chain.from_iterable(_batch_rows(batches))):
            yield f"row {number} of '{path}'", row, None


def _arrow_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file, or of a stream, which is what `datasets` writes."""
    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        yield from pa.ipc.open_stream(file)
        return
    for at in range(reader.num_record_batches):
        yield reader.get_batch(at)


def _batch_rows(batches: Iterable[Any]) -> Iterator[list[Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield batch.slice(start, _ROWS_AT_ONCE).to_pylist()


_READERS: dict[str, Callable[[Path, tuple[str, ...] | None], _Rows]] = {
    "": _json_lines,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".gz": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}


def _is_nested(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_struct(kind) or (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type))
    )


def _schema_of(path: Path) -> pa.Schema | None:
    if path.suffix == ".parquet":
        return pq.read_schema(path).remove_metadata()
    with pa.memory_map(str(path)) as file:
        return next((batch.schema for batch in _arrow_batches(file)), None)


def _file_count(path: Path) -> int | None:
    if path.suffix == ".parquet":
        return cast(int, pq.read_metadata(path).num_rows)
    if path.suffix in (".arrow", ".feather"):
        with pa.memory_map(str(path)) as file:
            return int(sum(batch.num_rows for batch in _arrow_batches(file)))
    if path.suffix != ".jsonl" or path.stat().st_size > 1 << 26:
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _missing(path: Path) -> str:
    folder = path.expanduser().parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    problem = (
        f"folder '{folder}' holds {names[:8]}"
        if names
        else f"there is no folder '{folder}', or it is empty"
    )
    do = f"did you mean '{folder / close[0]}'?" if close else "check the path"
    return f"Prompts file '{path}' does not exist; {problem}; {do}"
