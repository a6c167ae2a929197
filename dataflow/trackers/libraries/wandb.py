"""Weights & Biases: one run there for one run folder, online or offline."""

import contextlib
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dataflow.trackers.tracker import RolloutTable, StepFigures, TrackedRun, Tracker, check_room

STEP = "step"
FLUSH_S = 1.0
"""Between two writes of its file; its own default is 15."""
_FLUSH = "x_transaction_log_flush_interval"
"""A setting that versions before 0.31 lack: they write when 32 KiB are full."""


@dataclass(kw_only=True, eq=False)
class WandbTracker(Tracker):
    """Figures over `step`, rollouts as tables, knobs as config, the graph as a picture. A step that
    came out otherwise is logged once more: W&B only appends, and shows the later value.
    """

    project: str = ""
    """Empty: WANDB_PROJECT, or the graph's name."""
    entity: str = ""
    """Empty: WANDB_ENTITY, or the user's own."""
    mode: str = ""
    """online | offline | shared; empty: WANDB_MODE; where that is empty too and nobody has logged
    in, offline."""

    settles_s: ClassVar[float] = FLUSH_S + 1.0
    packages: ClassVar[Sequence[str]] = ("wandb",)
    extra: ClassVar[str] = "wandb"

    def start(self, run: TrackedRun) -> str:
        """Begin the run there, or go on with it under its id."""
        import wandb

        self._wandb, self._folder = wandb, run.folder / "wandb"
        check_room(self._folder)
        named = f"{run.name} {run.config.get('begun')}"  # the same also where a start was cut short
        run.kept.setdefault("id", hashlib.sha256(named.encode()).hexdigest()[:12])
        project = self.project or os.environ.get("WANDB_PROJECT") or str(run.graph.get("name"))
        run.kept.setdefault("project", project)
        run.kept.setdefault("entity", self.entity)
        mode: Any = self.mode or os.environ.get("WANDB_MODE", "")
        why = ""
        if not mode and not _has_key(wandb):
            mode, why = "offline", " (nobody has logged in: wandb login)"
        flush: dict[str, Any] = {_FLUSH: FLUSH_S} if _FLUSH in wandb.Settings.model_fields else {}
        if not flush:
            WandbTracker.settles_s = math.inf
        self._run: Any = wandb.init(
            project=run.kept["project"],
            entity=run.kept["entity"] or None,
            id=run.kept["id"],
            name=os.environ.get("WANDB_NAME") or run.name,
            dir=str(run.folder),
            resume="allow",
            mode=mode or None,
            config={**run.knobs, "edges": run.edges},
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                quiet=True,
                **flush,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if not run.goes_on and (run.folder / "graph.svg").is_file():
            picture = (run.folder / "graph.svg").read_text()
            self._run.log({STEP: 0, "graph": wandb.Html(picture, inject=False)})
        if self._run.offline:
            return (
                f"offline{why} in {run.folder / 'wandb'}; wandb sync"
                f" {run.folder / 'wandb'}/offline-run-* sends it"
            )
        return str(self._run.url)

    def log(self, figures: StepFigures) -> None:
        """A line of its history."""
        check_room(self._folder)
        self._run.log({STEP: figures.step, **figures.numbers})

    def rollouts(self, table: RolloutTable) -> None:
        """A table."""
        rows = [list(row) for row in table.rows]
        wandb_table = self._wandb.Table(
            columns=list(table.columns), data=rows, allow_mixed_types=True
        )
        self._run.log({STEP: table.step, "rollouts": wandb_table})

    def close(self) -> None:
        """Write what is left; until it goes on the run is shown as failed."""
        self._run.finish(exit_code=1)

    def finish(self, outcome: str) -> None:
        """End the run there; a failed one is shown as failed."""
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome in ("finished", "stopped") else 1)


def _has_key(wandb: Any) -> bool:
    with contextlib.suppress(Exception):  # of a library whose settings may be broken
        return bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    return False
