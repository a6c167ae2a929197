"""The operator of `join`: rows of several branches become one row again."""

import collections
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from dataflow.errors import RecordError
from dataflow.node import Operator
from dataflow.records import DROP_REASON, ERROR, GROUP_ID, ROLLOUT_ID
from dataflow.runtime import Batch, Context, Runtime

_ROOM = 4096


@dataclass(frozen=True, eq=False)
class Join(Operator):
    """Brings branches of one stream together again: rows of equal rollout_id become one row with
    all columns.
    """

    light: ClassVar[bool] = True

    def build(self, context: Context) -> Runtime:
        """The barrier between the branches."""
        return JoinRuntime(context)


class JoinRuntime(Runtime):
    """Holds the groups of each branch until all branches have delivered them.

    consumes: whole groups from every branch
    produces: whole groups with the columns of all branches; the first error of a row wins, and the
        first drop
    waits for: the slowest branch
    unblocked by: its rows
    """

    def __init__(self, context: Context) -> None:
        self._origins = context.graph.origins
        self._columns = context.graph.columns
        self._parts: dict[tuple[str, int], dict[str, tuple[pa.RecordBatch, Batch]]] = (
            collections.defaultdict(dict)
        )

    def room(self) -> int:
        """Bounded by the branches' own credit: a full branch must not keep the other one out."""
        return _ROOM

    def push(self, batch: Batch) -> None:
        """Cut the batch into its groups."""
        import pyarrow.compute as pc

        ids = batch.records.column(GROUP_ID)
        groups = pc.unique(ids).to_pylist()
        for group in groups:
            rows = batch.records.filter(pc.equal(ids, group))
            self._parts[batch.source, group][batch.origin] = (rows, batch)

    def work(self) -> list[Batch] | None:
        """All groups that every branch has delivered."""
        batches = []
        for source, group in [
            key for key, parts in self._parts.items() if len(parts) == len(self._origins[key[0]])
        ]:
            parts = self._parts.pop((source, group))
            batches.append(
                Batch(source, self._merge(source, [parts[o][0] for o in self._origins[source]]))
            )
            for _, batch in parts.values():
                batch.release(group)
        return batches or None

    def pending(self) -> int:
        """Groups that some branch has not delivered."""
        return len(self._parts)

    def _merge(self, source: str, parts: list[pa.RecordBatch]) -> pa.RecordBatch:
        import pyarrow.compute as pc

        ids = parts[0].column(ROLLOUT_ID)
        columns: dict[str, pa.Array] = {}
        for part in parts:
            if not part.column(ROLLOUT_ID).equals(ids):
                order = pc.index_in(ids, value_set=part.column(ROLLOUT_ID))
                if order.null_count or part.num_rows != parts[0].num_rows:
                    raise RecordError(
                        f"branches of '{source}' disagree on which rollouts a group has:"
                        f" {ids.to_pylist()[:4]}... and"
                        f" {part.column(ROLLOUT_ID).to_pylist()[:4]}...; an operator on one branch"
                        " adds or removes rows"
                    )
                part = part.take(order)
            for name in part.schema.names:
                if name in (ERROR, DROP_REASON) and name in columns:
                    columns[name] = pc.coalesce(columns[name], part.column(name))
                else:
                    columns.setdefault(name, part.column(name))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
