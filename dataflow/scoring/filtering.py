"""The runtime of a filter: scores groups with True or False, and writes its name where it is
False."""

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.records import DROP_REASON
from dataflow.runtime import Context
from dataflow.scoring.callers import caller_of
from dataflow.scoring.knobs import ScorerKnobs
from dataflow.scoring.runtime import Scoring


def build(keep: ScorerKnobs[..., bool], context: Context) -> "Filtering":
    """The runtime of a filter; forks its pool's server where it is isolated."""
    return Filtering(keep, context, caller_of(keep))


class Filtering(Scoring):
    """Passes every group on, with `drop_reason` set on those that its function dropped.

    consumes, produces, waits for, unblocked by: as Scoring. Rows are not made smaller: a dropped
    group's next stop is the trainer, and it must fit the same schema there.
    """

    def _written(self, records: pa.RecordBatch, scores: pa.Array) -> pa.RecordBatch:
        is_dropped = pc.fill_null(pc.invert(scores), False)
        reasons = pc.if_else(is_dropped, self._scorer.name, pa.scalar(None, pa.string()))
        at = records.schema.get_field_index(DROP_REASON)
        if at < 0:
            return records.append_column(DROP_REASON, reasons)
        return records.set_column(at, DROP_REASON, pc.coalesce(records.column(at), reasons))
