"""The verdict on a run: every law recomputed from the run folder alone."""

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.errors import DataflowError
from dataflow.folder.ledger import OutcomeCounts, some
from dataflow.folder.live_changes import MAX_STALENESS, read_live_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify.facts import (
    NO_STEP,
    Findings,
    SinkRows,
    VerifyFacts,
    note_the_past,
    note_who_leads,
    read_facts,
)
from dataflow.history.verify.rollouts import (
    judge_evaluations,
    judge_finished,
    judge_folder,
    judge_steps,
)

FAULTS_SHOWN = 3
CHECKPOINT_BYTES = 1 << 30
"""Bytes of each trainer's checkpoints that are read, where not all are: less than a second."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verify found."""

    faults: Sequence[str]
    """Facts that break a law; none when the run is clean."""
    notes: Sequence[str]
    """Facts that break no law: what a crash left behind, what could not be compared."""
    summary: str
    """Figures: of each sink the identity of the ledger; of trainers steps and staleness."""

    @property
    def clean(self) -> bool:
        """Whether every law holds."""
        return not self.faults

    @property
    def exit_status(self) -> int:
        """0 when clean, otherwise 1."""
        return 0 if self.clean else 1

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if self.clean:
            return f"clean: {self.summary}"
        more = len(self.faults) - FAULTS_SHOWN
        shown = "; ".join(self.faults[:FAULTS_SHOWN])
        return f"BROKEN: {shown}{f'; and {more} more' if more > 0 else ''}"

    def __str__(self) -> str:
        return "\n".join([self.line, *(f"  note: {note}" for note in self.notes)])


def verify(run_path: str | Path, *, deep: bool = False) -> Verdict:
    """Judge the run in a folder by its ledger.db, rollouts/*.arrow, checkpoints/, finished/,
    metrics.jsonl and config.json: whether its laws hold, and whether what a resume would read is as
    it was written.

    deep: read all checkpoints; else the newest of each trainer, up to 1 GiB, and of all others
    their sizes. A run under way may be judged too. Errors: RunFolderError when there is no folder
    at `run_path`.

    >>> from dataflow import Graph, inline, run, verify
    >>> from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
    >>> g = Graph("tiny")
    >>> FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts(size=4))))
    >>> folder = run(g, on=inline(), runs="runs", quiet=True).folder
    >>> verify(folder).line
    'clean: 4 groups issued = 4 trained + 0 dropped + 0 in flight; 2 steps'
    """
    folder = RunFolder.open(run_path)
    findings = Findings()
    try:
        facts = read_facts(folder, findings)
    except DataflowError as error:
        return Verdict(faults=[*findings.faults, str(error)], notes=findings.notes, summary="")
    note_the_past(facts, findings)
    note_who_leads(folder, findings)
    for change in read_live_changes(folder):
        findings.note(f"{change.verb}: {change}")
    _groups_are_contiguous(facts, findings)
    judge_finished(folder, findings)
    most_bytes = math.inf if deep else CHECKPOINT_BYTES
    parts = [
        _judge_trainer(facts, node, sink, findings, most_bytes) for node, sink in facts.trainers()
    ]
    parts += [_judge_evaluation(facts, node, sink, findings) for node, sink in facts.evaluations()]
    for source in sorted(
        set(facts.groups) - {name for sink in facts.sinks.values() for name in sink.sources}
    ):
        findings.note(
            f"no sink is known for source '{source}': its {len(facts.groups[source])} groups are in"
            " flight"
        )
    return Verdict(
        faults=findings.faults,
        notes=findings.notes,
        summary=" | ".join(parts) or "nothing was issued",
    )


def report(run_path: str | Path, *, deep: bool = False) -> int:
    """Print the verdict on a run and return the exit status that goes with it."""
    verdict = verify(run_path, deep=deep)
    print(verdict)
    return verdict.exit_status


def _judge_trainer(
    facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings, most_bytes: float
) -> str:
    _steps_are_contiguous(node, sink, findings)
    _outcomes_stand_at_steps(node, sink, findings)
    counts = _identity(facts, node, sink, findings)
    largest = judge_steps(facts, node, sink, findings)
    judge_folder(facts, node, sink, findings, most_bytes)
    _metrics_agree(facts, node, sink, findings)
    name = f"{node}: " if len(list(facts.trainers())) > 1 else ""
    age = f"; max staleness {largest or 0}"
    if node in facts.max_staleness:
        bound = facts.max_staleness[node]
        bounds = [
            bound,
            *(
                change.value
                for change in facts.changes
                if change.knob == MAX_STALENESS and change.trainer == node
            ),
        ]
        age = "" if bound is None else f"{age} of {', then '.join(map(str, bounds))}"
    steps = len(sink.steps)
    return f"{name}{counts}; {steps} step{'s' if steps != 1 else ''}{age}"


def _judge_evaluation(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> str:
    counts = _identity(facts, node, sink, findings)
    judge_evaluations(facts, node, sink, findings)
    return f"{node}: {counts}"


def _groups_are_contiguous(facts: VerifyFacts, findings: Findings) -> None:
    for source, groups in facts.groups.items():
        if not np.array_equal(groups, np.arange(len(groups))):
            missing = set(range(int(groups[-1]) + 1)) - set(groups.tolist())
            findings.fault(
                f"groups {some(missing)} of source '{source}' were never issued, but later ones"
                " were"
            )


def _steps_are_contiguous(node: str, sink: SinkRows, findings: Findings) -> None:
    if sink.steps and sink.steps != list(range(1, len(sink.steps) + 1)):
        missing = set(range(1, sink.steps[-1] + 1)) - set(sink.steps)
        findings.fault(
            f"steps {some(missing)} of '{node}' were never committed, but later ones were"
        )


def _outcomes_stand_at_steps(node: str, sink: SinkRows, findings: Findings) -> None:
    """Check that only drops stand at the next step, which is under way."""
    lost: list[int] = []
    for ending in sink.ended:
        steps = [
            NO_STEP,
            *sink.steps,
            *([len(sink.steps) + 1] if ending.outcome == "dropped" else []),
        ]
        lost += ending.groups[~np.isin(ending.steps, steps)].tolist()
    if lost:
        findings.fault(
            f"groups {some(lost)} have an outcome at a step that '{node}' never committed"
        )


def _identity(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> OutcomeCounts:
    """Check that issued = trained + evaluated + dropped + in flight, each side counted for
    itself.
    """
    issued = waiting = 0
    for source in sorted(sink.sources):
        issued_groups = facts.groups.get(source, np.zeros(0, np.int64))
        ended_groups, times = np.unique(
            np.concatenate([issued_groups[:0], *sink.groups(source)]), return_counts=True
        )
        issued += len(issued_groups)
        waiting += len(np.setdiff1d(issued_groups, ended_groups, assume_unique=True))
        if len(twice := ended_groups[times > 1]):
            findings.fault(f"'{node}' has two outcomes for groups {some(twice.tolist())}")
        if len(unknown := np.setdiff1d(ended_groups, issued_groups, assume_unique=True)):
            findings.fault(
                f"'{node}' has outcomes for groups {some(unknown.tolist())}, never issued"
            )
    if unexplained := [
        group for ending in sink.dropped() if not ending.reason for group in ending.groups.tolist()
    ]:
        findings.fault(f"'{node}' dropped groups {some(unexplained)} without a reason")
    kinds, dropped = collections.Counter[str](), collections.Counter[str]()
    for ending in sink.ended:
        kinds[ending.outcome] += len(ending.groups)
    for ending in sink.dropped():
        dropped[str(ending.reason)] += len(ending.groups)
    counts = OutcomeCounts(
        issued=issued,
        trained=kinds["trained"],
        evaluated=kinds["evaluated"],
        dropped=dict(dropped.most_common()),
        in_flight={"waiting": waiting} if waiting else {},
    )
    if counts.missing:
        findings.fault(f"'{node}': {counts}")
    return counts


def _metrics_agree(facts: VerifyFacts, node: str, sink: SinkRows, findings: Findings) -> None:
    """Check that each step's line agrees with the ledger, its drops too; of a step's lines the last
    counts.
    """
    alone = len(list(facts.trainers())) == 1
    lines: dict[int, dict[str, Any]] = {}
    for line in facts.metrics:
        if (
            "dropped" in line
            and isinstance(line.get("step"), int)
            and line.get("node", alone and node) == node
        ):
            lines[line["step"]] = line
    dropped: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for ending in sink.dropped():
        for step, times in zip(*np.unique(ending.steps, return_counts=True), strict=True):
            dropped[int(step)][str(ending.reason)] += int(times)
    if silent := [step for step in sink.steps if step not in lines]:
        findings.note(
            f"steps {some(silent)} of '{node}' have no line with their drops in metrics.jsonl"
        )
    for step in sink.steps:
        if step in lines and _numbers(lines[step]["dropped"]) != dict(dropped[step]):
            findings.fault(
                f"metrics.jsonl tells of drops {lines[step]['dropped']} at step {step} of"
                f" '{node}', "
                f"the ledger of {dict(dropped[step])}"
            )
    if differing := [
        step
        for step, figures in sink.metrics.items()
        if step in lines and not lines[step].items() >= figures.items()
    ]:
        findings.fault(
            f"metrics.jsonl has other figures of steps {some(differing)} of '{node}' than the"
            " ledger:"
            " it was damaged, or somebody wrote into it; a resume writes their lines anew"
        )
    if early := [step for step in lines if step > (sink.steps[-1] if sink.steps else 0)]:
        findings.note(
            f"metrics.jsonl tells of steps {some(early)} of '{node}' that are not on the surviving"
            " line"
        )


def _numbers(counts: Any) -> Any:
    return (
        {str(reason): number for reason, number in counts.items() if number}
        if isinstance(counts, dict)
        else counts
    )
