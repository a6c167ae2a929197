"""What a run folder says of itself, row by row: the evidence for the verdict."""

import collections
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.folder.faults import STOPPED, read_faults
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.proof import damages
from dataflow.folder.live_changes import KnobChange, recorded_knobs
from dataflow.folder.retention import not_kept
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_hold import seen_in_part
from dataflow.records import AnyArray
from dataflow.system.files import read_lines, read_map

NO_STEP = -1


class Findings:
    """Facts that break a law, and notes on what a crash may leave behind; each in the order
    found.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []

    def fault(self, fact: str) -> None:
        """Record a broken law."""
        self.faults.append(fact)

    def note(self, fact: str) -> None:
        """Record a fact that breaks no law."""
        self.notes.append(fact)


@dataclass(frozen=True, kw_only=True)
class EndedGroups:
    """Groups of one source with the same outcome for a sink."""

    source: str
    outcome: str
    """trained | evaluated | dropped."""
    reason: str | None
    """The reason of a drop."""
    groups: AnyArray
    """int64 [n]."""
    steps: AnyArray
    """Steps of the sink, int64 [n]; NO_STEP for a drop outside any."""


@dataclass
class SinkRows:
    """The rows of one trainer or evaluation on the surviving line."""

    sources: set[str] = field(default_factory=set)
    """Sources whose groups it consumes."""
    steps: list[int] = field(default_factory=list)
    """Committed steps, ascending."""
    ended: list[EndedGroups] = field(default_factory=list)
    """All outcomes; each group that has one is in exactly one of them."""
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step, the figures of its commit."""
    returns: list[tuple[int, int]] = field(default_factory=list)
    """Returns to a checkpoint as (from_step, to_step)."""

    def groups(self, source: str) -> list[AnyArray]:
        """Groups of a source that have an outcome."""
        return [ending.groups for ending in self.ended if ending.source == source]

    def dropped(self) -> list[EndedGroups]:
        """Groups that were dropped."""
        return [ending for ending in self.ended if ending.outcome == "dropped"]

    def at(self, outcome: str) -> dict[int, dict[str, AnyArray]]:
        """Groups with this outcome, ascending, by step and source."""
        by_step: dict[int, dict[str, AnyArray]] = {}
        for ending in self.ended:
            if ending.outcome == outcome and len(ending.groups):
                order = np.lexsort((ending.groups, ending.steps))
                steps, begins = np.unique(ending.steps[order], return_index=True)
                for step, groups in zip(
                    steps.tolist(), np.split(ending.groups[order], begins[1:]), strict=True
                ):
                    by_step.setdefault(step, {})[ending.source] = groups
        return by_step


@dataclass
class VerifyFacts:
    """The facts that the laws are judged on, apart from the rollouts."""

    folder: RunFolder
    """The folder under judgement."""
    groups: dict[str, AnyArray]
    """Groups issued by each source, ascending, int64."""
    sinks: dict[str, SinkRows]
    """What each trainer and evaluation did."""
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    max_staleness: Mapping[str, int | None]
    """Bound of each trainer, in versions; None where the tokens are not of its versions."""
    config: Mapping[str, Any]
    """The run's facts in its ledger."""
    not_kept: Mapping[str, int]
    """By node, the last step whose file of rollouts may have been removed."""
    changes: Sequence[KnobChange] = ()
    """Knob changes made while the run went on, in order."""
    places: Mapping[str, str] = field(default_factory=dict)
    """By path in the run folder, the hosts that have it, where that is not this folder alone."""

    def trainers(self) -> Iterator[tuple[str, SinkRows]]:
        """The sinks that train, by name."""
        for node, sink in sorted(self.sinks.items()):
            if (
                sink.steps
                or node in self.max_staleness
                or any(ending.outcome == "trained" for ending in sink.ended)
            ):
                yield node, sink

    def evaluations(self) -> Iterator[tuple[str, SinkRows]]:
        """The sinks that do not train, by name."""
        trainers = dict(self.trainers())
        yield from (
            (node, sink) for node, sink in sorted(self.sinks.items()) if node not in trainers
        )


def note_the_past(facts: VerifyFacts, findings: Findings) -> None:
    """Note how often the run was taken up again, and which of its workers ended on the way."""
    parts = facts.config.get("resumed", [])
    if parts:
        steps = ", ".join(str(max(part["from"].values(), default=0)) for part in parts)
        findings.note(f"the run was taken up again after step {steps}")
    ended: collections.Counter[str] = collections.Counter()
    back: collections.Counter[str] = collections.Counter()
    stopped: collections.Counter[str] = collections.Counter()
    for line in read_faults(facts.folder.path, findings.note):
        worker = str(line.get("worker"))
        if line.get("cause") == STOPPED:
            stopped[worker] += 1
        else:
            ended[worker] += 1
            back[worker] += line.get("recovered_s") is not None
    for worker, times in sorted(ended.items()):
        findings.note(
            f"worker '{worker}' ended {times} times when it should not, and came back"
            f" {back[worker]} times"
        )
    for worker, times in sorted(stopped.items()):
        findings.note(f"worker '{worker}' was stopped {times} times by a signal, and let go on")


def note_who_leads(folder: RunFolder, findings: Findings) -> None:
    """Note that the ledger may say less here than where it is written."""
    if note := seen_in_part(folder):
        findings.note(note)


def read_facts(folder: RunFolder, findings: Findings) -> VerifyFacts:
    """Read ledger, metrics and config of a run. Errors: LedgerError when the ledger cannot be
    read.
    """
    groups, sinks, ledger_facts, lie = _read_ledger(folder.ledger, findings)
    metrics, torn = read_lines(folder.metrics, findings.note)
    if torn:
        findings.note(
            f"{torn} torn line{'s' if torn > 1 else ''} in metrics.jsonl: a crash during the write"
        )
    config = ledger_facts.get("config") or read_map(
        folder.config, {"max_staleness": dict, "resumed": list}, findings.note
    )
    bounds = config.get("max_staleness", {})
    if "max_staleness" not in config:
        findings.note("neither ledger.db nor config.json says what the bound on staleness is")
    for node in bounds:
        sinks.setdefault(node, SinkRows())
    return VerifyFacts(
        folder=folder,
        groups=groups,
        sinks=sinks,
        metrics=metrics,
        max_staleness=bounds,
        config=config,
        not_kept=not_kept(ledger_facts),
        places=lie,
        changes=recorded_knobs(ledger_facts),
    )


def _read_ledger(
    path: Path, findings: Findings
) -> tuple[dict[str, AnyArray], dict[str, SinkRows], dict[str, Any], dict[str, str]]:
    with (
        Ledger.open(path, readonly=True) as ledger,
        ledger.transaction("be read", writes=False) as db,
    ):
        for damage in damages(path, db):
            findings.fault(f"ledger.db is damaged: {damage}")
        return *_read_rows(db), ledger.facts(), ledger.places()


def _read_rows(db: sqlite3.Connection) -> tuple[dict[str, AnyArray], dict[str, SinkRows]]:
    groups = {
        source: np.sort(_array(ids))
        for source, ids in db.execute(
            "SELECT source, json_group_array(group_id) FROM groups GROUP BY source"
        )
    }
    sinks: dict[str, SinkRows] = collections.defaultdict(SinkRows)
    for node, source in db.execute("SELECT node, source FROM consumers"):
        sinks[node].sources.add(source)
    for node, source, outcome, reason, ids, steps in db.execute(
        "SELECT node, source, outcome, reason, json_group_array(group_id),"
        " json_group_array(coalesce(step, :none)) FROM outcomes GROUP BY node, source, outcome,"
        " reason",
        {"none": NO_STEP},
    ):
        ended = EndedGroups(
            source=source, outcome=outcome, reason=reason, groups=_array(ids), steps=_array(steps)
        )
        sinks[node].ended.append(ended)
        sinks[node].sources.add(source)
    for node, step, metrics in db.execute(
        "SELECT node, step, metrics FROM steps ORDER BY node, step"
    ):
        sinks[node].steps.append(step)
        sinks[node].metrics[step] = json.loads(metrics)
    for node, from_step, to_step in db.execute(
        "SELECT node, from_step, to_step FROM lines ORDER BY line"
    ):
        sinks[node].returns.append((from_step, to_step))
    return groups, dict(sinks)


def _array(numbers: str) -> AnyArray:
    """A JSON list of whole numbers, int64."""
    return np.array(json.loads(numbers), np.int64)
