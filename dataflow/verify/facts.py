"""What a run folder says of itself, read row by row: the evidence that verify judges."""

import collections
import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.extras import read_lines, read_map
from dataflow.faults import STOPPED, read_faults
from dataflow.ledger import reads
from dataflow.ledger.schema import check_schema, connect, snapshot
from dataflow.run_folder import RunFolder


class Findings:
    """Facts that break a law, and notes on what a crash may leave behind; each in the order found."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []

    def fault(self, fact: str) -> None:
        """Record a broken law."""
        self.faults.append(fact)

    def note(self, fact: str) -> None:
        """Record something worth knowing that breaks no law."""
        self.notes.append(fact)


@dataclass
class Sink:
    """The rows of one trainer or evaluation on the surviving line."""

    sources: set[str] = field(default_factory=set)
    """Sources whose groups it consumes."""
    steps: list[int] = field(default_factory=list)
    """Committed steps, ascending."""
    rows: list[tuple[str, int, str, int | None, str | None]] = field(default_factory=list)
    """Outcomes as (source, group_id, outcome, step, reason)."""
    returns: list[tuple[int, int]] = field(default_factory=list)
    """Returns to a checkpoint as (from_step, to_step)."""

    def at(self, outcome: str) -> dict[int, set[tuple[str, int]]]:
        """Groups (source, group_id) with this outcome, by step."""
        found: dict[int, set[tuple[str, int]]] = collections.defaultdict(set)
        for source, group, was, step, _ in self.rows:
            if was == outcome and step is not None:
                found[step].add((source, group))
        return found


@dataclass
class Facts:
    """All that the laws are judged on, apart from the rollouts themselves."""

    folder: RunFolder
    """The folder under judgement."""
    groups: dict[str, list[int]]
    """Groups issued by each source, ascending."""
    sinks: dict[str, Sink]
    """What each trainer and evaluation did."""
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    max_staleness: Mapping[str, int | None]
    """Bound of each trainer, in versions; None where the tokens are not of its versions."""
    config: Mapping[str, Any]
    """What the run says of itself."""

    def trainers(self) -> Iterator[tuple[str, Sink]]:
        """The sinks that train, by name."""
        for node, sink in sorted(self.sinks.items()):
            if sink.steps or node in self.max_staleness or any(row[2] == "trained" for row in sink.rows):
                yield node, sink

    def evaluations(self) -> Iterator[tuple[str, Sink]]:
        """The sinks that do not train, by name."""
        trainers = dict(self.trainers())
        yield from ((node, sink) for node, sink in sorted(self.sinks.items()) if node not in trainers)


def note_the_past(facts: Facts, findings: Findings) -> None:
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
        findings.note(f"worker '{worker}' ended {times} times when it should not, and came back {back[worker]} times")
    for worker, times in sorted(stopped.items()):
        findings.note(f"worker '{worker}' was stopped {times} times by a signal, and let go on")


def read_facts(folder: RunFolder, findings: Findings) -> Facts:
    """Read ledger, metrics and config of a run. Errors: LedgerError when the ledger cannot be read."""
    groups, sinks, said = _read_ledger(folder.ledger, findings)
    metrics, torn = read_lines(folder.metrics, findings.note)
    if torn:
        findings.note(f"{torn} torn line{'s' if torn > 1 else ''} in metrics.jsonl: a crash during the write")
    config = said.get("config") or read_map(folder.config, {"max_staleness": dict, "resumed": list}, findings.note)
    bounds = config.get("max_staleness", {})
    if "max_staleness" not in config:
        findings.note("neither ledger.db nor config.json says what the bound on staleness is")
    for node in bounds:
        sinks.setdefault(node, Sink())
    return Facts(folder=folder, groups=groups, sinks=sinks, metrics=metrics, max_staleness=bounds, config=config)


def _read_ledger(path: Path, findings: Findings) -> tuple[dict[str, list[int]], dict[str, Sink], dict[str, Any]]:
    with contextlib.closing(connect(path, mode="ro")) as db:
        check_schema(db, path)
        with snapshot(db, path, "be read"):
            return *_read_rows(db, findings), reads.facts(db)


def _read_rows(db: sqlite3.Connection, findings: Findings) -> tuple[dict[str, list[int]], dict[str, Sink]]:
    for (said,) in db.execute("PRAGMA quick_check(3)"):
        if said != "ok":
            findings.fault(f"ledger.db is damaged: {said}")
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for source, group in db.execute("SELECT source, group_id FROM groups ORDER BY source, group_id"):
        groups[source].append(group)
    sinks: dict[str, Sink] = collections.defaultdict(Sink)
    for node, source in db.execute("SELECT node, source FROM consumers"):
        sinks[node].sources.add(source)
    for node, *row in db.execute("SELECT node, source, group_id, outcome, step, reason FROM outcomes"):
        sinks[node].rows.append(tuple(row))
        sinks[node].sources.add(row[0])
    for node, step in db.execute("SELECT node, step FROM steps ORDER BY node, step"):
        sinks[node].steps.append(step)
    for node, from_step, to_step in db.execute("SELECT node, from_step, to_step FROM lines ORDER BY line"):
        sinks[node].returns.append((from_step, to_step))
    return dict(groups), dict(sinks)
