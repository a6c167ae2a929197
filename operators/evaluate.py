"""The sink of an evaluation: gathers a round of held-out groups and writes one line of metrics for
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import OperatorError
from dataflow.folder.finished import Finished
from dataflow.node import Sink, Traits
from dataflow.records import ERROR, GROUP_ID, MIN_VERSION, OF_SOURCE, ROUND_SIZE, VERSIONS
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.failure import counted
from dataflow.system.files import RunFolderError
from dataflow.tokens.ragged import group_slices


@dataclass(frozen=True, eq=False)
class Evaluate(Sink):
    """Reads held-out rollouts round by round; their mean score is `eval_accuracy` in metrics.jsonl.

    >>> from dataflow import Graph, Model
    >>> from operators import Evaluate, Generator, Prompts
    >>> from operators.rewards import find
    >>> g, generator = Graph("sums"), Generator(Model("policies/sums"))
    >>> rows = [{"prompt": "2+2=", "answer": "4"}]
    >>> held_out = Prompts(rows, columns=("answer",), name="held_out", group_size=1)
    >>> Evaluate(every_steps=50)(find("exact")(generator(g.source(held_out))))
    >>> g.check()
    """

    light: ClassVar[bool] = True

    _: KW_ONLY
    every_steps: int = 50
    """Steps of the trainer between rounds; there is one before the first step and after the last as
    well. Training does not wait: rounds that are due while one is running give way to the newest of
    them."""
    of: str = "reward"
    """Column whose mean is taken."""
    name: str = "eval"

    @property
    def traits(self) -> Traits:
        """When its rounds are due."""
        return Traits(every_steps=self.every_steps)

    def reads(self) -> Mapping[str, Any]:
        """The score, and the columns that identify rounds and failures."""
        return {self.of: float, VERSIONS: list[int], ERROR: str, MIN_VERSION: int, ROUND_SIZE: int}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults = []
        if (
            isinstance(self.every_steps, bool)
            or not isinstance(self.every_steps, int)
            or self.every_steps < 1
        ):
            faults.append(
                f"'{self.name}' has every_steps={self.every_steps!r}; give a whole number of 1 or"
                " more"
            )
        if not isinstance(self.of, str) or not self.of:
            faults.append(
                f"'{self.name}' has of={self.of!r}, which names no column; give one, such as"
                " 'reward'"
            )
        return faults

    def build(self, context: Context) -> Runtime:
        """Make the runtime."""
        return EvaluateRuntime(self, context)


@dataclass
class _Round:
    """Groups of one source in one round that have come so far."""

    size: int
    groups: dict[int, pa.RecordBatch]

    @property
    def is_complete(self) -> bool:
        return len(self.groups) == self.size


class EvaluateRuntime(Runtime):
    """Counts the groups of each round; a round has the prompts of every source that leads here.

    consumes: whole groups that carry min_version (the step evaluated) and round_size
    produces: per round a rollouts file, ledger entries, a line of metrics: after a crash before the
        ledger knows of it the next attempt writes the round again; after that it is closed for
        later attempts too, and the next one adds the line if it is missing
    waits for: the last group of a round
    unblocked by: its arrival

    What it acknowledges it has written down: a round may have more rows than may be under way on
    its edges, so they cannot wait for the outcome. An acknowledgement means that nobody ever needs
    the group again, for this attempt and for later ones; so it does not matter which of several
    issues of a prompt it answers.
    """

    def __init__(self, evaluate: Evaluate, context: Context) -> None:
        self._evaluate, self._context = evaluate, context
        self._rounds: dict[int, dict[str, _Round]] = {}
        recorded = None if context.ledger is None else context.ledger.last_round(context.node)
        self._recorded = -1 if recorded is None else recorded
        """Step of the last round of an earlier attempt."""
        self._closed: set[int] = set()
        self._last: dict[str, float | int | str] = {} if recorded is None else {"round": recorded}
        if recorded is not None:
            self._add_metrics(recorded)
        self._kept: dict[str, Finished] = {}
        """By source: what has come of rounds that are open."""
        if context.folder is not None and context.ledger is not None:
            files = context.folder.finished(context.node)
            for source in context.graph.columns:
                self._kept[source] = Finished(
                    files, source, replica=context.replica, attempt=context.life.attempt
                )
                self._find(
                    source,
                    [group.group_id for group in context.ledger.in_flight(source, context.node)],
                )

    def room(self) -> int:
        """As much as comes: a round is held whole."""
        return 1 << 20

    def push(self, batch: Batch) -> None:
        """Sort a batch's groups into their rounds, write new ones down, acknowledge the batch."""
        rows = batch.records
        slices = group_slices(rows)
        new = [
            group
            for group, first, count in slices
            if self._sort(batch.source, group, rows.slice(first, count))
        ]
        if new and batch.source in self._kept:
            is_new = pc.is_in(rows.column(GROUP_ID), pa.array(new, pa.int64()))
            self._kept[batch.source].append(rows.filter(is_new))
        batch.ack()

    def work(self) -> list[Batch] | None:
        """Close one complete round, the oldest first; None while none is complete."""
        for step in sorted(self._rounds):
            if self._is_complete(step):
                self._close(step, self._rounds.pop(step))
                return []
        return None

    def pending(self) -> int:
        """Groups of complete rounds; those of a round that will never be complete are owed
        nothing.
        """
        return sum(self._held(step) for step in self._rounds if self._is_complete(step))

    def status(self) -> dict[str, float | int | str]:
        """`round`: step of the last complete round; `eval_accuracy`: what it found; `queue`: groups
        held.
        """
        return {"queue": sum(self._held(step) for step in self._rounds), **self._last}

    def close(self) -> None:
        """Close the files of open rounds."""
        for file in self._kept.values():
            file.close()

    def _metrics(self, step: int, table: pa.Table) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {"step": step, "node": self._context.node, **round_metrics(table, self._evaluate.of)}

    def _add_metrics(self, step: int) -> None:
        """The line of a round that is recorded, where the attempt before had no time to write
        it.
        """
        context = self._context
        if context.folder is None or any(
            (line.get("node"), line.get("step")) == (context.node, step) and "eval_accuracy" in line
            for line in context.folder.read_metrics()
        ):
            return
        try:
            context.folder.append_metrics(
                self._metrics(
                    step, context.folder.rollouts_of(context.graph.own_folder).read_evaluation(step)
                )
            )
        except RunFolderError as error:
            context.log.warning(
                "a round has no line of metrics", node=context.node, step=step, error=str(error)
            )

    def _find(self, source: str, waiting: Sequence[int]) -> None:
        """What earlier attempts wrote down of these groups, which have no outcome."""
        self._kept[source].load(waiting)
        for group in waiting:
            rows = self._kept[source].find(group)
            if rows is not None:
                self._sort(source, group, rows)

    def _sort(self, source: str, group: int, rows: pa.RecordBatch) -> bool:
        """Put a group into its round; False where it is there already, or its round is closed."""
        size, step = rows.column(ROUND_SIZE)[0].as_py(), rows.column(MIN_VERSION)[0].as_py()
        if not size:
            raise OperatorError(
                f"'{self._context.node}' evaluates rounds, but group {group} of '{source}' is in"
                f" none (round_size {size}); give it prompts of their own, in a source of another"
                " name"
            )
        if step <= self._recorded or step in self._closed:
            return False
        of_source = self._rounds.setdefault(step, {}).setdefault(source, _Round(size, {}))
        return of_source.groups.setdefault(group, rows) is rows

    def _is_complete(self, step: int) -> bool:
        sources = self._rounds[step]
        return all(
            source in sources and sources[source].is_complete
            for source in self._context.graph.columns or sources
        )

    def _held(self, step: int) -> int:
        return sum(len(of_source.groups) for of_source in self._rounds[step].values())

    def _close(self, step: int, sources: dict[str, _Round]) -> None:
        context = self._context
        table = round_table(
            {
                source: [sources[source].groups[group] for group in sorted(sources[source].groups)]
                for source in sorted(sources)
            }
        )
        metrics = self._metrics(step, table)
        if context.folder is not None:
            context.folder.rollouts_of(context.graph.own_folder).write_evaluation(step, table)
        if context.ledger is not None:
            groups = {source: sorted(of_source.groups) for source, of_source in sources.items()}
            context.ledger.commit_round(context.node, step, groups)
        if context.folder is not None:
            context.folder.append_metrics(metrics)
        if (
            context.run.keep_steps is not None
            and context.folder is not None
            and context.ledger is not None
        ):
            from dataflow.folder import retention

            upto = step - max(1, context.run.keep_steps)
            retention.remove(
                context.folder,
                context.ledger,
                context.node,
                upto,
                kind="eval",
                log=context.log,
                own=context.graph.own_folder,
            )
        for source, file in self._kept.items():
            for group in sources[source].groups:
                file.forget(group)
            file.close()
        if metrics["eval_errors"]:
            context.log.warning(
                "evaluation has failures",
                node=context.node,
                step=step,
                errors=metrics["eval_errors"],
                of=table.num_rows,
                by_cause=metrics["eval_failed"],
            )
        self._closed.add(step)
        self._last = {"round": step}
        if metrics["eval_accuracy"] is not None:
            self._last["eval_accuracy"] = metrics["eval_accuracy"]


def round_table(rows: Mapping[str, Sequence[pa.RecordBatch]]) -> pa.Table:
    """The rows of a round, source by source. Of several sources each row names its own in
    `of_source`, as each counts its groups for itself; a column that a source lacks is null in its
    rows.
    """
    tables = {source: pa.Table.from_batches(batches) for source, batches in rows.items()}
    if len(tables) == 1:
        return next(iter(tables.values()))
    with_source = [
        table.append_column(OF_SOURCE, pa.repeat(source, len(table)))
        for source, table in tables.items()
    ]
    return pa.concat_tables(with_source, promote_options="permissive")


def round_metrics(table: pa.Table, of: str) -> dict[str, Any]:
    """What one round found: the mean of column `of` over the rows that have it, and how many have
    not.

    A row with an error is counted in eval_errors, and by its cause in eval_failed; one without a
    score, to which the scorer does not apply, in eval_does_not_apply. Neither is part of the mean,
    which is None when nothing is left. Versions are those of all tokens of the rows in the mean.
    """
    good = table.filter(pc.and_(pc.is_null(table.column(ERROR)), pc.is_valid(table.column(of))))
    errors = table.column(ERROR).drop_null().to_pylist()
    versions = pc.list_flatten(good.column(VERSIONS))
    versions = versions.filter(pc.greater_equal(versions, 0))
    return {
        "eval_accuracy": pc.mean(pc.cast(good.column(of), pa.float64())).as_py(),
        "eval_n": good.num_rows,
        "eval_errors": len(errors),
        "eval_failed": counted(errors),
        "eval_does_not_apply": table.num_rows - good.num_rows - len(errors),
        "eval_version_min": pc.min(versions).as_py(),
        "eval_version_max": pc.max(versions).as_py(),
    }
