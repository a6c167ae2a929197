"""Which files of a run's rollouts count: those of steps and rounds that its ledger has taken in."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import RunError, nearest
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.retention import not_kept
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described

TRAINED, EVALUATED, DROPPED, IN_FLIGHT = "trained", "evaluated", "dropped", "in flight"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of rollouts."""

    path: Path
    outcome: str
    """trained | evaluated."""
    node: str
    """Who trained or evaluated them; empty where several could have."""
    source: str | None
    """Where their prompts came from; None where several could be it."""
    step: int


@dataclass
class _Known:
    """What the ledger says."""

    sources: dict[str, list[str]] = field(default_factory=dict)
    last: dict[str, int | None] = field(default_factory=dict)
    gone: Mapping[str, int] = field(default_factory=dict)
    fault: str = ""


def leaders_of(graph: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The trainers whose steps are the run's."""
    leading = config.get("leading")
    if isinstance(leading, list) and leading:
        return [str(name) for name in leading]
    return trainers_of(graph, config)[:1]


def trainers_of(graph: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """All of them."""
    if isinstance(bounds := config.get("max_staleness"), dict) and bounds:
        return [str(name) for name in bounds]
    return list(
        dict.fromkeys(
            edge["from"] for edge in graph.get("edges", ()) if edge.get("plane") == "weights"
        )
    )


def evaluations_of(graph: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The sinks that do not train."""
    train = set(trainers_of(graph, config))
    sinks = [node["name"] for node in graph.get("nodes", ()) if node.get("kind") == "sink"]
    return [name for name in sinks if name not in train]


def check_trainer(name: str, trainers: Collection[str]) -> None:
    """Errors: RunError where the run has no trainer of that name."""
    if name not in trainers:
        raise RunError(
            f"the run has no trainer '{name}'; name one of"
            f" {list(trainers)}{nearest(name, trainers)}"
        )


def parts_of(folder: RunFolder, *, trainer: str | None = None) -> tuple[list[Part], list[str]]:
    """The files of rollouts that count, by trainer ascending in their steps, then those of the
    evaluations; and what is to be known of others. trainer: whose; None: those of all that lead.
    Errors: RunError for one that the run has not.
    """
    graph, config = described(folder)
    trainers, evaluations = trainers_of(graph, config), evaluations_of(graph, config)
    if trainer is not None:
        check_trainer(trainer, trainers)
    leaders = [trainer] if trainer is not None else leaders_of(graph, config) or [""]
    answers = _ask(folder, leaders, evaluations)
    files: list[Part] = []
    notes = [answers.fault] if answers.fault else []
    for node in leaders:
        own = node if len(trainers) > 1 else None
        if node in answers.gone:
            notes.append(
                f"rollouts of '{node}' up to step {answers.gone[node]} were not kept (--keep-steps)"
            )
        mine = _files(folder, own, "step", TRAINED, node, answers)
        files += mine
        if (away := (answers.last.get(node) or 0) - answers.gone.get(node, 0) - len(mine)) > 0:
            why = "other hosts have them, or they were removed"
            notes.append(f"rollouts of {away:,} steps of '{node}' are not in this folder: {why}")
    for node in evaluations or [""]:
        files += _files(
            folder, node if len(evaluations) > 1 else None, "eval", EVALUATED, node, answers
        )
    return files, notes


def counted_files(folder: RunFolder, kind: str, own: str = "") -> list[tuple[int, Path]]:
    """Steps and paths of the files that count, ascending. kind: step | eval. own: the trainer or
    the evaluation, where several keep their own.
    """
    graph, config = described(folder)
    if kind == "eval":
        outcome, nodes = EVALUATED, [own] if own else evaluations_of(graph, config)
        answers = _ask(folder, [], nodes)
    else:
        outcome, nodes = TRAINED, [own] if own else trainers_of(graph, config)
        answers = _ask(folder, nodes, [])
    node = nodes[0] if len(nodes) == 1 else ""
    return [
        (part.step, part.path) for part in _files(folder, own or None, kind, outcome, node, answers)
    ]


def _files(
    folder: RunFolder, own: str | None, kind: str, outcome: str, node: str, answers: _Known
) -> list[Part]:
    """Those of one trainer, or of evaluations, up to the last that the ledger has taken in."""
    last, sources = answers.last.get(node), answers.sources.get(node, [])
    source = sources[0] if len(sources) == 1 else None
    return [
        Part(path=path, outcome=outcome, node=node, source=source, step=step)
        for step, path in folder.rollouts_of(own).files(kind)
        if last is None or step <= last
    ]


def _ask(folder: RunFolder, trainers: list[str], evaluations: list[str]) -> _Known:
    """Of the ledger, which is opened for reading; what it does not tell is not known."""
    answers = _Known()
    try:
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            answers.gone = not_kept(ledger.facts())
            for node in filter(None, [*trainers, *evaluations]):
                answers.sources[node] = ledger.sources(node)
                if node in trainers:
                    answers.last[node] = ledger.last_step(node)
                else:
                    last_round = ledger.last_round(node)
                    answers.last[node] = -1 if last_round is None else last_round
    except LedgerError as error:
        answers.fault = f"the ledger was not asked which steps count, and all files do: {error}"
    return answers


def fates_of(
    folder: RunFolder, source: str, groups: list[int]
) -> dict[int, tuple[str, str | None, int | None]]:
    """By group that no step has trained and no round has read: what became of it, why, and at which
    step.
    """
    fates_by_group: dict[int, tuple[str, str | None, int | None]] = {}
    with contextlib.suppress(LedgerError), Ledger.open(folder.ledger, readonly=True) as ledger:
        for group in groups:
            fates = ledger.fates(source, group)
            if not fates:
                fates_by_group[group] = (IN_FLIGHT, None, None)
            elif all(fate.outcome == DROPPED for fate in fates):
                fates_by_group[group] = (DROPPED, fates[0].reason, fates[0].step)
    return fates_by_group
