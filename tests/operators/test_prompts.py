"""Laws of the source of prompts: what it reads, what it refuses, and in which order it issues."""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from rigs.operators import make_context
from rigs.policy import CHAT_TEMPLATE

from dataflow import Graph, Model, collect
from dataflow.errors import RecordError
from dataflow.folder.ledger import InFlight
from dataflow.records import (
    GROUP_ID,
    GROUP_SIZE,
    MIN_VERSION,
    PROMPT,
    PROMPT_COLUMNS,
    PROMPT_ID,
    ROUND_SIZE,
)
from dataflow.runtime import Runtime
from dataflow.staleness import Bound
from operators import Generator
from operators.generation import tokenize
from operators.models import loading
from operators.models.loading import load_tokenizer
from operators.prompts import Prompts, permutation

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "note": f"n{i}"} for i in range(5)]


class Ledger:
    """Remembers what was issued."""

    def __init__(self, following: int = 0) -> None:
        self.issued: list[tuple[int, str]] = []
        self.waiting: list[InFlight] = []
        self.judged = -1
        self._following = following

    def next_group_id(self, source: str) -> int:
        return self._following + len(self.issued)

    def issue(self, source: str, prompts: list[tuple[int, str]]) -> None:
        self.issued += prompts

    def in_flight(self, source: str) -> list[InFlight]:
        return self.waiting

    def is_judged(self, source: str, step: int) -> bool:
        return step <= self.judged


class Log:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Mapping[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.said.append((event, facts))

    info = warning


def build(prompts: Prompts, **context: Any) -> Runtime:
    return prompts.build(make_context(node=prompts.name, **{"log": Log(), **context}))


def issued(runtime: Runtime, most: int = 1000) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    while sum(batch.num_rows for batch in batches) < most and (made := runtime.work()) is not None:
        batches += [batch.records for batch in made]
    return pa.Table.from_batches(batches)


def texts(runtime: Runtime, most: int = 1000) -> list[str]:
    return issued(runtime, most).column(PROMPT).to_pylist()  # type: ignore[no-any-return]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_gz(path: Path) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return path


def write_json_list(path: Path) -> Path:
    path.write_text(json.dumps(ROWS))
    return path


def write_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def write_ipc(path: Path, open_writer: Callable[..., Any] = pa.ipc.new_file) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with open_writer(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_saved_data_set(path: Path) -> Path:
    """As `datasets` saves one: an Arrow stream and a state.json that names it."""
    path.mkdir()
    write_ipc(path / "data-00000-of-00001.arrow", pa.ipc.new_stream)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    return path


def write_folder(path: Path) -> Path:
    path.mkdir()
    write_jsonl(path / "b.jsonl", ROWS[3:])
    write_jsonl(path / "a.jsonl", ROWS[:3])
    (path / "README.md").write_text("no rows here")
    return path


class Frame:
    """As data frames of every library are: Arrow on demand, and iterated over by the names of its
    columns.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.__arrow_c_stream__ = table.__arrow_c_stream__

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.column_names)


class MixedFrame:
    """A data frame in one of whose columns are numbers and texts, which Arrow does not have."""

    columns = ("prompt", "answer")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.array([1, "x"])


SOURCES: dict[str, Callable[[Path], Any]] = {
    "jsonl": lambda folder: write_jsonl(folder / "x.jsonl", ROWS),
    "text path": lambda folder: str(write_jsonl(folder / "x.jsonl", ROWS)),
    "gz": lambda folder: write_gz(folder / "x.jsonl.gz"),
    "json list": lambda folder: write_json_list(folder / "x.json"),
    "parquet": lambda folder: write_parquet(folder / "x.parquet"),
    "arrow file": lambda folder: write_ipc(folder / "x.arrow"),
    "arrow stream": lambda folder: write_ipc(folder / "x.feather", pa.ipc.new_stream),
    "saved data set": lambda folder: write_saved_data_set(folder / "saved"),
    "folder": lambda folder: write_folder(folder / "files"),
    "names of files": lambda folder: [
        str(file) for file in sorted(write_folder(folder / "files").glob("*.jsonl"))
    ],
    "paths, one by one": lambda folder: iter(
        sorted(write_folder(folder / "files").glob("*.jsonl"))
    ),
    "list": lambda folder: ROWS,
    "generator": lambda folder: (row for row in ROWS),
    "table": lambda folder: pa.Table.from_pylist(ROWS),
    "batches": lambda folder: pa.Table.from_pylist(ROWS).to_reader(),
    "data frame": lambda folder: Frame(pa.Table.from_pylist(ROWS)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_typed_prompts(kind: str, tmp_path: Path) -> None:
    prompts = Prompts(SOURCES[kind](tmp_path), columns=("answer", "note"), epochs=1)
    assert prompts.faults() == []
    assert prompts.extra_columns() == {"answer": pa.int64(), "note": pa.string()}
    assert prompts.count() in (5, None)
    table = issued(build(prompts))
    assert table.schema == pa.schema(list(prompts.provides({}).items()))
    assert table.column(GROUP_ID).to_pylist() == [0, 1, 2, 3, 4]
    assert table.column(PROMPT).to_pylist() == [row["prompt"] for row in ROWS]
    assert table.column("answer").to_pylist() == [1, 2, 3, 4, 5]
    assert table.column(PROMPT_ID).to_pylist() == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "kind", ["jsonl", "parquet", "arrow file", "saved data set", "folder", "list"]
)
def test_rows_are_counted_without_issuing_them(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path)
    assert Prompts(source).count() == 5
    assert Prompts(source, start=2).count() == 3
    assert Prompts(source, start=2, limit=2).count() == 2
    assert Prompts(source, rows=lambda row: row).count() is None


def test_texts_are_prompts_by_themselves() -> None:
    assert texts(build(Prompts(["a", "b"], epochs=1))) == ["a", "b"]


def test_a_function_turns_one_row_into_none_one_or_many_prompts() -> None:
    def steps(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
        return [{"prompt": f"{step}="} for step in row["steps"]] if row["steps"] else None

    rows = [{"steps": ["a", "b"]}, {"steps": []}, {"steps": ["c"]}]
    table = issued(build(Prompts(rows, rows=steps, epochs=1)))
    assert table.column(PROMPT).to_pylist() == ["a=", "b=", "c="]
    assert table.column(PROMPT_ID).to_pylist() == ["0.0", "0.1", "2.0"]


def test_a_function_may_return_a_text_and_columns_of_its_own() -> None:
    assert texts(build(Prompts([1, 2], rows=lambda row: f"{row}!", epochs=1))) == ["1!", "2!"]
    made = Prompts(
        [1, 2], rows=lambda row: {"prompt": "p", "half": row / 2}, columns=("half",), epochs=1
    )
    assert made.extra_columns() == {"half": pa.float64()}
    assert issued(build(made)).column("half").to_pylist() == [0.5, 1.0]


def test_ids_come_from_a_column_and_from_the_row_that_was_expanded() -> None:
    rows = [{"id": "x", "of": ["a", "b"]}, {"id": "y", "of": ["c"]}]
    prompts = Prompts(rows, rows=lambda row: row["of"], id_column="id", epochs=1)
    assert issued(build(prompts)).column(PROMPT_ID).to_pylist() == ["x.0", "x.1", "y.0"]


def test_chat_messages_travel_as_json() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    table = issued(build(Prompts([{"prompt": messages}, {"prompt": "1+2?"}], chat=True, epochs=1)))
    first, second = (json.loads(text) for text in table.column(PROMPT).to_pylist())
    assert first == messages
    assert second == [{"role": "user", "content": "1+2?"}]


def test_start_and_limit_cut_one_file_into_two_parts() -> None:
    assert texts(build(Prompts(ROWS, limit=2, epochs=1))) == ["0+1=", "1+1="]
    assert texts(build(Prompts(ROWS, start=2, epochs=1))) == ["2+1=", "3+1=", "4+1="]


def test_an_endless_iterator_is_read_only_as_far_as_the_limit() -> None:
    def numbers() -> Iterator[str]:
        at = 0
        while True:
            yield str(at)
            at += 1

    assert texts(build(Prompts(numbers(), limit=3, epochs=2))) == ["0", "1", "2", "0", "1", "2"]


def test_a_renamed_source_keeps_its_rows_and_its_function() -> None:
    prompts = Prompts((row for row in ROWS), rows=lambda row: row["note"], epochs=1).renamed(
        "held_out"
    )
    assert prompts.name == "held_out"
    assert texts(build(prompts)) == ["n0", "n1", "n2", "n3", "n4"]


def test_group_size_stands_on_every_row() -> None:
    assert set(
        issued(build(Prompts(ROWS, epochs=1, group_size=3))).column(GROUP_SIZE).to_pylist()
    ) == {3}
    assert set(issued(build(Prompts(ROWS, epochs=1))).column(GROUP_SIZE).to_pylist()) == {0}


# What can never be trained


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_for_which_the_context_has_no_room_are_counted_at_the_start_and_fail_by_that_cause(
    chat: bool, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chat:
        monkeypatch.setattr(
            loading, "load_tokenizer", lambda model: chatting(load_tokenizer(model))
        )
    generator = Generator(
        Model(str(policy)).frozen(), group_size=1, max_tokens=1, context_tokens=12, chat=chat
    )
    texts = ["ab=", "abcdefghijklmnop=", "abc=", "abcdefghijklmno="]

    def looked_at(*texts: str) -> Any:
        context = make_context(node="prompts", takers=(generator,))
        return Prompts(list(texts), epochs=1, chat=chat).build(context).status().get("notice")

    assert looked_at("ab=", "abc=") is None
    said = (
        "2 of 4 prompts can never be trained: they are too long for 'generator', whose context is"
        " 12 tokens"
    )
    assert str(looked_at(*texts)).startswith(said)
    with pytest.raises(RecordError, match="'prompts': 2 of 2 prompts can never be trained"):
        looked_at(texts[1], texts[3])
    if not chat:
        g = Graph("long")
        errors = (
            collect(generator(g.source(Prompts(texts, epochs=1))), rows=4)
            .column("error")
            .to_pylist()
        )
        assert [error and error.partition("the prompt")[0] for error in errors] == [
            None,
            "generator: too_long: ",
        ] * 2


def test_of_very_many_long_prompts_some_are_looked_at(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_LOOKED_BYTES", 400)
    generator = Generator(Model(str(policy)).frozen(), max_tokens=1, context_tokens=12)
    prompts = Prompts(["abcdefghijklmno=", "ab="] * 50, epochs=1).build(
        make_context(node="prompts", takers=(generator,))
    )
    found = re.match(r"about (\d+) of 100 prompts", str(prompts.status()["notice"]))
    assert found and 20 <= int(found[1]) <= 80


def chatting(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# What can never be trained


# Bad data

BAD_LINES: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"prompt": "a", ', "is no JSON"),
    "not UTF-8": (b'{"prompt": "\xff", "answer": 1}', "is not UTF-8"),
    "no column 'answer'": (b'{"prompt": "a", "anwser": 1}', "did you mean 'anwser'"),
    "null in 'prompt'": (b'{"prompt": null, "answer": 1}', "null in 'prompt'"),
    "null in 'answer'": (b'{"prompt": "a", "answer": null}', "null in 'answer'"),
    "empty 'prompt'": (b'{"prompt": "", "answer": 1}', "empty text"),
    "wrong type in 'prompt'": (b'{"prompt": 3, "answer": 1}', "3 (int) in 'prompt'"),
    "wrong type in 'answer'": (b'{"prompt": "a", "answer": "one"}', "where others have int64"),
    "chat messages in 'prompt'": (b'{"prompt": [{"role": "user"}], "answer": 1}', "chat=True"),
    "broken text in 'prompt'": (b'{"prompt": "\\ud800", "answer": 1}', "half a character"),
    "not a row": (b"[1, 2]", "is a list"),
}


def with_bad_line(folder: Path, line: bytes) -> Path:
    path = folder / "x.jsonl"
    good = [json.dumps(row).encode() for row in ROWS]
    path.write_bytes(b"\n".join([*good[:3], line, b"", *good[3:]]) + b"\n")
    return path


@pytest.mark.parametrize("rest", [["\ud83d"], {"a": "\ud83d"}, [{"a": ["\udce9"]}]])
def test_half_a_character_within_a_column_is_named(rest: Any) -> None:
    good = json.loads(
        json.dumps(rest, ensure_ascii=True).replace("\\ud83d", "x").replace("\\udce9", "x")
    )
    rows = [{"prompt": "a", "rest": good}, {"prompt": "b", "rest": rest}]
    with pytest.raises(RecordError, match="half a character in 'rest'"):
        build(Prompts(rows, columns=("rest",)))


@pytest.mark.parametrize(
    "worth", [float("nan"), np.float32("inf"), [1.0, float("-inf")], {"a": [float("nan")]}]
)
def test_a_number_that_is_not_finite_is_named(worth: Any) -> None:
    good = (
        1.0
        if isinstance(worth, float | np.floating)
        else [1.0, 2.0]
        if isinstance(worth, list)
        else {"a": [1.0]}
    )
    rows = [{"prompt": "a", "worth": good}, {"prompt": "b", "worth": worth}]
    with pytest.raises(
        RecordError, match=r"in 'worth', which is no number that is finite; fill it"
    ):
        build(Prompts(rows, columns=("worth",)))
    dropping = Prompts(rows, columns=("worth",), on_bad="drop", epochs=1)
    assert build(dropping).status()["bad_rows"] == 1


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_when_the_run_starts(kind: str, tmp_path: Path) -> None:
    line, said = BAD_LINES[kind]
    path = with_bad_line(tmp_path, line)
    with pytest.raises(RecordError) as refused:
        build(Prompts(path, columns=("answer",)))
    assert f"line 4 of '{path}'" in str(refused.value)
    assert said in str(refused.value)
    assert 'on_bad="drop"' in str(refused.value)


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_dropped_line_is_counted_logged_and_never_gets_a_group_id(
    kind: str, tmp_path: Path
) -> None:
    log = Log()
    path = with_bad_line(tmp_path, BAD_LINES[kind][0])
    runtime = build(Prompts(path, columns=("answer",), epochs=1, on_bad="drop"), log=log)
    assert texts(runtime) == [row["prompt"] for row in ROWS]
    assert runtime.status()["bad_rows"] == 1
    assert ("prompts left out", kind, 1) in [
        (e, f.get("reason"), f.get("rows")) for e, f in log.said
    ]


def test_a_column_that_no_row_has_is_a_fault_of_the_graph(tmp_path: Path) -> None:
    (fault,) = Prompts(write_jsonl(tmp_path / "x.jsonl", ROWS), columns=("anwser",)).faults()
    assert "no column 'anwser'" in fault
    assert "did you mean 'answer'" in fault


def test_a_missing_file_is_refused_by_the_graph_and_at_the_start(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    prompts = Prompts(tmp_path / "trian.jsonl", columns=("answer",))
    assert re.search(r"does not exist.*did you mean '.*train\.jsonl'", prompts.faults()[0])
    assert prompts.extra_columns() == {"answer": pa.string()}
    assert prompts.count() is None
    with pytest.raises(RecordError, match=r"does not exist.*did you mean '.*train\.jsonl'"):
        build(prompts)


@pytest.mark.parametrize("rows", [[], [None], [{"prompt": "a", "skip": True}]])
def test_a_source_without_a_prompt_is_refused_even_when_bad_rows_are_dropped(
    rows: list[Any],
) -> None:
    prompts = Prompts(
        rows, rows=lambda row: None if row and row.get("skip") else row, on_bad="drop"
    )
    with pytest.raises(RecordError, match=r"no prompt is left|no rows at all|skipped all"):
        build(prompts)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n")
    with pytest.raises(RecordError, match="no rows at all"):
        build(Prompts(tmp_path / "x.jsonl"))


def test_a_start_behind_the_last_row_is_refused() -> None:
    with pytest.raises(RecordError, match="start=9"):
        build(Prompts(ROWS, start=9))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.jsonl.gz"])
def test_a_file_that_is_not_what_its_name_says_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"neither one nor the other")
    with pytest.raises(RecordError, match="cannot be read as"):
        build(Prompts(tmp_path / name))


def test_a_kind_of_file_that_is_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt\na\n")
    with pytest.raises(RecordError, match=r"'\.csv', which is not read; convert it"):
        build(Prompts(tmp_path / "x.csv"))


def test_a_data_set_with_several_splits_asks_which(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    write_saved_data_set(tmp_path / "train")
    write_saved_data_set(tmp_path / "test")
    with pytest.raises(RecordError, match=r"\['train', 'test'\].*split='train'"):
        build(Prompts(tmp_path))
    assert len(texts(build(Prompts(tmp_path, split="test", epochs=1)))) == 5


def test_a_split_chooses_among_the_files_of_a_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-00000.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "test-00000.jsonl", ROWS[3:])
    assert len(texts(build(Prompts(tmp_path, split="test", epochs=1)))) == 2
    with pytest.raises(RecordError, match="of split 'dev'"):
        build(Prompts(tmp_path, split="dev"))


def test_an_id_on_the_hub_without_the_library_is_refused_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    prompts = Prompts("nobody/nothing", columns=("answer",))
    assert prompts.faults() == []
    with pytest.raises(RecordError, match=r'pip install "dataflow-rl\[hub\]"'):
        build(prompts)


def test_an_id_on_the_hub_is_loaded_and_its_split_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(source: str, config: str | None) -> dict[str, list[Any]]:
        assert (source, config) == ("openai/gsm8k", "main")
        return {"train": ROWS, "test": ROWS[:2]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    asked: dict[str, Any] = {"config": "main", "epochs": 1}
    assert len(texts(build(Prompts("openai/gsm8k", split="test", **asked)))) == 2
    with pytest.raises(RecordError, match=r"has the splits \['train', 'test'\]"):
        build(Prompts("openai/gsm8k", **asked))


def test_a_function_that_raises_is_named_with_its_line() -> None:
    def broken(row: Mapping[str, Any]) -> str:
        return str(row["question"])

    said = r"row 0 of list made rows= raise KeyError: 'question' \(test_prompts\.py:\d+\)"
    with pytest.raises(RecordError, match=said):
        build(Prompts(ROWS, rows=broken))


def test_an_id_that_stands_twice_is_refused_or_dropped() -> None:
    rows = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "c", "id": 1}]
    with pytest.raises(RecordError, match="id '1' in column 'id' stands more than once"):
        build(Prompts(rows, id_column="id"))
    assert texts(build(Prompts(rows, id_column="id", on_bad="drop", epochs=1))) == ["a", "b"]


def test_equal_prompts_are_issued_each_and_reported() -> None:
    log = Log()
    table = issued(build(Prompts(["a", "b", "a"], epochs=1), log=log))
    assert table.column(PROMPT).to_pylist() == ["a", "b", "a"]
    assert len(set(table.column(PROMPT_ID).to_pylist())) == 3
    assert [facts["equal_to_another"] for event, facts in log.said if event == "prompts read"] == [
        1
    ]


def test_a_stated_type_wins_over_the_first_rows() -> None:
    rows = [{"prompt": "a", "answer": 1}] * 60 + [{"prompt": "b", "answer": 0.5}]
    with pytest.raises(RecordError, match=r"columns=\{'answer': float\}"):
        build(Prompts(rows, columns=("answer",)))
    stated = Prompts(rows, columns={"answer": float}, epochs=1)
    assert stated.extra_columns() == {"answer": pa.float64()}
    assert issued(build(stated)).column("answer")[-1].as_py() == 0.5


@pytest.mark.parametrize(
    "knobs",
    [
        {"epochs": 0},
        {"limit": 0},
        {"start": -1},
        {"group_size": 0},
        {"shuffle_seed": "a"},
        {"limit": True},
        {"on_bad": "ignore"},
        {"rows": 3},
        {"columns": {3: str}},
        {"columns": ("tokens",)},
        {"columns": ("prompt",)},
        {"columns": {"answer": dict}},
    ],
)
def test_a_knob_that_cannot_be_right_is_a_fault(knobs: dict[str, Any]) -> None:
    (fault,) = Prompts(ROWS, **knobs).faults()
    assert "'prompts'" in fault
    assert ";" in fault or "," in fault


@pytest.mark.parametrize("source", [3, None, {"prompt": "a"}, b"bytes"])
def test_a_source_that_is_none_is_a_fault(source: Any) -> None:
    (fault,) = Prompts(source).faults()
    assert "give a path" in fault


@pytest.mark.parametrize(
    ("source", "do"),
    [
        (lambda file: file.open(), "give its path"),
        (lambda file: {"2+2=", "3+3="}, "sort it"),
        (lambda file: {"train": [{"prompt": "a"}], "test": []}, "give one of them"),
        (lambda file: [str(file), "2+2="], "give files alone"),
        (lambda file: ["2+2=", file], "give files alone"),
        (lambda file: ["missing.parquet", str(file)], "file 'missing.parquet' does not exist"),
        (lambda file: [str(file.parent / "notes.txt")], "give a folder with files ending in"),
        (lambda file: ["train.csv", "more.csv"], "file 'train.csv' does not exist"),
        (
            lambda file: MixedFrame(),
            "make the values of each column alike, or give its rows as dicts",
        ),
    ],
    ids=[
        "open file",
        "set",
        "splits",
        "file and text",
        "text and file",
        "missing",
        "other kind",
        "csv",
        "frame",
    ],
)
def test_what_iterates_over_texts_by_accident_is_a_fault_of_the_graph(
    source: Any, do: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").mkdir()
    source = source(write_jsonl(tmp_path / "x.jsonl", ROWS))
    (fault,) = Prompts(source).faults()
    assert do in fault
    if hasattr(source, "close"):
        source.close()


def test_the_name_of_a_file_among_prompts_is_no_prompt() -> None:
    found = (f"{number}+1=" if number < 2000 else "train.parquet" for number in range(2001))
    with pytest.raises(
        RecordError, match=r"row 2000 of Replay is the name of a file, not a prompt"
    ):
        build(Prompts(found, epochs=1))
    assert texts(build(Prompts([{"prompt": "train.parquet"}, {"prompt": "b"}], epochs=1))) == [
        "train.parquet",
        "b",
    ]


# Order


@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 1000), rows=st.integers(1, 200))
def test_an_epoch_is_a_permutation_and_a_function_of_its_numbers(
    seed: int, epoch: int, rows: int
) -> None:
    order = permutation(seed, epoch, rows)
    assert sorted(order.tolist()) == list(range(rows))
    assert (order == permutation(seed, epoch, rows)).all()


def test_the_order_of_a_seed_never_changes() -> None:
    assert permutation(7, 0, 8).tolist() == PINNED
    assert permutation(7, 1, 8).tolist() != PINNED
    assert permutation(8, 0, 8).tolist() != PINNED
    assert permutation(None, 3, 4).tolist() == [0, 1, 2, 3]


PINNED = [6, 3, 4, 0, 2, 7, 5, 1]


@examples(40)
@given(rows=st.integers(1, 70), seed=st.none() | st.integers(0, 9), at=st.integers(0, 200))
def test_a_source_that_starts_in_the_middle_issues_what_it_would_have_issued(
    rows: int, seed: int | None, at: int
) -> None:
    prompts = Prompts([str(number) for number in range(rows)], shuffle_seed=seed)
    whole, rest = Ledger(), Ledger(at)
    first, second = build(prompts, ledger=whole), build(prompts, ledger=rest)
    texts(first, at + 70)
    texts(second, 64)
    assert rest.issued[:64] == whole.issued[at : at + 64]
    for epoch in range(len(whole.issued) // rows):
        ids = [prompt for _, prompt in whole.issued[epoch * rows : (epoch + 1) * rows]]
        assert sorted(ids) == sorted(str(number) for number in range(rows))


def waiting(groups: Iterable[int]) -> list[InFlight]:
    return [InFlight(group_id=group, prompt_id="", state="generated") for group in groups]


def test_groups_without_an_outcome_are_issued_again_first_under_their_numbers() -> None:
    prompts = Prompts([str(number) for number in range(40)], shuffle_seed=3, epochs=3)
    whole, again = Ledger(), Ledger(100)
    first = build(prompts, ledger=whole)
    texts(first)
    again.waiting = waiting([7, 41, *range(60, 100)])
    second = build(prompts, ledger=again)
    texts(second)
    assert again.issued == [whole.issued[group] for group in [7, 41, *range(60, 120)]]
    assert second.status()["done"] == 1


@pytest.mark.parametrize("known", [0, 5, 32, 40])
def test_a_round_that_was_cut_off_begins_anew_with_the_numbers_that_it_had(known: int) -> None:
    ledger = Ledger(10 + known)
    ledger.waiting = waiting(range(10, 10 + known))
    runtime = build(
        Prompts([str(i) for i in range(40)], name="held_out"), on_demand=True, ledger=ledger
    )
    assert runtime.work() is None
    runtime.tell({"evaluate": 50})
    texts(runtime)
    assert ledger.issued == [(10 + row, str(row)) for row in range(40)]
    assert runtime.pending() == 0


def test_an_open_round_is_issued_once_more_on_demand() -> None:
    ledger = Ledger()
    runtime = build(
        Prompts([str(i) for i in range(40)], name="held_out"), on_demand=True, ledger=ledger
    )
    runtime.tell({"evaluate": 50})
    runtime.work()
    ledger.waiting = waiting(range(32))
    runtime.tell({"evaluate": 50, "again": True})
    texts(runtime)
    assert [group for group, _ in ledger.issued] == [*range(32), *range(40)]


@pytest.mark.parametrize("again", [{}, {"again": True}])
def test_a_round_that_is_recorded_is_not_issued_whoever_asks(again: dict[str, bool]) -> None:
    """A scheduler that has just taken over may not have heard of it, and a source that restarted of
    nothing.
    """
    ledger = Ledger()
    ledger.judged = 50
    runtime = build(Prompts(ROWS, name="held_out"), on_demand=True, ledger=ledger)
    runtime.tell({"evaluate": 50, **again})
    assert runtime.pending() == 0 and runtime.work() is None and not ledger.issued
    runtime.tell({"evaluate": 60})
    assert len(texts(runtime)) == len(ledger.issued) > 0


def test_epochs_end_the_source() -> None:
    runtime = build(Prompts(ROWS, epochs=2))
    assert runtime.status()["done"] == 0
    assert len(texts(runtime)) == 10
    assert runtime.status()["done"] == 1
    assert runtime.work() is None


def test_the_ledger_knows_of_a_group_before_it_leaves() -> None:
    ledger = Ledger()
    (batch,) = build(Prompts(ROWS, epochs=1), ledger=ledger).work() or []
    groups, prompts = (batch.records.column(name).to_pylist() for name in (GROUP_ID, PROMPT_ID))
    assert ledger.issued == list(zip(groups, prompts, strict=True))


def test_no_more_is_issued_than_the_steps_need_and_what_was_dropped() -> None:
    bounds = {"prompts": Bound(max_staleness=1, prompts_per_step=4, steps=3)}
    runtime = build(Prompts(ROWS), bounds=bounds)
    assert len(texts(runtime)) == 12
    runtime.tell({"dropped": 3})
    runtime.tell({"dropped": 2})
    assert len(texts(runtime)) == 3
    assert runtime.status() == {"issued": 15, "rows": 5, "bad_rows": 0, "done": 0}


def test_draining_ends_the_source() -> None:
    runtime = build(Prompts(ROWS))
    runtime.work()
    runtime.tell({"drain": True})
    assert runtime.work() is None
    assert runtime.status()["done"] == 1


def test_rounds_are_issued_only_on_demand_each_row_once_and_numbered_on() -> None:
    ledger = Ledger()
    runtime = build(
        Prompts([str(i) for i in range(40)], name="held_out"), on_demand=True, ledger=ledger
    )
    assert runtime.work() is None
    runtime.tell({"evaluate": 0})
    runtime.tell({"evaluate": 7})
    assert runtime.pending() == 80
    table = issued(runtime)
    assert table.column(GROUP_ID).to_pylist() == list(range(80))
    assert table.column(PROMPT_ID).to_pylist() == [str(i) for i in range(40)] * 2
    assert table.column(MIN_VERSION).to_pylist() == [0] * 40 + [7] * 40
    assert set(table.column(ROUND_SIZE).to_pylist()) == {40}
    assert runtime.pending() == 0
    assert [group for group, _ in ledger.issued] == list(range(80))


def test_prompts_of_training_belong_to_no_round() -> None:
    table = issued(build(Prompts(ROWS, epochs=1)))
    assert np.unique(table.column(ROUND_SIZE)).tolist() == [0]
    assert list(PROMPT_COLUMNS) == table.schema.names


def test_a_declaration_shows_its_knobs() -> None:
    prompts = Prompts(ROWS, columns=("answer",), shuffle_seed=1, rows=str)
    assert prompts.knobs() == {
        "source": "list",
        "columns": ("answer",),
        "shuffle_seed": 1,
        "rows": "str",
    }


@pytest.mark.parametrize("on_demand", [False, True])
def test_what_got_an_outcome_while_the_other_nodes_were_built_is_not_issued_again(
    on_demand: bool,
) -> None:
    """Issued again without end, it would never be acknowledged: whoever ended it waits for it no
    more.
    """
    ledger = Ledger(40)
    ledger.waiting = waiting(range(40))
    runtime = build(
        Prompts([str(i) for i in range(40)], epochs=1), on_demand=on_demand, ledger=ledger
    )
    ledger.waiting = waiting([7, 9])
    runtime.tell({"evaluate": 50})
    texts(runtime)
    assert [group for group, _ in ledger.issued] == (
        [7, 9, *range(40, 78)] if on_demand else [7, 9]
    )


def test_a_round_that_is_asked_for_repeatedly_is_issued_once_until_it_is_asked_for_as_new() -> None:
    runtime = build(Prompts(["a", "b"]), on_demand=True)
    for _ in range(3):
        runtime.tell({"evaluate": 10})
    assert texts(runtime) == ["a", "b"]
    runtime.tell({"evaluate": 10})
    runtime.tell({"evaluate": 5})
    assert runtime.work() is None
    runtime.tell({"evaluate": 10, "again": True})
    assert texts(runtime) == ["a", "b"]
    runtime.tell({"evaluate": 20})
    assert texts(runtime) == ["a", "b"]


def test_a_round_that_is_recorded_is_not_issued_again_but_for_its_groups_in_flight() -> None:
    ledger = Ledger(4)
    ledger.waiting, ledger.judged = waiting([2]), 10
    runtime = build(Prompts(["a", "b"]), on_demand=True, ledger=ledger)
    runtime.tell({"evaluate": 10, "again": True})
    assert runtime.work() is None
    runtime.tell({"evaluate": 20})
    assert len(texts(runtime)) == 2


def test_rows_that_are_made_on_demand_are_made_once_to_be_looked_at_and_once_to_be_read() -> None:
    """A row may cost a session of an environment."""
    made: list[int] = []

    class OnDemand(Sequence[str]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: Any) -> str:
            made.append(number)
            return [f"{at}+1=" for at in range(5)][number]

    prompts = Prompts(OnDemand(), epochs=1)
    assert prompts.faults() == []
    assert len(texts(build(prompts))) == 5
    assert sorted(made) == sorted([*range(6)] * 2)
