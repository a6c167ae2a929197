"""The graph language and the engine that runs it; importing it never imports torch."""

from dataflow.system import first as first

# isort: split
# The functions below have the names of their modules. They are imported here, all at once, so that
# no later import of a module can put the module in the function's place.
from dataflow.app import main
from dataflow.collect import collect
from dataflow.errors import DataflowError, GraphError, RunError, WorldFailed
from dataflow.graph import Graph
from dataflow.history.verify import verify
from dataflow.keep import keep
from dataflow.model import LoRA, Model
from dataflow.node import Weights
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.records import Array
from dataflow.run import Result, inline, run
from dataflow.runs.opened import Run
from dataflow.scorer import scorer
from dataflow.stream import Prompt, Rollout, Stream, join

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
