"""What a run's files say as Arrow: rollouts batch by batch, steps, evaluations and faults; series
of figures, and those that are told beside the figures of another run.
"""

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.folder.arrow_reading import arrow_schema, stream_arrow
from dataflow.folder.faults import read_faults, restarts
from dataflow.folder.finished import File
from dataflow.folder.run_folder import RunFolder
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.history.summary import window_of
from dataflow.records import DROP_REASON, OF_SOURCE, VERSIONS
from dataflow.runs.which import TRAINED, Part, check_trainer, fates_of, leaders_of, trainers_of
from dataflow.system.files import RunFolderError
from dataflow.tokens.ragged import group_slices, staleness_at, staleness_parts
from dataflow.worker.kept_counts import ENDS, UNITS, known_edges

OUTCOME, NODE, SOURCE, STEP, STALENESS = "outcome", "node", "source", "step", "staleness"
GENERATING, WAITING = "staleness_generating", "staleness_waiting"
ADDED: Mapping[str, pa.DataType] = {
    OUTCOME: pa.string(),  # trained | evaluated | dropped | in flight
    NODE: pa.string(),  # the trainer or evaluation
    SOURCE: pa.string(),
    STEP: pa.int64(),  # that trained it, or after which it was evaluated
    # versions that its oldest token was behind, where it was trained; of these were made
    STALENESS: pa.int64(),
    GENERATING: pa.int64(),  # while it was generated
    WAITING: pa.int64(),  # while it waited to be trained
}
"""Columns that a rollout gets here, in front of its own; `drop_reason` stands behind them."""
EVAL = "eval_accuracy"
Point = tuple[float, float]


def rollout_schema(parts: Iterable[Part], columns: Collection[str] | None = None) -> pa.Schema:
    """The columns of all these files together. Errors: RunFolderError where two have one of
    different types.
    """
    merged: pa.Schema = pa.schema([])
    for part in parts:
        try:
            schema = arrow_schema(part.path)
        except RunFolderError:
            if part.path.exists():
                raise
            continue
        if schema.metadata is not None:
            schema = schema.remove_metadata()
        if schema == merged:
            continue
        try:
            merged = pa.unify_schemas([merged, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise RunFolderError(
                f"'{part.path.name}' has other types than the files before it: {error}; export the"
                " steps before and after it apart"
            ) from error
    return with_added(
        [field for field in merged if columns is None or field.name in columns], columns
    )


def with_added(fields: Iterable[pa.Field], columns: Collection[str] | None = None) -> pa.Schema:
    """The columns that are added here, then these."""
    own = [field for field in fields if field.name not in (*ADDED, OF_SOURCE)]
    added = [
        pa.field(name, kind) for name, kind in ADDED.items() if columns is None or name in columns
    ]
    if all(field.name != DROP_REASON for field in own) and (
        columns is None or DROP_REASON in columns
    ):
        own.append(pa.field(DROP_REASON, pa.string()))
    return pa.schema([*added, *own])


def rollout_batches(
    parts: Sequence[Part], schema: pa.Schema | None = None, columns: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rollouts of these files, in order, a batch at a time; a file that the run has removed
    since is passed over.

    schema: as `rollout_schema` has it. columns: only these. Errors: RunFolderError for a damaged
    file.
    """
    schema = schema or rollout_schema(parts, columns)
    names = None if columns is None else {*columns, VERSIONS, OF_SOURCE}
    for part in parts:
        try:
            for batch in stream_arrow(part.path, names):
                yield conform(batch, schema, _facts(part, batch))
        except RunFolderError:
            if part.path.exists():
                raise


def _facts(part: Part, batch: pa.RecordBatch) -> dict[str, Any]:
    """What is known of the rows of a file beside what stands in it."""
    ages: dict[str, Any] = dict.fromkeys((STALENESS, GENERATING, WAITING))
    if part.outcome == TRAINED and VERSIONS in batch.schema.names:
        versions = batch.column(VERSIONS)
        counts = staleness_at(part.step, versions), *staleness_parts(part.step, versions)
        ages = dict(zip(ages, counts, strict=True))
    source = batch.column(OF_SOURCE) if OF_SOURCE in batch.schema.names else part.source
    return {OUTCOME: part.outcome, NODE: part.node or None, SOURCE: source, STEP: part.step, **ages}


def conform(batch: pa.RecordBatch, schema: pa.Schema, facts: Mapping[str, Any]) -> pa.RecordBatch:
    """The rows with the columns of a schema: their own, these facts, and null for what they
    lack.
    """
    arrays = []
    for field in schema:
        if field.name in facts:
            value = facts[field.name]
            arrays.append(
                value
                if isinstance(value, pa.Array)
                else _repeated(value, batch.num_rows, field.type)
            )
        elif field.name in batch.schema.names:
            arrays.append(batch.column(field.name).cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _repeated(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)


def untrained_batches(folder: RunFolder) -> Iterator[pa.RecordBatch]:
    """Rollouts that generators have finished and that are still kept beside them: of groups that
    were dropped, with the reason, and of those in flight. The columns that scorers add are not
    there yet.
    """
    groups_by_source: dict[str, set[int]] = {}
    for path in sorted((folder.path / "finished").glob("*/*.arrows")):
        source = path.name.partition(".")[2].removesuffix(".arrows")
        groups = groups_by_source.setdefault(source, set())
        for batch in File(path).read():
            slices = [
                group_slice for group_slice in group_slices(batch) if group_slice[0] not in groups
            ]
            groups |= {group for group, _, _ in slices}
            fates = fates_of(folder, source, [group for group, _, _ in slices])
            for group, first, count in slices:
                if group in fates:
                    outcome, reason, step = fates[group]
                    rows = batch.slice(first, count)
                    facts = {OUTCOME: outcome, NODE: None, SOURCE: source, STEP: step}
                    facts |= dict.fromkeys((STALENESS, GENERATING, WAITING)) | {DROP_REASON: reason}
                    yield conform(rows, with_added(rows.schema), facts)


@dataclass(frozen=True)
class Lines:
    """Lines of metrics.jsonl that count."""

    steps: list[dict[str, Any]]
    """Of one trainer."""
    evaluations: list[dict[str, Any]]


def read_lines(folder: RunFolder, trainer: str | None = None) -> Lines:
    """Those of a run. trainer: whose steps; None: of the one that leads. Errors: RunError for one
    that it has not.
    """
    graph, config = described(folder)
    if trainer is None:
        trainer = next(iter(leaders_of(graph, config)), None)
    else:
        check_trainer(trainer, trainers_of(graph, config))
    lines = folder.read_metrics()
    steps = [
        line
        for line in lines
        if "step" in line
        and EVAL not in line
        and (trainer is None or line.get("node", trainer) == trainer)
    ]
    return Lines(steps, [line for line in lines if EVAL in line])


def series(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """(step, figure) of the lines that have this figure, ascending."""
    points: dict[float, float] = {}
    for line in lines:
        step, value = line.get("step"), line.get(name)
        if _is_number(step) and _is_number(value):
            points[float(step)] = float(value)  # type: ignore[arg-type]
    return sorted(points.items())


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
    )


def table_of(lines: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Lines of JSON as a table, a column for each name: numbers, booleans and text as they are, all
    else as JSON.
    """
    names = list(dict.fromkeys(name for line in lines for name in line))
    return pa.table({name: _column([line.get(name) for line in lines]) for name in names})


def _column(values: Sequence[Any]) -> pa.Array:
    present = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in present):
        return pa.array(values, pa.bool_())
    if all(
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
        for value in present
    ):
        return pa.array(values, pa.int64())
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [
        value if value is None or isinstance(value, str) else json.dumps(value) for value in values
    ]
    return pa.array(texts, pa.string())


def edge_table(folder: RunFolder) -> pa.Table:
    """What has crossed each data edge, from times.json."""
    rows = [
        {
            "edge": edge,
            **{
                f"{end}_{unit}": count
                for end in ENDS
                for unit, count in zip(UNITS, ends[end], strict=True)
            },
        }
        for edge, ends in known_edges(folder.read_json("times.json", TIMES).get("edges")).items()
    ]
    fields = [pa.field(f"{end}_{unit}", pa.int64()) for end in ENDS for unit in UNITS]
    return pa.Table.from_pylist(rows, pa.schema([pa.field("edge", pa.string()), *fields]))


def fault_lines(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of faults.jsonl: ends of workers that the run did not ask for."""
    return read_faults(folder.path, folder.extras.tell)


# The figures of a run that are told beside those of another: from its lines and times.


@dataclass(frozen=True)
class Course:
    """How one figure went."""

    first: float
    last: float
    best: float
    steps: int = 1
    """That each of them is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Those of one run; None: not known."""

    steps: int
    seconds: float | None
    """Of training."""
    step_s: float | None
    """Median seconds from one step to the next, without the first tenth."""
    rollouts: int
    rollouts_per_s: float | None
    tokens_per_s: float | None
    """Trained, the median of the steps without the first tenth."""
    accuracy: Course | None
    reward: Course | None
    """Means over the first and the last steps, as many as `window_of` says; the best running
    one."""
    loss: Course | None
    """The same; the best is the least."""
    staleness_mean: float | None
    staleness_max: float | None
    efficiency: float | None
    """Share of the seconds in which what bounds the run was at work."""
    bounded_by: str
    """The node that bounds it."""
    dropped: int
    """Groups."""
    faults: int
    restarts: int


def figures_of(folder: RunFolder, lines: Lines, window: int | None = None) -> Figures:
    """Those of the run in a folder. lines: as `read_lines` has them. window: as for `figures`."""
    times = folder.read_json("times.json", TIMES)
    return figures(
        lines.steps,
        lines.evaluations,
        times,
        described(folder)[1],
        faults=len(fault_lines(folder)),
        restarts=restarts(folder.path),
        window=window,
    )


def figures(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    times: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    faults: int = 0,
    restarts: int = 0,
    window: int | None = None,
) -> Figures:
    """From lines of metrics.jsonl, times.json and config.json.

    window: steps of a mean at begin and end, the same for runs that are compared; None: `window_of`
    these steps.
    """
    window = window_of(len(steps)) if window is None else window
    full = steps[len(steps) // 10 :]
    # From one step to the next: a run that was resumed, or made steps again, has gaps.
    ends = [value for _, value in series(full, "seconds")]
    pauses = [after - before for before, after in pairwise(ends) if after > before]
    seconds = times.get("seconds") or None
    rollouts = sum(int(value) for _, value in series(steps, "rollouts"))
    bound = bounded(
        seconds, times.get("busy_seconds") or {}, times.get("beside_seconds") or {}, config
    )
    accuracy = [value for _, value in series(evaluations, "eval_accuracy")]
    stale = [value for _, value in series(steps, "staleness_mean")]
    return Figures(
        steps=len(steps),
        seconds=seconds,
        step_s=statistics.median(pauses) if pauses else None,
        rollouts=rollouts,
        rollouts_per_s=rollouts / seconds if seconds and rollouts else None,
        tokens_per_s=_median([value for _, value in series(full, "trained_tokens_per_s")]),
        accuracy=Course(accuracy[0], accuracy[-1], max(accuracy)) if accuracy else None,
        reward=_course([value for _, value in series(steps, "reward_mean")], max, window),
        loss=_course([value for _, value in series(steps, "loss")], min, window),
        staleness_mean=statistics.fmean(stale) if stale else None,
        staleness_max=max((value for _, value in series(steps, "staleness_max")), default=None),
        efficiency=bound.share if bound else None,
        bounded_by=bound.node if bound else "",
        dropped=sum(_count(line.get("dropped")) for line in steps),
        faults=faults,
        restarts=restarts,
    )


def _course(values: Sequence[float], best: Any, window: int) -> Course | None:
    if not values:
        return None
    window = min(window, len(values))
    means = [
        statistics.fmean(values[at : at + window])
        for at in range(0, len(values) - window + 1, window)
    ]
    last = statistics.fmean(values[-window:])
    return Course(statistics.fmean(values[:window]), last, best([*means, last]), window)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _count(dropped: Any) -> int:
    return (
        sum(value for value in dropped.values() if isinstance(value, int))
        if isinstance(dropped, dict)
        else 0
    )
