"""The graph language and the engine that runs it; importing it never imports torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataflow.app import main
    from dataflow.collect import collect
    from dataflow.errors import DataflowError, GraphError, RunError
    from dataflow.graph import Graph
    from dataflow.model import Model
    from dataflow.plan import Devices, Plan, plan
    from dataflow.records import Array
    from dataflow.run import Result, inline, run
    from dataflow.scorer import scorer
    from dataflow.stream import Prompt, Rollout, Stream, Weights, join
    from dataflow.verify import verify

__all__ = [
    "Array", "DataflowError", "Devices", "Graph", "GraphError", "Model", "Plan", "Prompt", "Result", "Rollout",
    "RunError", "Stream", "Weights", "collect", "inline", "join", "main", "plan", "run", "scorer", "verify",
]  # fmt: skip

_HOME = {
    "Array": "records", "DataflowError": "errors", "Devices": "plan", "Graph": "graph", "GraphError": "errors",
    "Model": "model", "Plan": "plan", "Prompt": "stream", "Result": "run", "Rollout": "stream", "RunError": "errors",
    "Stream": "stream", "Weights": "stream", "collect": "collect", "inline": "run", "join": "stream", "main": "app",
    "plan": "plan", "run": "run", "scorer": "scorer", "verify": "verify",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dataflow' has no attribute '{name}'; it has {__all__}")
    value = getattr(importlib.import_module(f"dataflow.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
