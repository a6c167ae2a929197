"""Which modules one rollout passes: follows a group of the demo through all processes of a run,
call by call.

    python -m bench.path --list --json FILE

The demo runs as `make demo` runs it, with a hook in every process but the scheduler's, which no
rollout passes. In the middle of the run the hook picks a prompt and follows its group from there on
(eight of them in truth, which go the same way: one whose rewards are all equal teaches nothing, and
ends before the loss). A module counts once one of its functions is handed the group or gives it
back, or once an object of one of its classes holds it there. Handed is what stands in the
arguments, `self` among them.

A value is the group, or holds it, if it is
- rows of Arrow with its number in the column `group_id`,
- text or bytes in which its prompt stands, or another text of its first row (an answer, a
  completion),
- numbers in which the tokens of its prompt, or the log-probabilities or another list of its first
  row, stand side by side; or a number for each of its rows, as its rewards,
- its number where the name says so (`group_id`, `groups`, ...), or beside the name of its source or
  of its prompt,
- the newest tokens of all live rows: a record with `tokens` and `logprobs`,
- a list, a dictionary or a frozen record of such values, some levels deep; any other object whose
  own attribute is one. What such an object keeps in lists and dictionaries does not count: who owns
  a queue is not handed what stands in it.

So a file that computes with what was computed from the rollout (hidden states, gradients, figures
of a step) does not count, nor one that moves weights, or starts, watches and ends things.
`meanwhile` are the modules in which any function is called while the steps in the middle are made,
apart from the scheduler's and those of heartbeats and checkpoints; `weights`, those of these that
move weights. Lines are all lines of a module.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import mmap
import multiprocessing
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.report import Report
from dataflow import run
from graphs import sorting
from graphs.tasks import sorting as task

ROOT = Path(__file__).parents[1]
AnyArray: TypeAlias = np.ndarray[Any, Any]
PRODUCT = ("dataflow", "operators", "transport")
WITHOUT_ROLLOUTS = {"link", "heartbeat", "view", "aside", "checkpoint", "ranks-watch"}
"""Threads by the names that they give themselves; of `meanwhile` alone."""
FIRST, REST, STEPS = 60, 5, 110
"""From which step on is looked, how many steps after the group was scored, and how many the run
makes at most."""
WAITING, LOOKING, OVER = 0, 1, 2
GROUPS = 8
"""That are followed: of one all rewards may be equal, and then it is not trained."""
LONG_ENOUGH = range(7, 12)
"""Characters of a prompt that stands nowhere else, and is solved now and then."""
MOST_BYTES = 1 << 20
"""Of all that is known of a group."""
RUN, FEWEST = 8, 4
"""A list of a row is known by so many of its last numbers, so many of them different; a text has so
many characters."""
DEEP, MANY = 3, 256
"""Levels that are looked into, and values of each."""
FEW_NUMBERS = 20_000
"""Arrays with more are no rollouts."""
MOST_RECORDS = 1000
"""Rows of a table that is a batch, not all prompts; and records that are remembered."""


class Marks:
    """By what the group is known. What one process learns of its rows, all processes know."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """ids: of each character, its token."""
        self._ids = ids
        # shared with forks: how many bytes, and lines of JSON
        self._facts = mmap.mmap(-1, MOST_BYTES)
        self._lock = multiprocessing.get_context("fork").Lock()
        self._read = 8
        self._known: set[str] = set()
        self.groups: set[int] = set()
        """Their numbers."""
        self._texts: frozenset[str] = frozenset()
        """Another one with each text that is learned: several threads look at them."""
        self._runs: list[AnyArray] = []
        """Numbers that stand side by side."""
        self.columns: list[AnyArray] = []
        """A number for each of its rows."""

    def known(self) -> bool:
        """Whether a group has been picked; takes up what other processes have learned."""
        end = 8 + struct.unpack_from("<q", self._facts)[0]
        if end > self._read:
            for line in self._facts[self._read : end].decode().splitlines():
                self._take(line)
            self._read = end
        return len(self.groups) == GROUPS

    @property
    def facts(self) -> int:
        """How much is known."""
        return self._read

    def _tell(self, kind: str, value: Any) -> None:
        line = json.dumps([kind, value])
        if line not in self._known:
            with self._lock:
                end, new = 8 + struct.unpack_from("<q", self._facts)[0], f"{line}\n".encode()
                self._facts[end : end + len(new)] = new
                struct.pack_into("<q", self._facts, 0, end + len(new) - 8)
            self.known()

    def _take(self, line: str) -> None:
        self._known.add(line)
        kind, value = json.loads(line)
        if kind == "group" and len(self.groups) < GROUPS:
            number, prompt = value
            self.groups.add(number)
            self._texts |= {prompt}
            self._runs.append(np.array([self._ids[letter] for letter in prompt]))
        elif kind == "text":
            self._texts |= {value}
        elif kind == "run":
            self._runs.append(
                np.array(value, np.float32 if isinstance(value[0], float) else np.int64)
            )
        elif kind == "column":
            self.columns.append(np.array(value, np.float32))

    def pick(self, rows: Any) -> None:
        """A group among these rows of prompts, if one has a prompt that stands nowhere else."""
        records = getattr(rows[0] if isinstance(rows, list) and rows else rows, "records", None)
        if not isinstance(records, pa.RecordBatch) or "tokens" in records.schema.names:
            return
        if not records.num_rows or records["round_size"][0].as_py():  # of an evaluation
            return
        pairs = zip(records["group_id"].to_pylist(), records["prompt"].to_pylist(), strict=True)
        long_pairs = [pair for pair in pairs if len(pair[1]) in LONG_ENOUGH]
        for pair in long_pairs[:GROUPS]:
            self._tell("group", pair)

    def learn(self, rows: pa.Table) -> None:
        """What its first row says, and the numbers of all rows."""
        for name in rows.schema.names:
            kind, values = rows.schema.field(name).type, rows.column(name).to_pylist()
            first = values[0]
            if pa.types.is_string(kind) and first and len(first) >= FEWEST:
                self._tell("text", first)
            elif pa.types.is_list(kind) and first and not isinstance(first[0], list):
                if len({*first[-RUN:]}) >= FEWEST:
                    self._tell("run", first[-RUN:])
            elif pa.types.is_floating(kind) and None not in values and len({*values}) > 1:
                self._tell("column", values)

    def in_text(self, value: str) -> bool:
        """Whether it is a text of the group, or its prompt stands in it."""
        return any(text in value for text in self._texts)

    def in_bytes(self, value: Any) -> bool:
        """Whether its prompt stands in them, or another of its texts."""
        content = bytes(value)
        return any(text.encode() in content for text in self._texts)

    def in_numbers(self, values: AnyArray) -> bool:
        """Whether tokens, or other numbers of one of its rows, stand in them."""
        if values.dtype.kind not in "iuf" or not 1 < values.size <= FEW_NUMBERS:
            return False
        flat = values.astype(np.float32 if values.dtype.kind == "f" else np.int64).ravel()
        if flat.dtype.kind == "f" and any(np.array_equal(flat, column) for column in self.columns):
            return True
        content = flat.tobytes()
        return any(run.tobytes() in content for run in self._runs if run.dtype == flat.dtype)


class Holder:
    """Whether values are the group, or hold it: the rule of this module."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.classes: set[type] = set()
        """Of the objects in which it was found."""
        self._without: dict[int, Any] = {}
        self._at = 0

    def has(self, value: Any, name: str = "", deep: int = DEEP, *, lists: bool = True) -> bool:
        """name: what the value is called where it stands. lists: whether to look into lists and
        dictionaries.
        """
        marks = self._marks
        if (
            value is None
            or isinstance(value, bool | float | type)
            or type(value).__name__ == "Parameter"
        ):
            return False
        if isinstance(value, int | np.integer):
            return int(value) in marks.groups and name.startswith("group")
        if isinstance(value, str):
            return marks.in_text(value)
        if isinstance(value, bytes | bytearray | memoryview | pa.Buffer):
            return marks.in_bytes(value)
        if isinstance(value, pa.RecordBatch | pa.Table | pa.Array | pa.ChunkedArray):
            return self._in_arrow(value, name)
        if type(value).__name__ == "Tensor":
            value = _numbers(value)
        if isinstance(value, np.ndarray):
            return self._named(value, name) or marks.in_numbers(value)
        if deep == 0:
            return False
        if isinstance(value, Mapping):
            return lists and any(
                self.has(item, str(key), deep - 1) or self.has(key, name, deep - 1)
                for key, item in list(value.items())[:MANY]
            )
        if isinstance(value, tuple) and {"tokens", "logprobs"} <= {*getattr(value, "_fields", ())}:
            self.classes.add(type(value))
            return True
        if isinstance(value, list | tuple | set | frozenset | collections.deque | range):
            return lists and self._in_list(value, name, deep)
        return self._in_object(value, deep)

    def _in_arrow(self, value: Any, name: str) -> bool:
        if isinstance(value, pa.RecordBatch | pa.Table):
            table = pa.Table.from_batches([value]) if isinstance(value, pa.RecordBatch) else value
            if "group_id" not in table.schema.names:
                return table.num_rows < MOST_RECORDS and any(
                    self._in_arrow(column, "") for column in table.columns
                )
            own = table.filter(pc.is_in(table["group_id"], pa.array(self._marks.groups)))
            for number in set(own["group_id"].to_pylist()):
                self._marks.learn(own.filter(pc.equal(own["group_id"], number)))
            return bool(own.num_rows)
        if pa.types.is_string(value.type):
            return any(self._marks.in_text(text) for text in value.to_pylist() if text)
        if pa.types.is_list(value.type):
            value = value.flatten()
        if pa.types.is_integer(value.type) or pa.types.is_floating(value.type):
            return self.has(
                (
                    value.to_numpy(zero_copy_only=False)
                    if isinstance(value, pa.Array)
                    else value.to_numpy()
                ),
                name,
            )
        return False

    def _named(self, value: AnyArray, name: str) -> bool:
        return (
            name.startswith("group")
            and value.dtype.kind in "iu"
            and bool(np.isin(value, [*self._marks.groups]).any())
        )

    def _in_list(self, value: Any, name: str, deep: int) -> bool:
        items = list(value)[:MANY]
        if items and all(
            isinstance(item, int | float) and not isinstance(item, bool) for item in items
        ):
            numbers = np.array(items)
            return self._named(numbers, name) or self._marks.in_numbers(numbers)
        beside = (
            isinstance(value, tuple)
            and any(isinstance(item, int) and item in self._marks.groups for item in items)
            and any(isinstance(item, str) for item in items)
        )
        return beside or any(self.has(item, name, deep - 1) for item in items)

    def _in_object(self, value: Any, deep: int) -> bool:
        kind = type(value)
        if kind.__module__.split(".")[0] not in PRODUCT or self._is_known_not_to(value):
            return False
        names = {
            *getattr(value, "__dict__", ()),
            *(slot for base in kind.__mro__ for slot in _slots(base)),
        }
        frozen = dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen
        is_rollout = {"tokens", "logprobs"} <= names or any(
            (frozen or not _is_mutable(item)) and self.has(item, name, deep - 1, lists=frozen)
            for name in names
            if (item := getattr(value, name, None)) is not None
        )
        if is_rollout:
            self.classes.add(kind)
        elif frozen and deep == DEEP - 1:
            self._without[id(value)] = value
        return is_rollout

    def _is_known_not_to(self, value: Any) -> bool:
        """Of frozen records that were looked into since the last thing was learned."""
        if self._at != self._marks.facts or len(self._without) > MOST_RECORDS:
            self._at, self._without = self._marks.facts, {}
        return self._without.get(id(value)) is value


def _numbers(tensor: Any) -> AnyArray:
    """Of a tensor in memory, in types that numpy knows; of others none."""
    readable = tensor.device.type == "cpu" and tensor.dtype.itemsize in (4, 8)
    return tensor.detach().numpy() if readable and tensor.numel() <= FEW_NUMBERS else np.zeros(0)


def _is_mutable(value: Any) -> bool:
    """An object of the product that is no frozen record."""
    kind = type(value)
    own = kind.__module__.split(".")[0] in PRODUCT
    return own and not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _slots(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Tracer:
    """Notes the functions that are called in this process and in all that are forked from it.

    `folder`: where each process leaves the paths of their files, as PID.json, once looking is over.
    """

    def __init__(self, folder: Path, marks: Marks) -> None:
        self._folder = folder
        self._marks, self._holder = marks, Holder(marks)
        self._phase = mmap.mmap(-1, 1)  # shared with forks
        self._scheduler = os.getpid()
        self._seen: set[CodeType] = set()
        self._passed: set[CodeType] = set()
        self._product: dict[CodeType, bool] = {}
        self._looks = threading.local()
        self._left = False

    def install(self) -> None:
        """In this thread, in all that this process starts, and in its forks."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        """From this thread and those to come."""
        threading.setprofile(None)
        sys.setprofile(None)

    def enter(self, phase: int) -> None:
        """Tells all processes."""
        self._phase[0] = phase

    def leave(self) -> None:
        """Writes down what was called here, once."""
        if not self._left:
            self._left = True
            classes = {sys.modules[kind.__module__].__file__ for kind in self._holder.classes}
            report = {
                "called": sorted({code.co_filename for code in self._seen}),
                "passed": sorted(
                    {code.co_filename for code in self._passed} | {str(name) for name in classes}
                ),
            }
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(report))

    def _hook(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if (
            self._phase[0] == WAITING
            or event not in ("call", "return")
            or os.getpid() == self._scheduler
        ):
            return
        if self._phase[0] == OVER:
            self.leave()
        elif (
            self._is_product(code)
            and code not in self._passed
            and not getattr(self._looks, "now", False)
        ):
            if code not in self._seen and threading.current_thread().name not in WITHOUT_ROLLOUTS:
                self._seen.add(code)
            self._looks.now = True
            try:
                self._look(frame, event, value)
            finally:
                self._looks.now = False

    def _look(self, frame: FrameType, event: str, given: Any) -> None:
        if not self._marks.known():
            # where it is issued
            if event == "return" and "prompt" in Path(frame.f_code.co_filename).name:
                self._marks.pick(given)
            return
        code = frame.f_code
        if event == "return":
            values = {code.co_name: given}
        else:
            count = (
                code.co_argcount
                + code.co_kwonlyargcount
                + bool(code.co_flags & 4)
                + bool(code.co_flags & 8)
            )
            values = {name: frame.f_locals.get(name) for name in code.co_varnames[:count]}
        if any(self._holder.has(value, name) for name, value in values.items()):
            self._passed.add(code)

    def _is_product(self, code: CodeType) -> bool:
        is_product = self._product.get(code)
        if is_product is None:
            path = Path(code.co_filename)
            is_product = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT
            self._product[code] = is_product
        return is_product


def modules(folder: Path, kind: str) -> set[str]:
    """Files of the product that some process wrote down, from the repository's root. kind: `passed`
    or `called`, which counts processes alone that carry rollouts.
    """
    files: set[str] = set()
    for notes in folder.glob("*.json"):
        paths = {Path(name) for name in json.loads(notes.read_text())[kind]}
        own = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
        if kind == "passed" or any(name.endswith(("/loop.py", "/calls.py")) for name in own):
            files |= {name for name in own if name.split("/")[0] in PRODUCT}
    return files


def follow(work: Path) -> Path:
    """Runs the demo under the tracer. Returns the folder for `modules`; RuntimeError when the run
    ends too early.
    """
    from transformers import AutoTokenizer

    traced, runs = work / "traced", work / "runs"
    traced.mkdir()
    graph = sorting.build(policy=str(work / "policy"), eval_every=1000)
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    letters = {
        letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in task.ALPHABET
    }
    marks = Marks(letters)
    tracer = Tracer(traced, marks)
    done = threading.Event()

    def steps() -> int:
        return max(
            (metrics.read_text().count('"step"') for metrics in runs.glob("*/metrics.jsonl")),
            default=0,
        )

    def until(is_reached: Callable[[], bool]) -> None:
        while not is_reached() and not done.wait(0.02):
            pass

    def watch() -> None:
        until(lambda: steps() >= FIRST)
        tracer.enter(LOOKING)
        until(lambda: steps() >= STEPS - 2 * REST or (marks.known() and bool(marks.columns)))
        last = steps() + REST
        until(lambda: steps() >= last)
        tracer.enter(OVER)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    tracer.install()
    try:
        run(graph, steps=STEPS, runs=runs, quiet=True)
    finally:
        tracer.remove()
        done.set()
        watching.join()
    if not marks.columns:
        raise RuntimeError(
            "all rewards of the groups that were followed are equal, so that they ended before the"
            " loss; try it again"
        )
    deadline = time.monotonic() + 10
    while not modules(traced, "passed"):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"no process left what it called in {traced}; the run may have ended before a group"
                " was trained"
            )
        time.sleep(0.1)
    return traced


def lines(names: set[str]) -> int:
    """Of these files together."""
    return sum((ROOT / name).read_text().count("\n") for name in names)


def main() -> None:
    """The command."""
    asks = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__)
    asks.add_argument("--json", type=Path)
    asks.add_argument("--list", action="store_true", help="name the modules too")
    asks.add_argument(
        "--all", action="store_true", help="count the modules too that are called meanwhile"
    )
    options = asks.parse_args()
    report = Report("path", options.json)
    with tempfile.TemporaryDirectory() as work:
        folder = follow(Path(work))
        passed, called = modules(folder, "passed"), modules(folder, "called")
    weights = {
        name
        for name in called - passed
        if name.startswith(("transport/weights", "transport/native"))
    }
    cases = {"rollout": passed}
    if options.all:
        cases |= {"meanwhile": called - weights, "weights": weights}
    for case, names in cases.items():
        report.add(case=case, system="ours", modules=len(names), lines=lines(names))
        if options.list:
            print(*(f"{lines({name}):5} {name}" for name in sorted(names)), sep="\n")
    report.show()


if __name__ == "__main__":
    main()
