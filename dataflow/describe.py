"""What a run folder says of its run before it begins: graph.json and config.json, as plain values."""

import re
from typing import Any

from dataflow.check import lanes_of
from dataflow.graph import Graph
from dataflow.node import Operator
from dataflow.plan import Plan
from dataflow.trainers import feeding, leading, trainers

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def graph_facts(graph: Graph) -> dict[str, Any]:
    """Nodes with their knobs, and edges: the same for the same graph, in every process."""
    return {
        "name": graph.name,
        "nodes": [
            {"name": name, "operator": type(op).__name__, "kind": op.kind, "knobs": _knobs(op)}
            for name, op in graph.operators.items()
        ],
        "edges": [
            {
                "from": u, "to": v, "plane": data["plane"], "lane": data.get("lane"),
                "max_staleness": data.get("max_staleness"),
                "columns": {n: str(t) for n, t in data.get("columns", {}).items()},
            }
            for u, v, data in graph.nx.edges(data=True)
        ],
    }  # fmt: skip


def plan_facts(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Where it runs, and the bounds that its verdict needs."""
    staleness: dict[str, int | None] = dict.fromkeys(trainers(graph))
    for feedback in feeding(graph).values():
        staleness[feedback.weights.trainer.name] = feedback.max_staleness
    placed = {
        node: {"threads": place.threads, "ranks": place.ranks, "replicas": place.replicas, "gpus": len(place.gpus)}
        for node, place in plan.placements.items()
    }
    return {
        "max_staleness": staleness, "leading": leading(graph), "plan": plan.explain().splitlines(),
        "placed": placed, "on_demand": list(plan.on_demand),
    }  # fmt: skip


def consumers(graph: Graph) -> dict[str, list[str]]:
    """By trainer and evaluation, the sources whose groups it consumes: whose outcomes the ledger knows."""
    return {
        name: lanes_of(graph, name)
        for name, op in graph.operators.items()
        if op.trains or getattr(op, "every_steps", None)
    }


def _knobs(operator: Operator) -> dict[str, str]:
    """Without the addresses of functions, which differ between processes."""
    return {knob: _ADDRESS.sub("", str(value)) for knob, value in operator.knobs().items()}
