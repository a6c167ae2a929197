"""What the ledger knows, counted and listed from its rows: no counter is kept anywhere else."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.folder.ledger.schema import STATES


@dataclass(frozen=True, kw_only=True)
class OutcomeCounts:
    """What became of the groups that one sink (a trainer or an evaluation) is to consume."""

    issued: int
    """Groups issued by the sources of the sink."""
    trained: int
    """Groups consumed by a step of the surviving line."""
    evaluated: int
    """Groups read by an evaluation."""
    dropped: Mapping[str, int]
    """Groups given up, by reason."""
    in_flight: Mapping[str, int]
    """Groups without an outcome yet, by state."""

    @property
    def missing(self) -> int:
        """Groups lost (above 0) or counted twice (below 0); 0 is the law of the ledger."""
        accounted = (
            self.trained
            + self.evaluated
            + sum(self.dropped.values())
            + sum(self.in_flight.values())
        )
        return self.issued - accounted

    def __str__(self) -> str:
        done = f"{self.trained:,} trained"
        if self.evaluated:
            done = f"{self.evaluated:,} evaluated" + (f" + {done}" if self.trained else "")
        return (
            f"{self.issued:,} group{'' if self.issued == 1 else 's'} issued"
            f" {'=' if self.missing == 0 else '!='} {done} + {_sum(self.dropped):,}"
            f" dropped{_parts(self.dropped)} + {_sum(self.in_flight):,} in"
            f" flight{_parts(self.in_flight)}"
        )


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A group that some sink still waits for."""

    group_id: int
    """Issue number within the source."""
    prompt_id: str
    """Which task it is."""
    state: str
    """issued | generating | generated | scored."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step that an abandoned line made, to be made again from its rollouts file."""

    step: int
    """Step of the trainer, 1, 2, ..."""
    source: str
    """Where its groups came from."""
    trained: tuple[int, ...]
    """Groups it consumed, in issue order."""
    dropped: Mapping[int, str]
    """Groups it gave up, with the reason."""


@dataclass(frozen=True, kw_only=True)
class MadeStep(PlannedStep):
    """A committed step of the surviving line."""

    metrics: Mapping[str, Any]
    """As the commit was given them: its line in metrics.jsonl, without the seconds that recording
    took."""


@dataclass(frozen=True, kw_only=True)
class Fate:
    """The outcome of a group for one sink."""

    node: str
    """The sink."""
    outcome: str
    """trained | evaluated | dropped."""
    step: int | None
    """Of the sink; None for a drop outside any step."""
    reason: str | None
    """Of a drop."""

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.outcome} by {self.node}{at}" + (f" ({self.reason})" if self.reason else "")


def counts(db: sqlite3.Connection, node: str) -> OutcomeCounts:
    """Count the rows of all groups that `node` consumes."""
    sources = "SELECT source FROM consumers WHERE node = :node"
    key = {"node": node}
    issued = db.execute(f"SELECT count(*) FROM groups WHERE source IN ({sources})", key).fetchone()[
        0
    ]
    totals = {"trained": 0, "evaluated": 0}
    dropped: dict[str, int] = {}
    for outcome, reason, number in db.execute(
        "SELECT outcome, reason, count(*) FROM outcomes WHERE node = ? GROUP BY outcome, reason",
        (node,),
    ):
        if outcome == "dropped":
            dropped[reason] = number
        else:
            totals[outcome] = number
    waiting = dict(
        db.execute(
            f"SELECT state, count(*) FROM groups g WHERE source IN ({sources}) AND NOT EXISTS ("
            " SELECT 1 FROM outcomes o WHERE o.source = g.source AND o.group_id = g.group_id AND"
            " o.node = :node) GROUP BY state",
            key,
        )
    )
    return OutcomeCounts(
        issued=issued,
        trained=totals["trained"],
        evaluated=totals["evaluated"],
        dropped=dropped,
        in_flight={state: waiting[state] for state in STATES if state in waiting},
    )


def in_flight(
    db: sqlite3.Connection, source: str, node: str | None = None, among: Iterable[int] | None = None
) -> list[InFlight]:
    """Groups of `source` that some sink, or `node`, still waits for, in issue order; all while no
    sink is known.

    among: look at these alone, which costs what they cost; None: at all that were ever issued.
    """
    chosen = "" if among is None else "group_id IN (SELECT value FROM json_each(:among)) AND"
    rows = db.execute(
        f"SELECT group_id, prompt_id, state FROM groups g WHERE source = :source AND {chosen} ("
        " SELECT count(*) FROM outcomes o WHERE o.source = g.source AND o.group_id = g.group_id"
        " AND (:node IS NULL OR o.node = :node)) < CASE WHEN :node IS NULL THEN max(1, (SELECT"
        " count(*) FROM consumers WHERE source = :source)) ELSE 1 END ORDER BY group_id",
        {
            "source": source,
            "node": node,
            "among": None if among is None else json.dumps(list(among)),
        },
    )
    return [
        InFlight(group_id=group, prompt_id=prompt, state=state) for group, prompt, state in rows
    ]


def facts(db: sqlite3.Connection) -> dict[str, Any]:
    """What the run says of itself."""
    return {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM facts")}


def steps(db: sqlite3.Connection, node: str, after: int, upto: int | None) -> list[MadeStep]:
    """The steps of `node` above `after` and not above `upto`, ascending."""
    key = {"node": node, "after": after, "upto": upto}
    within = "WHERE node = :node AND step > :after AND (:upto IS NULL OR step <= :upto)"
    trained: dict[int, list[int]] = {}
    dropped: dict[int, dict[int, str]] = {}
    for step, group, reason in db.execute(
        f"SELECT step, group_id, reason FROM outcomes {within} ORDER BY step, group_id", key
    ):
        if reason is None:
            trained.setdefault(step, []).append(group)
        else:
            dropped.setdefault(step, {})[group] = reason
    return [
        MadeStep(
            step=step,
            source=source,
            trained=tuple(trained.get(step, ())),
            dropped=dropped.get(step, {}),
            metrics=json.loads(metrics),
        )
        for step, source, metrics in db.execute(
            f"SELECT step, source, metrics FROM steps {within} ORDER BY step", key
        )
    ]


def furthest_return(db: sqlite3.Connection, node: str) -> int:
    """The last step from which `node` ever went back; 0 where it did not."""
    row = db.execute(
        "SELECT coalesce(max(from_step), 0) FROM lines WHERE node = ?", (node,)
    ).fetchone()
    return int(row[0])


def step_times(db: sqlite3.Connection, node: str, after: int) -> list[tuple[int, float]]:
    """The steps of `node` above `after`, and when each was committed, in seconds since 1970;
    ascending.
    """
    query = "SELECT step, at FROM steps WHERE node = ? AND step > ? ORDER BY step"
    return [(int(step), float(at)) for step, at in db.execute(query, (node, after))]


def drops_at(db: sqlite3.Connection, node: str, step: int) -> dict[int, str]:
    """Groups that `node` gave up for a step, which may be the one that it has not committed yet."""
    return dict(
        db.execute(
            "SELECT group_id, reason FROM outcomes WHERE node = ? AND step = ? AND outcome ="
            " 'dropped' ORDER BY group_id",
            (node, step),
        )
    )


def is_judged(db: sqlite3.Connection, source: str, step: int) -> bool:
    """Whether every sink of a source has evaluated groups of it at this step, or later."""
    waiting = db.execute(
        "SELECT count(*) FROM consumers WHERE source = ? AND node NOT IN "
        "(SELECT node FROM outcomes WHERE source = ? AND outcome = 'evaluated' AND step >= ?)",
        (source, source, step),
    ).fetchone()
    return not waiting[0]


def last_round(db: sqlite3.Connection, node: str) -> int | None:
    """Step of the last round that an evaluation has recorded; None before the first."""
    step = db.execute(
        "SELECT max(step) FROM outcomes WHERE node = ? AND outcome = 'evaluated'", (node,)
    ).fetchone()[0]
    return None if step is None else int(step)


def sources(db: sqlite3.Connection, node: str | None) -> list[str]:
    """The sources whose groups `node` consumes, or anybody."""
    query = (
        "SELECT DISTINCT source FROM consumers WHERE :node IS NULL OR node = :node ORDER BY source"
    )
    return [source for (source,) in db.execute(query, {"node": node})]


def fates(db: sqlite3.Connection, source: str, group_id: int) -> list[Fate]:
    """What each sink did with a group."""
    rows = db.execute(
        "SELECT node, outcome, step, reason FROM outcomes WHERE source = ? AND group_id = ? ORDER"
        " BY node",
        (source, group_id),
    )
    return [
        Fate(node=node, outcome=outcome, step=step, reason=reason)
        for node, outcome, step, reason in rows
    ]


def replay_plan(db: sqlite3.Connection, node: str) -> list[PlannedStep]:
    """The steps that abandoned lines of `node` made after its last committed one, while they
    fit.
    """
    step = db.execute(
        "SELECT coalesce(max(step), 0) FROM steps WHERE node = ?", (node,)
    ).fetchone()[0]
    used = set(db.execute("SELECT source, group_id FROM outcomes WHERE node = ?", (node,)))
    plan: list[PlannedStep] = []
    while (planned := _planned(db, node, step + 1)) is not None:
        groups = {(planned.source, group) for group in (*planned.trained, *planned.dropped)}
        if groups & used:
            break
        used |= groups
        plan.append(planned)
        step += 1
    return plan


def _planned(db: sqlite3.Connection, node: str, step: int) -> PlannedStep | None:
    """What the newest abandoned line that made `step` did in it."""
    row = db.execute(
        "SELECT line, source FROM abandoned_steps WHERE node = ? AND step = ? ORDER BY line DESC"
        " LIMIT 1",
        (node, step),
    ).fetchone()
    if row is None:
        return None
    line, source = row
    rows = db.execute(
        "SELECT group_id, reason FROM abandoned_outcomes WHERE line = ? AND node = ? AND step = ?"
        " ORDER BY group_id",
        (line, node, step),
    ).fetchall()
    return PlannedStep(
        step=step,
        source=source,
        trained=tuple(group for group, reason in rows if reason is None),
        dropped={group: reason for group, reason in rows if reason is not None},
    )


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _parts(parts: Mapping[str, int]) -> str:
    return (
        f" ({', '.join(f'{number:,} {name}' for name, number in parts.items())})" if parts else ""
    )
