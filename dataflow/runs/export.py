"""`dataflow export`: a run's rollouts, or pairs of them, as a data set of Parquet files, with a
bounded memory."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.card import CardColumn, card
from dataflow.runs.pairs import REWARD, SCHEMA, Pairing, columns_of
from dataflow.runs.shards import THEN, ExportShards, new_folder, refuse_existing
from dataflow.runs.tables import (
    conform,
    rollout_batches,
    rollout_schema,
    untrained_batches,
    with_added,
)
from dataflow.runs.which import EVALUATED, TRAINED, Part, parts_of
from dataflow.system.files import disk

UNTRAINED = "untrained"
"""The split of what was dropped, or is in flight, as far as it is kept."""
PARQUET, HF = "parquet", "hf"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    rows: Mapping[str, int]
    """By split."""
    notes: tuple[str, ...] = field(default=())
    """What is not in it, and why."""


def export(
    folder: RunFolder, to: str, out: Path, *, pairs: bool = False, by: str = REWARD
) -> Exported:
    """Write a data set at `out`: all of it, or nothing.

    to: "parquet": files alone; "hf": with a card, so that `datasets.load_dataset(out)` reads it.
    pairs: of each trained group the best and the worst by `by`. Errors: RunError where there is
    nothing to write, or something stands there; RunFolderError for a full disk or a damaged
    file."""
    if to not in (PARQUET, HF):
        raise RunError(
            f"a run is exported to {PARQUET} or {HF}, but got {to!r}; give one of the two"
        )
    refuse_existing(out)
    found = parts_of(folder)
    trained = [part for part in found.files if part.outcome == TRAINED]
    notes = list(found.notes)
    with new_folder(out) as made:
        data = made / "data" if to == HF else made
        if pairs:
            pairing = Pairing(by)
            rows = _written(data, {"pairs": _pairs(trained, pairing, by)}, {"pairs": SCHEMA})
            notes += [f"left out: {pairing.left}"] if str(pairing.left) else []
            schema = SCHEMA
        else:
            schema = rollout_schema(found.files)
            schema = _schema_with(schema, folder)
            evaluated = [part for part in found.files if part.outcome == EVALUATED]
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
            raise RunError(
                f"'{folder.path.name}' has nothing to export:"
                f" {'no group gave a pair' if pairs else 'no rollouts'}{'; ' + '; '.join(notes) if notes else ''};"
                " look at it with dataflow list and dataflow verify"
            )
        if to == HF:
            text = card(
                folder,
                rows,
                [CardColumn(each.name, str(each.type)) for each in schema],
                pairs=pairs,
                notes=notes,
            )
            with disk("writing", made, THEN):
                (made / "README.md").write_text(text, encoding="utf-8")
    return Exported(folder=out, rows=rows, notes=tuple(notes))


def _pairs(trained: list[Part], pairing: Pairing, by: str) -> Iterator[pa.RecordBatch]:
    if not trained:
        return iter(())
    columns = {*columns_of(rollout_schema(trained), by), "source", "step"}
    return pairing.of(rollout_batches(trained, columns=columns))


def _schema_with(schema: pa.Schema, folder: RunFolder) -> pa.Schema:
    """The columns of trained and evaluated rollouts, and those of untrained ones where no others
    are there."""
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
