"""What became of rollouts beside those that have their scores: which failed, by cause, and to which a scorer does not
apply."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dataflow.records import DROP_REASON, ERROR
from dataflow.scoring.failure import counted


@dataclass
class Outcomes:
    """Rollouts that were counted."""

    failed: Counter[str] = field(default_factory=Counter)
    """By node and cause, as `judge: hung`."""
    does_not_apply: Counter[str] = field(default_factory=Counter)
    """By scorer."""

    def add(self, groups: Iterable[pa.RecordBatch], scores: Iterable[str]) -> None:
        """Count the rows of some groups. scores: the columns of scorers; what a filter dropped was not scored."""
        for rows in groups:
            names = rows.schema.names
            good = np.ones(rows.num_rows, bool)
            if ERROR in names and rows.column(ERROR).null_count < rows.num_rows:
                good &= rows.column(ERROR).is_null().to_numpy(zero_copy_only=False)
                self.failed.update(counted(rows.column(ERROR).to_pylist()))
            if DROP_REASON in names and rows.column(DROP_REASON).null_count < rows.num_rows:
                continue
            for name in scores:
                if name in names and rows.column(name).null_count:
                    missing = rows.column(name).is_null().to_numpy(zero_copy_only=False)
                    self.does_not_apply[name] += int((missing & good).sum())

    def __add__(self, other: "Outcomes") -> "Outcomes":
        """Those of both."""
        return Outcomes(self.failed + other.failed, self.does_not_apply + other.does_not_apply)

    def figures(self) -> dict[str, dict[str, int]]:
        """For metrics.jsonl, the most frequent first."""
        return {"failed": dict(self.failed.most_common()), "does_not_apply": dict((+self.does_not_apply).most_common())}
