"""The graph language and the engine that runs it; importing it never imports torch.

Importing it loads the language alone; planning and running load with the first use of their names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dataflow.system import first as first

# isort: split
from dataflow.errors import DataflowError, GraphError, RunError, WorldFailed
from dataflow.graph import Graph
from dataflow.model import LoRA, Model
from dataflow.node import Prompt, Rollout, Stream, Weights, join
from dataflow.records import Array
from dataflow.scorer import keep, scorer

if TYPE_CHECKING:
    from dataflow.app import main
    from dataflow.history.verify import verify
    from dataflow.planning.hosts import Devices
    from dataflow.planning.plan import Plan, plan
    from dataflow.runner import Result, collect, inline, run
    from dataflow.runs.opened import Run

__all__ = [
    "Array",
    "DataflowError",
    "Devices",
    "Graph",
    "GraphError",
    "LoRA",
    "Model",
    "Plan",
    "Prompt",
    "Result",
    "Rollout",
    "Run",
    "RunError",
    "Stream",
    "Weights",
    "WorldFailed",
    "collect",
    "inline",
    "join",
    "keep",
    "main",
    "plan",
    "run",
    "scorer",
    "verify",
]

_MODULES = {
    "Devices": "planning.hosts",
    "Plan": "planning.plan",
    "Result": "runner",
    "Run": "runs.opened",
    "collect": "runner",
    "inline": "runner",
    "main": "app",
    "plan": "planning.plan",
    "run": "runner",
    "verify": "history.verify",
}
"""Where the names of planning and running stand."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dataflow' has no attribute '{name}'; it has {__all__}")
    return getattr(importlib.import_module(f"dataflow.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
