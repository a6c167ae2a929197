"""Writes down what the trainer did: rollouts file, ledger, metrics.

The order after an update, and what a crash between two of its points leaves:

| crash after | ledger | weights that readers may have | what the next start does |
|---|---|---|---|
| the update | m | m | goes on from m; the step's groups were not acknowledged and come again |
| its rollouts file | m | m | the same; the file is written anew |
| its commit in the ledger | m + 1 | m | makes step m + 1 again from its file and publishes it |
| publishing | m + 1 | m + 1 | the same: the weights of m + 1 are those that readers have |
| its line of metrics | m + 1 | m + 1 | the same; a missing line is written from the ledger |
| its acknowledgements | m + 1 | m + 1 | the same; groups that come again are acknowledged |
| half a checkpoint | m + 1 | m + 1 | takes the newest with a commit marker and undamaged files |
| a checkpoint's marker | m + 1 | m + 1 | takes it, whether the ledger knows of it or not |
| a marker, before the temporary checkpoint goes | m + 1 | m + 1 | the same; the next removes both |
| half of a return to an earlier step | m + 1, or that one | m + 1 | begins the transaction again |

The next start is `checkpoints.checkpoint.find_start`, then `steps.CatchUp`. So no reader ever has
a version that the ledger does not know. Drops are recorded with the step, or before it where they
are many, as those of the step under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import GraphError
from dataflow.rules import QueuedGroup
from dataflow.runtime import Context
from operators.training.steps import NewLogprobs

TOO_FEW = "too few for a step"
"""Why groups are dropped at the end of the rows."""


@dataclass
class Journal:
    """The trainer's hand in the run folder and the ledger; without them it writes nothing."""

    context: Context
    source: str

    def commit(
        self,
        step: int,
        trained: Sequence[QueuedGroup],
        dropped: Mapping[int, str],
        metrics: Mapping[str, Any],
        computed: NewLogprobs | None = None,
    ) -> None:
        """Record a step with the groups it trained, in order, and those given up since the last
        record. computed: of its tokens, kept beside them.

        The rollouts are written before the ledger names them.
        """
        context = self.context
        with context.span("record"):
            if context.folder is not None:
                groups = [group.records for group in trained]
                rows = groups if computed is None else computed.beside(groups)
                context.folder.rollouts_of(context.graph.own_folder).write(step, rows)
            if context.ledger is not None:
                context.ledger.commit_step(
                    context.node,
                    step,
                    version=step,
                    source=self.source,
                    trained=[group.group_id for group in trained],
                    dropped=dropped,
                    metrics=metrics,
                )

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Append a committed step's line to the metrics."""
        if self.context.folder is not None:
            self.context.folder.append_metrics(metrics)

    def drop(self, reasons: Mapping[int, str], step: int | None) -> None:
        """Record groups given up for the step under way, before it is committed; None: outside any
        step.
        """
        if reasons and self.context.ledger is not None:
            self.context.ledger.drop(self.context.node, self.source, reasons, step=step)


def only_source(context: Context) -> str:
    """Of the groups that a trainer takes in. GraphError where there are several, or none."""
    sources = list(context.graph.columns) or list(context.graph.bounds)
    if len(sources) != 1:
        raise GraphError(
            f"'{context.node}' trains groups in the order of one source, but {len(sources)} lead to"
            f" it: {sources}; apply it to one stream"
        )
    return sources[0]
