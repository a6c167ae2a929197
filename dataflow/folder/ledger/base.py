"""The calls of a ledger: each is a transaction in the process that has the file open, or a message
to it.

Over 600 lines: one class, so that each call stands beside the statements of SQL that it shares.
"""

import json
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from dataflow.folder.ledger.methods import JsonMap, Method, transacted
from dataflow.folder.ledger.records import (
    Fate,
    InFlight,
    MadeStep,
    OutcomeCounts,
    PlannedStep,
    some,
)
from dataflow.folder.ledger.schema import PLACES, STATES, LedgerError
from dataflow.folder.placing import Placing
from dataflow.system.files import to_json

Outcome: TypeAlias = tuple[str, int, str, str, int | None, str | None]
"""source, group_id, node, outcome, step, reason."""

_ADVANCE = {
    state: (
        f"UPDATE groups SET state = '{state}' WHERE source = ? AND group_id = ? AND state IN "
        f"({', '.join(repr(earlier) for earlier in STATES[:rank])})"
    )
    for rank, state in enumerate(STATES)
    if rank > 0
}
"""How groups move forward to a state; those that are there or further are left alone."""
_OUTCOME = (
    "INSERT INTO outcomes (source, group_id, node, outcome, step, reason) VALUES (?, ?, ?, ?, ?, ?)"
)
_STEP = (
    "INSERT INTO steps (node, step, version, source, metrics, checkpoint, at) VALUES (?, ?, ?, ?,"
    " ?, ?, ?)"
)
_STEP_KEYS = "node, step, version, source, metrics, checkpoint, at"
_OUTCOME_KEYS = "source, group_id, node, outcome, step, reason"
_HAS_PLACES = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'places'"
_OF_STEP = re.compile(
    r"(?:checkpoints|rollouts)/(?:(?P<node>[^/]+)/)?step-(?P<step>\d+)(?:\.arrow)?"
)


class BaseLedger(ABC):
    """What became of every prompt group; for the process that opened it alone, and there for one
    thread, but `flush`, `pack` and `wal_bytes`.

    A group is (source, group_id). It goes issued -> generating -> generated -> scored, and then has
    one outcome for each sink that consumes its source: trained at a step, evaluated at a step, or
    dropped for a reason. For each sink, at any moment:

        issued = trained + evaluated + dropped (by reason) + in flight
        no group has two outcomes for one sink

    Each call is one transaction. Errors of all: LedgerError.
    """

    _db: sqlite3.Connection
    """Only where the file is open: the calls run there."""
    _clock: Callable[[], float]

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where the file is."""
        self._owner = os.getpid()

    @abstractmethod
    def do(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, all or nothing, or have it run."""

    # Groups, from their issue to their outcome

    @transacted("issue groups", writes=True)
    def issue(self, source: str, prompts: Collection[tuple[int, str]]) -> None:
        """Record new groups as (group_id, prompt_id), numbered on from the last; known ones stay as
        they are.

        Errors: LedgerError when a number is skipped, or was issued for another prompt.
        """
        following = self.next_group_id(source)
        new: list[tuple[str, int, str]] = []
        for number, prompt_id in prompts:
            group, prompt = int(number), str(prompt_id)
            if group < following:
                self._check_same_prompt(source, group, prompt)
            elif group == following + len(new):
                new.append((source, group, prompt))
            else:
                raise LedgerError(
                    f"source '{source}' issued group {group} where {following + len(new)} is"
                    " the next; number groups from next_group_id() on, in order and without gaps"
                )
        self._db.executemany("INSERT INTO groups VALUES (?, ?, ?, 'issued', 1)", new)

    @transacted("advance groups to {state}", writes=True, is_posted=True)
    def advance(self, source: str, group_ids: Collection[int], state: str) -> None:
        """Move groups forward to `state`; those that are there or further stay: a redelivery
        changes nothing.

        Errors: LedgerError for groups that were never issued; where a service has the ledger, with
        a later call.
        """
        if state not in _ADVANCE:
            raise LedgerError(
                f"groups cannot advance to '{state}'; use one of {list(_ADVANCE)} or an outcome"
            )
        ids = [int(group) for group in group_ids]
        moved = self._db.executemany(_ADVANCE[state], [(source, group) for group in ids])
        if moved.rowcount == len(ids):
            return
        following = self.next_group_id(source)
        if unknown := [group for group in ids if not 0 <= group < following]:
            raise LedgerError(
                f"groups {some(unknown)} of '{source}' were never issued (the next one is"
                f" {following}); issue() them first"
            )

    @transacted("commit step {step} of '{node}'", writes=True)
    def commit_step(
        self,
        node: str,
        step: int,
        *,
        version: int,
        source: str,
        trained: Collection[int],
        dropped: Mapping[int, str] | None = None,
        metrics: JsonMap | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Record an optimiser step and the outcome of every group it consumed or gave up: all or
        nothing.

        version: of the weights after the step. Errors: LedgerError when the step is not the next
        one of `node`, or a group has an outcome for `node` already or was never issued; then
        nothing is recorded.
        """
        last = self.last_step(node)
        if step != last + 1:
            raise LedgerError(
                f"'{node}' committed step {step} but its last one is {last}; commit step"
                f" {last + 1}, or roll_back_to() an earlier one first"
            )
        outcomes = _ended(node, source, "trained", trained, int(step))
        outcomes += _dropped(node, source, dropped or {}, int(step))
        values = (node, int(step), int(version), source, to_json(metrics or {}), checkpoint)
        self._db.execute(_STEP, (*values, self._clock()))
        self._end(node, source, outcomes)

    @transacted("drop groups of '{node}'", writes=True)
    def drop(
        self, node: str, source: str, reasons: Mapping[int, str], *, step: int | None = None
    ) -> None:
        """Give groups up, each for a reason; with `step` None they stay dropped through any roll
        back.

        step: that they would have been trained at; it may be the next one, which is not committed
        yet. Errors: LedgerError when a group has an outcome for `node` already or was never issued.
        """
        self._end(node, source, _dropped(node, source, reasons, step))

    @transacted("record the evaluation at step {step}", writes=True)
    def commit_round(self, node: str, step: int, groups: Mapping[str, Collection[int]]) -> None:
        """Record a round: the groups that an evaluation read of each source, under the weights of
        `step`. Errors: as drop().
        """
        for source, group_ids in groups.items():
            self._end(node, source, _ended(node, source, "evaluated", group_ids, int(step)))

    # Steps

    @transacted("record the checkpoint of step {step}", writes=True)
    def record_checkpoint(self, node: str, step: int, checkpoint: str | None) -> None:
        """Note where the checkpoint of a committed step stands; None: nowhere any more. Errors:
        LedgerError without such a step.
        """
        update = "UPDATE steps SET checkpoint = ? WHERE node = ? AND step = ?"
        if self._db.execute(update, (checkpoint, node, int(step))).rowcount != 1:
            raise LedgerError(
                f"'{node}' has a checkpoint of step {step}, which it did not commit;"
                " commit the step first"
            )

    def roll_back_to(self, step: int, node: str) -> list[PlannedStep]:
        """Take back every step of `node` after `step`: its groups are scored, and in flight again.

        The abandoned line stays readable. Returns replay_plan(): what to train again, in order.
        A roll back to the last step takes nothing back, and records that the run went on from
        there. Errors: LedgerError when `node` never came to `step`.
        """
        self.roll_back(step, node)
        return self.replay_plan(node)

    @transacted("roll '{node}' back to step {step}", writes=True)
    def roll_back(self, step: int, node: str) -> None:
        """Move the steps after this one, and their outcomes, to a new abandoned line; forget who
        has their files.
        """
        last = self.last_step(node)
        if not 0 <= step <= last:
            raise LedgerError(
                f"'{node}' cannot go back to step {step}: its last one is {last}; use an older"
                " checkpoint"
            )
        line = self._db.execute(
            "INSERT INTO lines (node, to_step, from_step, at) VALUES (?, ?, ?, ?)",
            (node, int(step), last, self._clock()),
        ).lastrowid
        for table, keys in (("outcomes", _OUTCOME_KEYS), ("steps", _STEP_KEYS)):
            later = f"FROM {table} WHERE node = ? AND step > ?"
            copied = f"INSERT INTO abandoned_{table} (line, {keys}) SELECT ?, {keys} {later}"
            self._db.execute(copied, (line, node, int(step)))
            self._db.execute(f"DELETE {later}", (node, int(step)))
        self._forget_places(node, step)

    @transacted("plan the replay")
    def replay_plan(self, node: str) -> list[PlannedStep]:
        """What abandoned lines made after the last step of `node`, while it fits: groups and drops
        per step, to repeat.
        """
        step = self.last_step(node)
        outcomes = "SELECT source, group_id FROM outcomes WHERE node = ?"
        used = set(self._db.execute(outcomes, (node,)))
        plan: list[PlannedStep] = []
        while (planned := self._planned(node, step + 1)) is not None:
            groups = {(planned.source, group) for group in (*planned.trained, *planned.dropped)}
            if groups & used:
                break
            used |= groups
            plan.append(planned)
            step += 1
        return plan

    @transacted("read the last step")
    def last_step(self, node: str) -> int:
        """The last committed step of `node`; 0 before the first."""
        return int(self._value("SELECT coalesce(max(step), 0) FROM steps WHERE node = ?", node))

    @transacted("read the last step")
    def furthest_step(self, node: str) -> int:
        """The last step that `node` ever committed, taken back or not; 0 before the first."""
        ever = "SELECT coalesce(max(from_step), 0) FROM lines WHERE node = ?"
        return max(self.last_step(node), int(self._value(ever, node)))

    @transacted("list the steps")
    def steps(self, node: str, after: int = 0, upto: int | None = None) -> list[MadeStep]:
        """The committed steps of `node` above `after` and not above `upto`, with what each
        consumed, ascending.
        """
        key = {"node": node, "after": after, "upto": upto}
        within = "WHERE node = :node AND step > :after AND (:upto IS NULL OR step <= :upto)"
        trained: dict[int, list[int]] = {}
        dropped: dict[int, dict[int, str]] = {}
        for step, group, reason in self._db.execute(
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
            for step, source, metrics in self._db.execute(
                f"SELECT step, source, metrics FROM steps {within} ORDER BY step", key
            )
        ]

    @transacted("list when steps of '{node}' were made")
    def step_times(self, node: str, after: int = 0) -> list[tuple[int, float]]:
        """The committed steps of `node` above `after`, and when each was, in seconds since 1970;
        ascending.
        """
        query = "SELECT step, at FROM steps WHERE node = ? AND step > ? ORDER BY step"
        return [(int(step), float(at)) for step, at in self._db.execute(query, (node, after))]

    @transacted("read the drops of a step")
    def drops_at(self, node: str, step: int) -> dict[int, str]:
        """Groups that `node` gave up for a step, and why; drops of the next one may be known before
        it is made.
        """
        query = (
            "SELECT group_id, reason FROM outcomes WHERE node = ? AND step = ? AND outcome ="
            " 'dropped' ORDER BY group_id"
        )
        return dict(self._db.execute(query, (node, step)))

    @transacted("read the last round")
    def last_round(self, node: str) -> int | None:
        """Step of the last round that evaluation `node` has recorded; None before the first."""
        query = "SELECT max(step) FROM outcomes WHERE node = ? AND outcome = 'evaluated'"
        step: int | None = self._value(query, node)
        return step

    @transacted("look a round up")
    def is_judged(self, source: str, step: int) -> bool:
        """Whether every sink of `source` has recorded its round of this step, or a later one."""
        waiting = (
            "SELECT count(*) FROM consumers WHERE source = ? AND node NOT IN "
            "(SELECT node FROM outcomes WHERE source = ? AND outcome = 'evaluated' AND step >= ?)"
        )
        return not self._value(waiting, source, source, step)

    # What is known of groups

    @transacted("read the next group id")
    def next_group_id(self, source: str) -> int:
        """The number that `source` gives to its next group: one above its last; 0 at first."""
        return int(
            self._value("SELECT max(group_id) + 1 FROM groups WHERE source = ?", source) or 0
        )

    @transacted("list the sources")
    def sources(self, node: str | None = None) -> list[str]:
        """The sources whose groups `node` consumes; those of all sinks for None."""
        query = (
            "SELECT DISTINCT source FROM consumers WHERE :node IS NULL OR node = :node"
            " ORDER BY source"
        )
        return [source for (source,) in self._db.execute(query, {"node": node})]

    @transacted("look a group up")
    def fates(self, source: str, group_id: int) -> list[Fate]:
        """What each sink did with a group; none while it is in flight."""
        rows = self._db.execute(
            "SELECT node, outcome, step, reason FROM outcomes WHERE source = ? AND group_id = ?"
            " ORDER BY node",
            (source, int(group_id)),
        )
        return [
            Fate(node=node, outcome=outcome, step=step, reason=reason)
            for node, outcome, step, reason in rows
        ]

    @transacted("list groups in flight")
    def in_flight(
        self, source: str, node: str | None = None, among: Collection[int] | None = None
    ) -> list[InFlight]:
        """Groups of `source` that some sink still waits for, or that `node` does, in issue order;
        all while no sink is known.

        among: look at these alone, which takes no longer in a long run; None: at all that were ever
        issued.
        """
        chosen = "" if among is None else "group_id IN (SELECT value FROM json_each(:among)) AND"
        rows = self._db.execute(
            f"SELECT group_id, prompt_id, state FROM groups g WHERE source = :source AND {chosen} ("
            " SELECT count(*) FROM outcomes o WHERE o.source = g.source AND o.group_id ="
            " g.group_id AND (:node IS NULL OR o.node = :node)) < CASE WHEN :node IS NULL THEN"
            " max(1, (SELECT count(*) FROM consumers WHERE source = :source)) ELSE 1 END ORDER BY"
            " group_id",
            {
                "source": source,
                "node": node,
                "among": None if among is None else json.dumps([int(group) for group in among]),
            },
        )
        return [
            InFlight(group_id=group, prompt_id=prompt, state=state) for group, prompt, state in rows
        ]

    @transacted("count groups")
    def counts(self, node: str) -> OutcomeCounts:
        """What became of the groups of the sources that `node` consumes, counted from the rows."""
        sources = "SELECT source FROM consumers WHERE node = :node"
        key = {"node": node}
        totals = {"trained": 0, "evaluated": 0}
        dropped: dict[str, int] = {}
        for outcome, reason, number in self._db.execute(
            "SELECT outcome, reason, count(*) FROM outcomes WHERE node = :node GROUP BY outcome,"
            " reason",
            key,
        ):
            if outcome == "dropped":
                dropped[reason] = number
            else:
                totals[outcome] = number
        waiting = dict(
            self._db.execute(
                f"SELECT state, count(*) FROM groups g WHERE source IN ({sources}) AND NOT EXISTS ("
                " SELECT 1 FROM outcomes o WHERE o.source = g.source AND o.group_id = g.group_id"
                " AND o.node = :node) GROUP BY state",
                key,
            )
        )
        return OutcomeCounts(
            issued=self._value(
                "SELECT count(*) FROM groups WHERE source IN"
                " (SELECT source FROM consumers WHERE node = ?)",
                node,
            ),
            trained=totals["trained"],
            evaluated=totals["evaluated"],
            dropped=dropped,
            in_flight={state: waiting[state] for state in STATES if state in waiting},
        )

    def verdict(self, node: str) -> str:
        """The law of the ledger in figures, for one sink."""
        counts = self.counts(node)
        return f"{'clean' if counts.missing == 0 else 'BROKEN'}: {counts}"

    # What the run says of itself, and where its files lie

    @transacted("put down what the run is", writes=True)
    def set_facts(self, facts: JsonMap) -> None:
        """Put down what the run says of itself, by name, in place of what it said before under
        these names.
        """
        rows = [(name, to_json(value)) for name, value in facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    @transacted("read what the run is")
    def facts(self) -> dict[str, Any]:
        """What the run says of itself, by name."""
        rows = self._db.execute("SELECT name, value FROM facts")
        return {name: json.loads(value) for name, value in rows}

    @transacted("note where '{path}' lies", writes=True)
    def set_place(self, path: str, host: str) -> None:
        """What stands at a path counts on this host, and on no other.

        A path without a row is in the scheduler's folder, or nowhere. Rows of the ledger say it, so
        that they are written in their turn, by the newest attempt alone, and taken back with the
        steps that they belong to.
        """
        self._db.execute(PLACES)
        self._db.execute("DELETE FROM places WHERE path = ?", (path,))
        self._db.execute("INSERT INTO places VALUES (?, ?)", (path, host))

    @transacted("list where files lie")
    def places(self, prefix: str = "") -> dict[str, str]:
        """By path that begins so, the host that has it; what nothing is noted of is not among
        them.
        """
        if not self._db.execute(_HAS_PLACES).fetchone():
            return {}
        query = "SELECT path, host FROM places WHERE substr(path, 1, ?) = ? ORDER BY path"
        return dict(self._db.execute(query, (len(prefix), prefix)))

    @transacted("look for returns")
    def least_return(self) -> int | None:
        """The earliest step that a trainer ever went back to, giving up later steps; None: none
        did.
        """
        step: int | None = self._value("SELECT min(to_step) FROM lines WHERE from_step > to_step")
        return step

    # The file

    @property
    def placing(self) -> Placing:
        """How what the process that opened it writes in the run folder gets its name."""
        return Placing()

    @abstractmethod
    def flush(self) -> None:
        """Bring all that was committed to the disk itself; from any thread, and whoever reads
        meanwhile.

        Called before a checkpoint is marked, so that no power cut leaves one whose step the ledger
        forgot. Errors: RunFolderError when the disk refuses.
        """

    @abstractmethod
    def pack(self, into: Path) -> None:
        """Write all that was committed, of one moment, into a file (`copying`); from any thread,
        and whoever writes meanwhile. Errors: LedgerError; RunFolderError; DeadlineError.
        """

    @property
    @abstractmethod
    def wal_bytes(self) -> int:
        """Size of the database's log: bounded, unless somebody reads in a transaction that does not
        end.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; what was committed stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise LedgerError(
                f"ledger '{self.path}' was opened by process {self._owner} and is used by"
                f" {os.getpid()}; open it anew in each process"
            )

    # Within a call

    def _value(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()[0]

    def _end(self, node: str, source: str, outcomes: list[Outcome]) -> None:
        """Insert outcomes; a group that has one has been scored, whatever message about it is still
        under way.
        """
        self._register(node, source)
        try:
            self._db.executemany(_OUTCOME, outcomes)
        except sqlite3.IntegrityError as error:
            self._db.execute("ROLLBACK")
            groups = [group for _, group, *_ in outcomes]
            raise LedgerError(self._conflict(node, source, groups, error)) from error
        self._db.executemany(_ADVANCE["scored"], [row[:2] for row in outcomes])

    def _register(self, node: str, source: str) -> None:
        """Note that `node` consumes the groups of `source`."""
        self._db.execute("INSERT OR IGNORE INTO consumers VALUES (?, ?)", (node, source))

    def _check_same_prompt(self, source: str, group: int, prompt: str) -> None:
        """LedgerError unless a known group was issued for this prompt."""
        row = self._db.execute(
            "SELECT prompt_id FROM groups WHERE source = ? AND group_id = ?", (source, group)
        ).fetchone()
        if row is None or row[0] != prompt:
            raise LedgerError(
                f"group {group} of '{source}' was issued for prompt {row and row[0]!r}, and now for"
                f" {prompt!r}; give every group a number of its own, from next_group_id() on"
            )

    def _conflict(
        self, node: str, source: str, groups: list[int], error: sqlite3.IntegrityError
    ) -> str:
        """Why outcomes were refused."""
        if double := {group for group in groups if groups.count(group) > 1}:
            return (
                f"'{node}' gave groups {some(double)} of '{source}' two outcomes in one call; give"
                " each one"
            )
        for group in groups:
            if not 0 <= group < self.next_group_id(source):
                return (
                    f"'{node}' ended group {group} of '{source}', which was never issued; issue()"
                    " it first"
                )
            for fate in self.fates(source, group):
                if fate.node == node:
                    return _ended_twice(source, group, fate)
        return (
            f"'{node}' gave outcomes of '{source}' that break a rule: {error}; look at the groups"
            " given"
        )

    def _planned(self, node: str, step: int) -> PlannedStep | None:
        """What the newest abandoned line that made `step` did in it."""
        row = self._db.execute(
            "SELECT line, source FROM abandoned_steps WHERE node = ? AND step = ? ORDER BY line"
            " DESC LIMIT 1",
            (node, step),
        ).fetchone()
        if row is None:
            return None
        line, source = row
        rows = self._db.execute(
            "SELECT group_id, reason FROM abandoned_outcomes WHERE line = ? AND node = ? AND step ="
            " ? ORDER BY group_id",
            (line, node, step),
        ).fetchall()
        return PlannedStep(
            step=step,
            source=source,
            trained=tuple(group for group, reason in rows if reason is None),
            dropped={group: reason for group, reason in rows if reason is not None},
        )

    def _forget_places(self, node: str, step: int) -> None:
        """The node's steps after this one were taken back: forget who has their files."""
        for path in self.places():
            match = _OF_STEP.fullmatch(path)
            if match and match["node"] in (None, node) and int(match["step"]) > step:
                self._db.execute("DELETE FROM places WHERE path = ?", (path,))


def _ended(
    node: str, source: str, outcome: str, group_ids: Iterable[int], step: int
) -> list[Outcome]:
    """Rows of groups that were trained or evaluated at a step."""
    return [(source, int(group), node, outcome, step, None) for group in group_ids]


def _dropped(node: str, source: str, reasons: Mapping[int, str], step: int | None) -> list[Outcome]:
    """Rows of groups that were given up."""
    return [
        (source, int(group), node, "dropped", step, str(reason))
        for group, reason in reasons.items()
    ]


def _ended_twice(source: str, group: int, fate: Fate) -> str:
    at = "" if fate.step is None else f" at step {fate.step}"
    because = f" ({fate.reason})" if fate.reason else ""
    return (
        f"'{fate.node}' would end group {group} of '{source}' twice: it was"
        f" {fate.outcome}{at}{because}; leave out groups that have an outcome"
    )
