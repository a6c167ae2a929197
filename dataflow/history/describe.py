"""What a run folder says of its run before it begins, as plain values: in the ledger, and for
people in graph.json and config.json.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.gguf.conversion import folder_of
from dataflow.graph import Graph
from dataflow.model import is_gguf
from dataflow.node import Operator
from dataflow.settable import plain_value
from dataflow.structure import feeding, leading, sources_of, trainers

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_MODEL = ("name", "source")


def describe(
    folder: RunFolder, ledger: Ledger, graph: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Record what is run, before it runs. Errors: LedgerError."""
    ledger.set_facts({"graph": graph, "config": config})
    folder.write_json("graph.json", graph)
    folder.write_json("config.json", config)


def described(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Graph and configuration, as the ledger has them; where that says nothing, or not all, as the
    two files do; else empty.
    """
    facts: dict[str, Any] = {}
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        facts = ledger.facts()
    graph: dict[str, Any] = facts.get("graph") or {}
    return (
        graph if is_whole(graph) else folder.read_json("graph.json"),
        facts.get("config") or folder.read_json("config.json"),
    )


def is_whole(graph: Any) -> bool:
    """Whether this is all that `graph_facts` says of a graph: a bit of a file that flips may
    change a name in it.
    """
    if not isinstance(graph, dict) or not {"name", "nodes", "edges"} <= graph.keys():
        return False
    return all(
        isinstance(part, dict) and names <= part.keys() and isinstance(part[table], dict)
        for parts, names, table in (
            (graph["nodes"], {"name", "operator", "knobs"}, "knobs"),
            (graph["edges"], {"from", "to", "plane", "columns"}, "columns"),
        )
        for part in parts
    )


def graph_facts(graph: Graph) -> dict[str, Any]:
    """Nodes with their knobs, and edges: the same for the same graph, in every process."""
    return {
        "name": graph.name,
        "nodes": [
            {
                "name": name,
                "operator": type(op).__name__,
                "kind": op.kind,
                "knobs": _knobs(op),
                **_uses(op),
            }
            for name, op in graph.operators.items()
        ],
        "edges": [
            {
                "from": u,
                "to": v,
                "plane": data["plane"],
                "source": data.get("source"),
                "max_staleness": data.get("max_staleness"),
                **({"refresh": dataclasses.asdict(data["refresh"])} if data.get("refresh") else {}),
                "columns": {n: str(t) for n, t in data.get("columns", {}).items()},
            }
            for u, v, data in graph.nx.edges(data=True)
        ],
    }


def model_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model in a node's facts: `name`, `source` and, of a GGUF file, `files`: its name and
    digest; empty where the node has none, and in folders that do not say it.
    """
    model = node.get("model")
    return model if isinstance(model, dict) else {}


def plan_facts(graph: Graph, plan: "Plan") -> dict[str, Any]:
    """The plan's places, and the bounds that a verdict needs."""
    staleness: dict[str, int | None] = dict.fromkeys(trainers(graph))
    for feedback in feeding(graph).values():
        staleness[feedback.weights.trainer.name] = feedback.max_staleness
    placed = {
        node: {
            "worker": place.worker,
            "threads": place.threads,
            "ranks": place.ranks,
            "replicas": place.replicas,
            "gpus": len(place.gpus),
            **({"chosen": dict(place.chosen)} if place.chosen else {}),
        }
        for node, place in plan.placements.items()
    }
    return {
        "max_staleness": staleness,
        "leading": leading(graph),
        "plan": plan.explain().splitlines(),
        "placed": placed,
        "on_demand": list(plan.on_demand),
        "turns": [list(group) for group in plan.turns],
        "settable": _settable(graph),
        **(
            {"hosts": {node: list(place.all_hosts) for node, place in plan.placements.items()}}
            if plan.devices.hosts
            else {}
        ),
    }


def consumers(graph: Graph) -> dict[str, list[str]]:
    """By trainer and evaluation, the sources whose groups it consumes: the ledger knows their
    outcomes.
    """
    return {
        name: sources_of(graph, name)
        for name, op in graph.operators.items()
        if op.trains or op.traits.every_steps
    }


def _settable(graph: Graph) -> dict[str, dict[str, dict[str, Any]]]:
    """By node and knob that may change while it goes on, the declared value, and from when on
    another one counts.
    """
    from dataflow.planning.set_values import settable_of

    knobs_by_node = {name: settable_of(graph, name) for name in graph.operators}
    return {
        name: {
            knob: {"value": plain_value(settable.value), "at": settable.at}
            for knob, settable in knobs.items()
        }
        for name, knobs in knobs_by_node.items()
        if knobs
    }


def _uses(operator: Operator) -> dict[str, Any]:
    model = operator.uses
    if model is None:
        return {}
    files = {"files": folder_of(model.source).name} if is_gguf(model.source) else {}
    return {"model": {**{name: getattr(model, name) for name in _OF_MODEL}, **files}}


def _knobs(operator: Operator) -> dict[str, str]:
    """Without the addresses of functions, which differ between processes."""
    return {knob: _ADDRESS.sub("", str(value)) for knob, value in operator.knobs().items()}
