"""Figures of bench.chaos, from what a run left in its folder and what was done to it."""

from __future__ import annotations

import collections
import itertools
import json
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos.nemesis import Blow
from bench.report import Figure
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.faults import FILE as FAULTS
from dataflow.records import GROUP_ID, POSITION

DRAWN = "drawn.jsonl"
TRAINER, SOURCE = "trainer", "prompts"


def faults_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of faults.jsonl, without one that a crash tore."""
    path = folder / FAULTS
    faults = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            faults.append(json.loads(text))
        except ValueError:
            continue
    return faults


def drawn(folder: Path) -> list[dict[str, Any]]:
    """The lines of drawn.jsonl, without one that a crash tore."""
    path = folder / DRAWN
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def matched(
    blows: Sequence[Blow], faults: Iterable[Mapping[str, Any]]
) -> list[tuple[Blow | None, Mapping[str, Any]]]:
    """Each fault of a worker with the last blow to it, by which no other fault is explained; None:
    not our doing.
    """
    remaining, pairs = list(blows), []
    for fault in sorted(faults, key=lambda line: float(line["at"])):
        causes = [
            blow
            for blow in remaining
            if not blow.is_within and blow.worker == fault["worker"] and blow.at <= fault["at"]
        ]
        remaining = [blow for blow in remaining if blow not in causes]
        pairs.append((causes[0] if causes else None, fault))
    return pairs


def rows_of_faults(
    blows: Sequence[Blow],
    faults: Sequence[Mapping[str, Any]],
    drawn: Sequence[Mapping[str, Any]],
    group_size: int,
) -> list[dict[str, Figure]]:
    """A row for each blow and for each fault that no blow explains, in order of time.

    notice_s: from the blow until it was noticed; recover_s: from then until the worker was at work
    again. regenerated: rollouts begun again after this fault and before the next one.
    """
    pairs = matched(blows, faults)
    again = repeated(drawn, "begun", SOURCE)
    explained = {id(blow): fault for blow, fault in pairs if blow is not None}
    events: list[tuple[float, dict[str, Figure]]] = []
    for blow in blows:
        row: dict[str, Figure] = {"worker": blow.target, "kind": blow.sent}
        fault = explained.get(id(blow))
        if blow.is_within:
            row["replaced_s"] = blow.replaced_s
        elif fault is not None:
            row |= {
                "notice_s": float(fault["at"]) - blow.at,
                "recover_s": fault["recovered_s"],
                "cause": fault["cause"],
            }
        events.append((blow.at, row))
    events += [
        (
            float(fault["at"]),
            {
                "worker": fault["worker"],
                "kind": "by itself",
                "recover_s": fault["recovered_s"],
                "cause": fault["cause"],
            },
        )
        for blow, fault in pairs
        if blow is None
    ]
    events.sort(key=lambda event: event[0])
    times = [at for at, _ in events]
    for (begin, row), end in zip(events, [*times[1:], float("inf")], strict=True):
        row["regenerated"] = group_size * sum(begin <= at < end for at, _ in again)
    return [row for _, row in events]


def repeated(drawn: Iterable[Mapping[str, Any]], kind: str, source: str) -> list[tuple[float, int]]:
    """Each time that a group was begun, or finished, which had been before: (seconds since 1970,
    group).
    """
    seen_groups: set[int] = set()
    repeats = []
    for line in drawn:
        if line["what"] == kind and line["source"] == source:
            repeats += [
                (float(line["at"]), group) for group in line["groups"] if group in seen_groups
            ]
            seen_groups.update(line["groups"])
    return repeats


@dataclass(frozen=True)
class Ended:
    """What the ledger says became of the groups of the training source."""

    step_times: Sequence[float]
    """When each step was committed, seconds since 1970."""
    ended: Mapping[int, tuple[str, float]]
    """By group: outcome and its time; a drop outside any step has time 0."""

    @classmethod
    def read(cls, folder: Path) -> Ended:
        """From ledger.db of a run that has ended, or stands still."""
        db = sqlite3.connect(f"file:{folder / 'ledger.db'}?mode=ro", uri=True)
        try:
            times = dict(
                db.execute("SELECT step, at FROM steps WHERE node = ? ORDER BY step", (TRAINER,))
            )
            rows = db.execute(
                "SELECT group_id, outcome, step, reason FROM outcomes WHERE node = ? AND"
                " source = ?",
                (TRAINER, SOURCE),
            ).fetchall()
        finally:
            db.close()
        ended = {
            group: (reason or outcome, times.get(step, 0.0))
            for group, outcome, step, reason in rows
        }
        return cls(step_times=list(times.values()), ended=ended)


def trained_twice(folder: Path) -> int:
    """Groups that stand in the files of two steps, or twice in one."""
    counts: collections.Counter[int] = collections.Counter()
    for path in sorted((folder / "rollouts").glob("step-*.arrow")):
        counts.update(_groups(read_arrow(path)))
    return sum(number > 1 for number in counts.values())


def pace(times: Sequence[float]) -> float | None:
    """Median seconds from a step to the next; None with fewer than two."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None


def rate(times: Sequence[float]) -> float:
    """Steps per second from the first step to the last; 0 where there are not two."""
    return (
        (len(times) - 1) / (times[-1] - times[0])
        if len(times) > 1 and times[-1] > times[0]
        else 0.0
    )


def useful(times: Sequence[float], undisturbed: Sequence[float]) -> float | None:
    """Share of the time from the first step to the last that another run takes for as many; None:
    unknown.
    """
    return rate(times) / rate(undisturbed) if rate(times) and rate(undisturbed) else None


def accuracies(metrics: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Accuracy by step."""
    return {
        int(line["step"]): float(line["eval_accuracy"])
        for line in metrics
        if "eval_accuracy" in line
    }


def at_stake(
    kill: float, drawn: Sequence[Mapping[str, Any]], ended: Mapping[int, tuple[str, float]]
) -> set[int]:
    """Groups of the training source that were finished before a moment and had no outcome at it."""
    finished = {
        group
        for line in drawn
        if line["what"] == "finished" and line["source"] == SOURCE and line["at"] <= kill
        for group in line["groups"]
    }
    return {group for group in finished if group not in ended or ended[group][1] > kill}


def kept(
    kills: Sequence[float],
    drawn: Sequence[Mapping[str, Any]],
    ended: Mapping[int, tuple[str, float]],
) -> dict[str, int]:
    """Of all finished groups that were at stake at some kill: how many were finished again, were
    dropped, were kept.

    Those that have no outcome at the end, because the run ended before their step, count as kept
    where they were not finished again.
    """
    counts: collections.Counter[str] = collections.Counter(at_stake=0, again=0, dropped=0, kept=0)
    again = repeated(drawn, "finished", SOURCE)
    for kill in kills:
        for group in at_stake(kill, drawn, ended):
            counts["at_stake"] += 1
            if any(at > kill and number == group for at, number in again):
                counts["again"] += 1
            elif group in ended and ended[group][0] != "trained":
                counts["dropped"] += 1
            else:
                counts["kept"] += 1
    return dict(counts)


def equal_losses(
    mine: Iterable[Mapping[str, Any]], undisturbed: Iterable[Mapping[str, Any]]
) -> tuple[int, int]:
    """Steps that both have, and those of them with the same loss, bit for bit."""
    mine_by_step, others_by_step = (
        {line["step"]: line["loss"] for line in lines if "loss" in line}
        for lines in (mine, undisturbed)
    )
    both = [step for step in mine_by_step if step in others_by_step]
    return len(both), sum(mine_by_step[step] == others_by_step[step] for step in both)


def _groups(table: Any) -> list[int]:
    """The groups of a file: one entry for each row at position 0."""
    ids, positions = table.column(GROUP_ID).to_pylist(), table.column(POSITION).to_pylist()
    return [group for group, position in zip(ids, positions, strict=True) if position == 0]
