"""MLflow: a run of an experiment, in a tracking server or a database beside the runs."""

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dataflow.system.files import to_json
from dataflow.trackers.tracker import RolloutTable, StepFigures, TrackedRun, Tracker

_MOST_METRICS, _MOST_PARAMS, _PARAM = 1000, 100, 6000
"""Of one request, and characters of a param: MLflow's own bounds."""
_TABLES = "mlflow.loggedArtifacts"
"""The tag by which its page knows tables."""
_MARK = "dataflow.run"
"""The tag by which a run is found again whose start was cut short."""


@dataclass(kw_only=True, eq=False)
class MlflowTracker(Tracker):
    """Metrics by step, knobs as params, the graph and rollouts as artifacts. A step that came out
    otherwise is logged once more at its number, with a later time: MLflow keeps both, and shows the
    later one.
    """

    uri: str = ""
    """Empty: MLFLOW_TRACKING_URI, or a database beside the run folder, mlflow.db."""
    experiment: str = ""
    """Empty: MLFLOW_EXPERIMENT_NAME, or the graph's name."""

    packages: ClassVar[Sequence[str]] = ("mlflow",)
    extra: ClassVar[str] = "mlflow"

    def start(self, run: TrackedRun) -> str:
        """Begin the run there, or go on with it under its id."""
        beside = run.folder.parent
        store = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = str(run.kept.setdefault("uri", store or _own_store(str(beside))))
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        self._client: Any = MlflowClient(tracking_uri=uri)
        name = (
            self.experiment
            or os.environ.get("MLFLOW_EXPERIMENT_NAME")
            or str(run.graph.get("name"))
        )
        known_experiment = self._client.get_experiment_by_name(name)
        if known_experiment is not None:
            experiment = known_experiment.experiment_id
        elif uri.startswith("sqlite:"):
            experiment = self._client.create_experiment(name, (beside / "mlartifacts").as_uri())
        else:
            experiment = self._client.create_experiment(name)
        self._tables: list[Any] = run.kept.setdefault("tables", [])
        if "id" in run.kept:
            self._id = str(run.kept["id"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            mark = f"{run.name} {run.config.get('begun')}"
            runs = self._client.search_runs(
                [experiment], f"tags.`{_MARK}` = '{mark}'", max_results=1
            )
            if not runs:
                runs = [self._client.create_run(experiment, run_name=run.name, tags={_MARK: mark})]
            self._id = run.kept["id"] = runs[0].info.run_id
            knobs = {_name(key): str(value)[:_PARAM] for key, value in run.knobs.items()}
            knobs["edges"] = "; ".join(run.edges)[:_PARAM]
            params = [Param(key, value) for key, value in knobs.items()]
            for at in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[at : at + _MOST_PARAMS])
            for file in ("graph.svg", "graph.json"):
                if (run.folder / file).is_file():
                    self._client.log_artifact(self._id, str(run.folder / file))
        return (
            f"mlflow ui --backend-store-uri {uri}"
            if "://" in uri and not uri.startswith("http")
            else uri
        )

    def log(self, figures: StepFigures) -> None:
        """A metric for each number."""
        at = int(figures.at * 1000)
        metrics = [
            self._metric(_name(key), value, at, figures.step)
            for key, value in figures.numbers.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def rollouts(self, table: RolloutTable) -> None:
        """A table, as its page shows them."""
        path = f"rollouts/step-{table.step:06d}.json"
        self._client.log_dict(
            self._id, {"columns": list(table.columns), "data": [list(r) for r in table.rows]}, path
        )
        if not any(entry["path"] == path for entry in self._tables):
            self._tables.append({"path": path, "type": "table"})
            while len(to_json(self._tables)) > 4_000:  # a tag has 5,000 characters at most
                self._tables.pop(0)
            self._client.set_tag(self._id, _TABLES, to_json(self._tables))

    def finish(self, outcome: str) -> None:
        """End the run there."""
        ended = {"finished": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, ended.get(outcome, "FAILED"))


def _own_store(folder: str) -> str:
    """A database where MLflow can open one; else files, which it takes only if it is told so."""
    if importlib.util.find_spec("sqlalchemy") is not None:
        return f"sqlite:///{folder}/mlflow.db"
    return f"file://{folder}/mlruns"


def _name(key: str) -> str:
    """A key with signs that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", key)
