"""Figures elsewhere: a run's metrics, rollouts and graph, told by processes that only read its
folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataflow.trackers.libraries.mlflow import MlflowTracker
    from dataflow.trackers.libraries.opentelemetry import OpenTelemetryTracker
    from dataflow.trackers.libraries.prometheus import PrometheusTracker
    from dataflow.trackers.libraries.tensorboard import TensorboardTracker
    from dataflow.trackers.libraries.trackio import TrackioTracker
    from dataflow.trackers.libraries.wandb import WandbTracker
    from dataflow.trackers.tracker import RolloutTable, StepFigures, StepGroups, TrackedRun, Tracker

__all__ = [
    "MlflowTracker",
    "OpenTelemetryTracker",
    "PrometheusTracker",
    "RolloutTable",
    "StepFigures",
    "StepGroups",
    "TensorboardTracker",
    "TrackedRun",
    "Tracker",
    "TrackioTracker",
    "WandbTracker",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'dataflow.trackers' has no attribute '{name}'; it has {__all__}"
        )
    library = name.removesuffix("Tracker").lower()
    module = f"libraries.{library}" if name.endswith("Tracker") and library else "tracker"
    return getattr(importlib.import_module(f"dataflow.trackers.{module}"), name)
