"""`Run("runs/latest")`: a run's folder as tables, while the run goes on or when it has ended."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.runs import tables
from dataflow.runs.notebook import html_of
from dataflow.runs.state import state_of
from dataflow.runs.which import parts_of


class Run:
    """A run, seen from its folder, which is read anew by each call and never written.

    Tables are pyarrow's: `.to_pandas()` where pandas is installed, `polars.from_arrow(...)` where
    Polars is.

    >>> from dataflow import Graph, Run, inline, run
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))
    >>> result = run(g, on=inline(), steps=3, runs="runs", quiet=True)
    >>> seen = Run("runs/latest")
    >>> seen.state, seen.steps().num_rows, seen.rollouts(columns=["step", "completion"]).num_rows
    ('finished', 3, 24)
    """

    def __init__(self, path: str | Path = "runs/latest") -> None:
        """path: the run folder. Errors: RunFolderError where there is none."""
        self.folder = RunFolder.open(path)
        """Its files."""

    def __repr__(self) -> str:
        return f"Run('{self.folder.path}')"

    def _repr_html_(self) -> str:
        return html_of(self.folder)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.path.name

    @property
    def state(self) -> str:
        """running | finished | stopped | died | unknown."""
        return state_of(self.folder).word

    @property
    def graph(self) -> Mapping[str, Any]:
        """Nodes with their knobs, and edges."""
        return described(self.folder)[0]

    @property
    def config(self) -> Mapping[str, Any]:
        """Command line, flags, plan and environment."""
        return described(self.folder)[1]

    def rollouts(
        self, columns: Collection[str] | None = None, trainer: str | None = None
    ) -> pa.Table:
        """All that was trained and evaluated, one row each: its columns, and outcome, node, source,
        step, staleness with both parts of it; `new_logprobs` of trained ones, whose importance
        ratios are exp(new_logprobs - logprobs).

        columns: only these, which saves memory; None: all. trainer: whose steps; None: of all that
        lead. Errors: RunFolderError for a damaged file.
        """
        parts, _ = parts_of(self.folder, trainer=trainer)
        schema = tables.rollout_schema(parts, columns)
        return pa.Table.from_batches(tables.rollout_batches(parts, schema, columns), schema)

    def rollout_batches(
        self, columns: Collection[str] | None = None, trainer: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same, a batch at a time, for runs that are larger than memory."""
        parts, _ = parts_of(self.folder, trainer=trainer)
        return tables.rollout_batches(parts, columns=columns)

    def untrained(self) -> pa.Table:
        """Finished rollouts that are still kept of groups in flight, and of dropped ones, with the
        reason.
        """
        batches = list(tables.untrained_batches(self.folder))
        schema = (
            pa.unify_schemas([batch.schema for batch in batches])
            if batches
            else tables.with_added([])
        )
        return pa.Table.from_batches(
            [tables.conform(batch, schema, {}) for batch in batches], schema
        )

    def steps(self, trainer: str | None = None) -> pa.Table:
        """A row for each step: what metrics.jsonl says. trainer: whose; None: of the one that
        leads.
        """
        return tables.table_of(tables.read_lines(self.folder, trainer).steps)

    def evaluations(self) -> pa.Table:
        """A row for each evaluation."""
        return tables.table_of(tables.read_lines(self.folder).evaluations)

    def edges(self) -> pa.Table:
        """A row for each data edge: what has crossed it so far, counted where it begins
        (`sent_...`) and where it ends (`received_...`), and what its sender was told is done with
        (`acknowledged_...`): batches, rows, bytes.
        """
        return tables.edge_table(self.folder)

    def faults(self) -> pa.Table:
        """A row for each end of a worker that the run did not ask for."""
        return tables.table_of(tables.fault_lines(self.folder))
