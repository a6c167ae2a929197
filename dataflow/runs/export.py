"""A run's rollouts, or pairs of them, as a data set of Parquet files, with a bounded memory."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.display.formatting import clean
from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.records import (
    ADVANTAGE,
    COMPLETION,
    DROP_REASON,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    GROUP_SIZE,
    LOGPROBS,
    MASK,
    MIN_VERSION,
    NEW_LOGPROBS,
    POSITION,
    PROMPT,
    PROMPT_ID,
    ROLLOUT_ID,
    ROUND_SIZE,
    SAMPLING_MASK,
    TEMPERATURE,
    TOKENS,
    TRAINING_ROW,
    VERSIONS,
)
from dataflow.runs.tables import (
    SOURCE,
    STEP,
    conform,
    rollout_batches,
    rollout_schema,
    untrained_batches,
    with_added,
)
from dataflow.runs.which import EVALUATED, TRAINED, Part, parts_of
from dataflow.system.files import RunFolderError, disk, flush_to_disk

_SAID: Mapping[str, str] = {
    "outcome": "trained, evaluated, dropped, or in flight when it was exported",
    "node": "the trainer or the evaluation that read it",
    "source": "where its prompt came from",
    "step": "that trained it; of an evaluation, after which it was drawn",
    "staleness": "versions that its oldest token was behind the trainer",
    "staleness_generating": "those of them that were made while it was generated",
    "staleness_waiting": "those that were made while it waited to be trained",
    NEW_LOGPROBS: (
        "what the trainer computed before its step; exp(new_logprobs - logprobs) is the importance"
        " ratio"
    ),
    GROUP_ID: "issue number of the prompt within its source",
    PROMPT_ID: "which task it is, the same in every epoch",
    PROMPT: "text, or chat messages as JSON",
    GROUP_SIZE: "rollouts asked for; 0: the generator's own number",
    MIN_VERSION: "not begun under older weights",
    ROUND_SIZE: "prompts of the evaluation round; 0: not of one",
    ROLLOUT_ID: "group_id * group size + position",
    POSITION: "within the group",
    COMPLETION: "what the policy wrote",
    TOKENS: "ids of prompt and completion",
    MASK: "true where the policy chose the token",
    LOGPROBS: "of the distribution that was sampled from; 0 where mask is false",
    VERSIONS: "weights that each token was drawn under; -1 where mask is false",
    FINISH_REASON: "stop, length or error",
    ERROR: "null, or what failed",
    ADVANTAGE: "what the trainer weighed it with",
    SAMPLING_MASK: "ids that truncation left, by token",
    TEMPERATURE: "at which it was sampled",
    DROP_REASON: "why its group was given up",
    TRAINING_ROW: "which of the sequences that the policy saw each token is of",
    "chosen": "completion of the best rollout of the group",
    "rejected": "completion of the worst",
    "chosen_reward": "its figure",
    "rejected_reward": "its figure",
    "chosen_rollout_id": "its number in the run",
    "rejected_rollout_id": "its number in the run",
}


def card(
    folder: RunFolder,
    rows: Mapping[str, int],
    columns: pa.Schema,
    *,
    pairs: bool,
    notes: Sequence[str],
) -> str:
    """The text of README.md. rows: by split."""
    graph, config = described(folder)
    name, title = folder.path.name, "Preference pairs" if pairs else "Rollouts"
    node_names = {node["name"] for node in graph.get("nodes", ())}
    head = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in rows:
        head += [f"  - split: {split}", f"    path: {json.dumps(f'data/{split}-*.parquet')}"]
    head += ["tags:", "- reinforcement-learning", "- dataflow-rl", "---", ""]
    lines = [
        f"# {title} of {_text(name)}",
        "",
        (
            "Written by `dataflow export` from a run of the graph"
            f" `{_code(graph.get('name', '?'))}`,"
            f" {', '.join(f'{count:,} rows {split}' for split, count in rows.items())}."
        ),
        "",
        *(f"- {_text(note)}" for note in notes),
        *([""] if notes else []),
        "```python",
        "from datasets import load_dataset",
        "",
        'data = load_dataset("PATH/OF/THIS/FOLDER")',
        "```",
        "",
        (
            f"Seed {config.get('seed')}, bound of staleness"
            f" {_text(json.dumps(config.get('max_staleness')))}."
        ),
        "",
        "| column | type | is |",
        "|---|---|---|",
    ]
    for column in columns:
        default = (
            f"what '{column.name}' made"
            if column.name in node_names
            else "of the prompts, or added by an operator"
        )
        meaning = _SAID.get(column.name, default)
        lines.append(f"| `{_code(column.name)}` | `{_code(column.type)}` | {_text(meaning)} |")
    if "untrained" in rows:
        lines += [
            "",
            (
                "A run keeps rollouts of dropped groups for a while only: `untrained` has those"
                " that were still there, and those in flight, without the columns that scorers"
                " would have added."
            ),
        ]
    return "\n".join([*head, *lines]) + "\n"


def _code(text: object) -> str:
    """Within backquotes in a cell of a table."""
    return clean(text).replace("`", "'").replace("|", "\\|")


def _text(text: object) -> str:
    """Text that is no markup."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in clean(text))


# Preference pairs: of each group the best rollout and the worst, by a figure; and how many groups
# had none.

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
        column.name
        for column in schema
        if pa.types.is_floating(column.type)
        or pa.types.is_integer(column.type)
        or pa.types.is_boolean(column.type)
    ]
    if by not in figures:
        raise RunError(
            f"pairs are made by a figure of each rollout, but '{by}' is none; give --by one of"
            f" {sorted(figures)}"
        )
    return [*_NEEDED, by]


def chosen_and_rejected(rows: Iterable[Mapping[str, Any]], by: str) -> tuple[Any, Any] | str:
    """The best of a group, the first of several, and the worst; or why there is no pair: the name
    in `Left`.
    """
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
            pairs: list[dict[str, Any]] = []
            for row in batch.to_pylist():
                if self._open and _group(self._open[0]) != _group(row):
                    pairs += self._ended()
                self._open.append(row)
            if pairs:
                yield pa.RecordBatch.from_pylist(pairs, SCHEMA)
        if last := self._ended():
            yield pa.RecordBatch.from_pylist(last, SCHEMA)

    def _ended(self) -> list[dict[str, Any]]:
        """The pair of the group that is complete, if it gives one."""
        rows, self._open = self._open, []
        if not rows:
            return []
        pair = chosen_and_rejected(rows, self.by)
        if isinstance(pair, str):
            setattr(self.left, pair, getattr(self.left, pair) + 1)
            return []
        self.left.pairs += 1
        best, worst = pair
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


# A data set on the disk: Parquet files that are written a batch at a time, in a folder that is
# there whole or not.

THEN = "or name another place with --out: nothing is left at it"
"""What to do where a disk is full."""
GROUP_BYTES = 32 << 20
"""Of rows that are held before they are written as one row group."""
SHARD_BYTES = 512 << 20
"""Of a file, after which the next is begun."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which is at `out` when the block ends well, and nowhere when it does not.

    A process that is killed leaves what it had under a hidden name beside it. Errors: RunError
    where something stands there; RunFolderError.
    """
    refuse_existing(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with disk("making", partial, THEN):
            partial.mkdir(parents=True)
        yield partial
        refuse_existing(out)
        with disk("putting in place", out, THEN):
            for path in (*partial.rglob("*"), partial):
                flush_to_disk(path)
            partial.rename(out)
            flush_to_disk(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_existing(out: Path) -> None:
    """Errors: RunError where something stands at `out`."""
    if out.exists() or out.is_symlink():
        raise RunError(
            f"'{out}' is there already, and nothing is written over; name another place with --out"
        )


class ExportShards:
    """The files of one split: <folder>/<split>-00000.parquet and so on.

    consumes: batches of one schema
    produces: files
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, split: str, schema: pa.Schema, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder, self._split, self._schema, self._shard_bytes = (
            folder,
            split,
            schema,
            shard_bytes,
        )
        self._batches: list[pa.RecordBatch] = []
        self._batch_bytes, self._files = 0, 0
        self._file: BinaryIO | None = None
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0
        """That it was given."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Errors: RunFolderError."""
        for batch in batches:
            for piece in _pieces(batch):
                self._batches.append(piece)
                self._batch_bytes += piece.nbytes
                self.rows += piece.num_rows
                if self._batch_bytes >= GROUP_BYTES:
                    self._flush()

    def close(self) -> None:
        """The last file is whole. Errors: RunFolderError."""
        self._flush()
        self._end()

    def abort(self) -> None:
        """Let go of the file, whatever state it is in."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException, RunFolderError):
            self._end()

    def _flush(self) -> None:
        if not self._batches:
            return
        with disk("writing", self._folder, THEN):
            if self._writer is None:
                path = self._folder / f"{self._split}-{self._files:05d}.parquet"
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = path.open("xb")
                self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")
                self._files += 1
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
            self._batches, self._batch_bytes = [], 0
            if self._file is not None and self._file.tell() >= self._shard_bytes:
                self._end()

    def _end(self) -> None:
        writer, file = self._writer, self._file
        self._writer = self._file = None
        with disk("writing", self._folder, THEN), contextlib.ExitStack() as stack:
            if file is not None:
                # which writes what it holds: the disk may refuse that too
                stack.callback(file.close)
            if writer is not None:
                writer.close()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices of a batch that are not much larger than a row group."""
    count = max(1, -(-batch.nbytes // GROUP_BYTES))
    rows = max(1, -(-batch.num_rows // count))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


UNTRAINED = "untrained"
"""The split of what was dropped, or is in flight, as far as it is kept."""
PARQUET, HF = "parquet", "hf"


def export(
    folder: RunFolder, to: str, out: Path, *, pairs: bool = False, by: str = REWARD
) -> tuple[Mapping[str, int], Sequence[str]]:
    """Write a data set at `out`: all of it, or nothing. Gives its rows by split, and what is not in
    it, and why.

    to: "parquet": files alone; "hf": with a card, so that `datasets.load_dataset(out)` reads it.
    pairs: of each trained group the best and the worst by `by`. Errors: RunError where there is
    nothing to write, or something stands there; RunFolderError for a full disk or a damaged
    file.
    """
    if to not in (PARQUET, HF):
        raise RunError(
            f"a run is exported to {PARQUET} or {HF}, but got {to!r}; give one of the two"
        )
    refuse_existing(out)
    files, notes = parts_of(folder)
    trained = [part for part in files if part.outcome == TRAINED]
    with new_folder(out) as partial:
        data = partial / "data" if to == HF else partial
        if pairs:
            pairing = Pairing(by)
            rows = _written(data, {"pairs": _pairs(trained, pairing, by)}, {"pairs": SCHEMA})
            notes += [f"left out: {pairing.left}"] if str(pairing.left) else []
            schema = SCHEMA
        else:
            schema = rollout_schema(files)
            schema = _schema_with(schema, folder)
            evaluated = [part for part in files if part.outcome == EVALUATED]
            rows = _written(
                data,
                {
                    TRAINED: rollout_batches(trained, schema),
                    EVALUATED: rollout_batches(evaluated, schema),
                    UNTRAINED: (conform(batch, schema, {}) for batch in untrained_batches(folder)),
                },
                dict.fromkeys((TRAINED, EVALUATED, UNTRAINED), schema),
            )
        if not any(rows.values()):
            why = "; ".join(["no group gave a pair" if pairs else "no rollouts", *notes])
            raise RunError(
                f"'{folder.path.name}' has nothing to export: {why};"
                " look at it with dataflow list and dataflow verify"
            )
        if to == HF:
            text = card(
                folder,
                rows,
                schema,
                pairs=pairs,
                notes=notes,
            )
            with disk("writing", partial, THEN):
                (partial / "README.md").write_text(text, encoding="utf-8")
    return rows, notes


def _pairs(trained: list[Part], pairing: Pairing, by: str) -> Iterator[pa.RecordBatch]:
    if not trained:
        return iter(())
    columns = {*columns_of(rollout_schema(trained), by), "source", "step"}
    return pairing.of(rollout_batches(trained, columns=columns))


def _schema_with(schema: pa.Schema, folder: RunFolder) -> pa.Schema:
    """The columns of trained and evaluated rollouts, and those of untrained ones where no others
    are there.
    """
    if len(schema) > len(with_added([])):
        return schema
    first = next(untrained_batches(folder), None)
    return schema if first is None else first.schema


def _written(
    data: Path, splits: Mapping[str, Iterable[pa.RecordBatch]], schemas: Mapping[str, pa.Schema]
) -> dict[str, int]:
    """Rows by split, without those that have none."""
    rows = {}
    for split, batches in splits.items():
        shards = ExportShards(data, split, schemas[split])
        with contextlib.ExitStack() as stack:
            stack.callback(shards.abort)
            shards.write(batches)
            shards.close()
        if shards.rows:
            rows[split] = shards.rows
    return rows
