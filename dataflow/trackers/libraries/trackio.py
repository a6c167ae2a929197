"""Trackio: a local database, or a Space, that `trackio show` opens."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dataflow.trackers.tracker import RolloutTable, StepFigures, TrackedRun, Tracker, check_room


@dataclass(kw_only=True, eq=False)
class TrackioTracker(Tracker):
    """Figures by step, rollouts as tables, knobs and edges as config. A step that came out
    otherwise is logged once more under its number; Trackio keeps both rows.
    """

    project: str = ""
    """Empty: TRACKIO_PROJECT, or the graph's name."""
    space_id: str = ""
    """Of a Hugging Face Space that is to show it; empty: TRACKIO_SPACE_ID, or this machine
    alone."""

    settles_s: ClassVar[float] = 2.0
    packages: ClassVar[Sequence[str]] = ("trackio",)
    extra: ClassVar[str] = "trackio"

    def start(self, run: TrackedRun) -> str:
        """Begin the run there, or go on with the one of that name."""
        import trackio
        from trackio.utils import TRACKIO_DIR

        self._folder = Path(TRACKIO_DIR)
        check_room(self._folder)
        self._trackio: Any = trackio
        wanted = self.project or os.environ.get("TRACKIO_PROJECT") or str(run.graph.get("name"))
        project = run.kept.setdefault("project", wanted)
        space = self.space_id or os.environ.get("TRACKIO_SPACE_ID") or None
        self._run: Any = trackio.init(
            project=project,
            name=run.name,
            space_id=space,
            config={**run.knobs, "edges": run.edges},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return (
            f"trackio show --project {project}"
            if space is None
            else f"https://huggingface.co/spaces/{space}"
        )

    def log(self, figures: StepFigures) -> None:
        """A row."""
        check_room(self._folder)
        self._trackio.log(dict(figures.numbers), step=figures.step)

    def rollouts(self, table: RolloutTable) -> None:
        """A table."""
        trackio_table = self._trackio.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows]
        )
        self._trackio.log({"rollouts": trackio_table}, step=table.step)

    def close(self) -> None:
        """Write what is left."""
        self._trackio.finish()

    def finish(self, outcome: str) -> None:
        """Write what is left."""
        self._trackio.finish()
