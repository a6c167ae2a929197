"""Which trainers a graph has, which of them feeds the generator of a source, and which lines of metrics are whose."""

from collections.abc import Iterable, Mapping
from typing import Any

from dataflow.node import Generate, Learn
from dataflow.structure import Feedback, Structure, sources_of


def trainers(graph: Structure) -> list[str]:
    """All of them, in the graph's order."""
    return [name for name, operator in graph.operators.items() if operator.trains]


def feeding(graph: Structure) -> dict[str, Feedback]:
    """By source, the feedback from a trainer of its rows to the generator of its rows.

    There is one at most, as a model has one trainer. A critic, whose weights go to another operator, feeds none.
    """
    found: dict[str, Feedback] = {}
    for feedback in graph.feedbacks:
        if isinstance(feedback.weights.trainer, Learn) and isinstance(feedback.reader, Generate):
            generated = set(sources_of(graph, feedback.reader.name))
            found |= {
                source: feedback for source in sources_of(graph, feedback.weights.trainer.name) if source in generated
            }
    return found


def leading(graph: Structure) -> list[str]:
    """The trainers whose steps are the run's: those that feed a generator; all of them where none does."""
    feeders = {feedback.weights.trainer.name for feedback in feeding(graph).values()}
    return [name for name in trainers(graph) if name in feeders or not feeders]


def own_folder(graph: Structure, node: str) -> str | None:
    """Where in rollouts/ and checkpoints/ a trainer keeps its own; None for the only trainer of a graph."""
    return node if len(trainers(graph)) > 1 and graph.operators[node].trains else None


def kept_by(graph: Structure) -> list[str]:
    """Folders in checkpoints/ of all trainers; empty for the only one."""
    return [own_folder(graph, node) or "" for node in trainers(graph)]


def lines_of(lines: Iterable[Mapping[str, Any]], trainer: str | None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the steps of other trainers than this one; all of them for None."""
    return [
        dict(line) for line in lines
        if trainer is None or "eval_accuracy" in line or line.get("node", trainer) == trainer
    ]  # fmt: skip
