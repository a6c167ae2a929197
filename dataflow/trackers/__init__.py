"""Figures elsewhere: a run's metrics, rollouts and graph, told by processes that only read its
folder.
"""

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
