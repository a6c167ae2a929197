"""The rules by which rows go through a graph: which groups start, leave and wait, in what order.
Pure, without tensors and sockets; a run and its simulation share them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

import pyarrow as pa

from dataflow.records import AnyArray
from dataflow.runtime import Batch
from dataflow.staleness import Bound, admit
from dataflow.tokens.ragged import group_slices

# How many rows an operator accepts before it has finished others.


_PROMPTS = 64
"""Of one source, that wait at a generator however few rollouts it decodes at once."""


def prompt_room(slots: int, waiting: Iterable[int]) -> int:
    """Prompts that a generator takes now: above 0 while any source has no prompt waiting there.

    slots: rollouts that it decodes at once; waiting: prompts of each of its sources that have not
    started.
    """
    return max(0, max(_PROMPTS, slots) - min(waiting, default=0))


def queue_prompts(asked: int | None, prompts_per_step: int, max_staleness: int) -> int:
    """Groups that wait at a trainer: as it was asked to, or those of the step under way and of all
    that may be ahead.

    >>> queue_prompts(None, prompts_per_step=32, max_staleness=4)
    192
    """
    return (max_staleness + 2) * prompts_per_step if asked is None else asked


def row_room(groups: int, group_rows: int, held: int, *, is_ready: bool) -> int:
    """Rows that a trainer takes now; never 0 while the next group in order is missing.

    groups: that may wait; group_rows: rows of one; held: rows that wait; is_ready: whether the next
    group is there.
    """
    return max(0 if is_ready else 1, groups * group_rows - held)


def starts(count: int, wanted: int, *, idle: bool, slots: int) -> bool:
    """Whether a group starts of which so many rollouts fit of those that it wants: it waits until
    all do, unless it is larger than a quarter of the slots or nothing else is at work (idle).

    >>> starts(8, 8, idle=False, slots=64), starts(7, 8, idle=False, slots=64)
    (True, False)
    >>> starts(7, 8, idle=True, slots=64)
    True
    """
    return count >= wanted or (count > 0 and (idle or wanted * 4 > slots))


# How many groups a source issues at a time, and which is the last.


ROWS_AT_ONCE = 32
"""Groups that leave a source together, at most."""


def issue_until(following: int, *, last: int | None, needed: int | None, dropped: int) -> int:
    """The number before which groups may be issued now, from `following` on.

    last: groups that there are; needed: that the steps of the run consume, None where nobody says;
    dropped: groups that the trainer gave up, each of which takes another in its place.

    >>> issue_until(60, last=None, needed=64, dropped=2)
    66
    """
    stops = (last, None if needed is None else needed + dropped)
    return min([following + ROWS_AT_ONCE, *(stop for stop in stops if stop is not None)])


# When complete groups leave a generator: together with those that are complete soon after.


LINGER_STEPS = 4
"""Decode steps after the first complete group: others often follow."""


def enough(slots: int, group_size: int) -> int:
    """Complete groups that leave without waiting for others: a quarter of those that are decoded at
    once.
    """
    return max(1, slots // (4 * group_size))


def leaves(complete: int, since: int, *, enough: int, is_awaited: bool = False) -> bool:
    """Whether complete groups leave now. since: decode steps at whose end some were complete.
    is_awaited: see `Admission.is_awaited`, of any of them.

    >>> leaves(1, since=5, enough=8), leaves(8, since=1, enough=8), leaves(1, since=4, enough=8)
    (True, True, False)
    """
    return is_awaited or since > LINGER_STEPS or complete >= enough


# Where a step is cut into parts, which a trainer computes while later groups are on their way: by
# the order of groups and their tokens alone, so that a step that is made again is cut alike.


STEP_PARTS = 8
"""Of a step, at most."""


def begins_early(max_staleness: int, *, on_cpu: bool) -> bool:
    """Whether a trainer computes before all groups of a step are there. Where no node runs ahead of
    another, those on one machine have all its cores in turn.
    """
    return max_staleness > 0 or not on_cpu


def ends_part(groups: int, tokens: float, *, step_groups: int, most: float) -> bool:
    """Whether so many groups of as many tokens, since the last cut, are computed without waiting
    for the next, which would be too much for one micro-batch of each rank. step_groups: of the
    whole step. most: tokens of such a micro-batch on all ranks; inf: all groups wait.

    >>> [ends_part(groups, 900, step_groups=32, most=1000) for groups in (3, 4, 8, 10)]
    [False, True, True, False]
    """
    return groups * STEP_PARTS >= step_groups and tokens * (groups + 1) > most * groups


# Which of several nodes that share devices has them.


def decide(*, awake: bool, wants: bool, wanted: bool) -> Literal["take", "give", "stay"]:
    """What a node does about the turn. wants: it has work that needs the devices; wanted: another
    node has.

    Nobody gives the turn up before its work is done, so that memory moves once for each turn; nor
    before another one asks for it, as there may be more work by then.
    """
    if awake:
        return "give" if wanted and not wants else "stay"
    return "take" if wants else "stay"


# Which waiting groups start now: pure policy over sources, versions, slots and memory; it knows no
# tensors.


class Waiting(Protocol):
    """What admission needs to know of a group."""

    @property
    def group_id(self) -> int:
        """Issue number within its source."""

    @property
    def min_version(self) -> int:
        """Not started under older weights."""

    @property
    def unstarted(self) -> int:
        """Rollouts that have no slot yet."""


G = TypeVar("G", bound=Waiting)


@dataclass
class Admission(Generic[G]):
    """Queues of waiting groups by source, and the rule by which they leave; sources without a bound
    go first.
    """

    bounds: Mapping[str, Bound]
    """Sources that must not run ahead of their trainer."""
    in_flight: int | None = None
    """Most groups between admission and training; None: as many as the bound allows."""
    sources: dict[str, deque[G]] = field(default_factory=dict)

    def add(self, source: str, group: G) -> None:
        """Put a group into its source's queue, in the order of issue: one issued again comes before
        later ones.
        """
        queue = self.sources.setdefault(source, deque())
        at = len(queue)
        while at and queue[at - 1].group_id > group.group_id:
            at -= 1
        queue.insert(at, group)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self.sources.values())

    def may_start(self, source: str, group: G, version: int, dropped: int) -> bool:
        """Whether the group may start under weights of this version."""
        if group.min_version > version:
            return False
        bound = self.bounds.get(source)
        if bound is None:
            return True
        if (
            bound.steps is not None
            and group.group_id - dropped >= bound.steps * bound.prompts_per_step
        ):
            return False
        return admit(
            group.group_id,
            dropped,
            version,
            bound.prompts_per_step,
            bound.max_staleness,
            self.in_flight,
        )

    def is_awaited(self, source: str, group: G, version: int, dropped: int) -> bool:
        """Whether the step that a trainer of so many makes next lacks the group, though it was
        started for it earlier: the trainer has nothing else to compute.
        """
        bound = self.bounds.get(source)
        return (
            bound is not None
            and bound.max_staleness > 0
            and admit(group.group_id, dropped, version, bound.prompts_per_step, 0)
        )

    def has_due(self, version: int, dropped: int) -> bool:
        """Whether the first group of some source may start under weights of this version."""
        return bool(self.due(version, dropped))

    def due(self, version: int, dropped: int) -> list[G]:
        """The first group of each source, where it may start under weights of this version."""
        return [
            queue[0]
            for source, queue in self.sources.items()
            if queue and self.may_start(source, queue[0], version, dropped)
        ]

    def may_go_on(
        self, source: str, group: G, versions: AnyArray, newest: int, dropped: int
    ) -> bool:
        """Whether one of its rollouts may go on that earlier processes began, its tokens drawn by
        these versions [n].

        Its age counts from its oldest token: it has to be trained within the bound as if it were
        started under that version. newest: no later version was there before this process; tokens
        of one are of a line of weights that was taken back.
        """
        if not len(versions):
            return True
        oldest, bound = int(versions.min()), self.bounds.get(source)
        if int(versions.max()) > newest or group.min_version > oldest:
            return False
        return bound is None or admit(
            group.group_id, dropped, oldest, bound.prompts_per_step, bound.max_staleness
        )

    def start(
        self,
        *,
        free: int,
        slots: int,
        idle: bool,
        version: int,
        dropped: int,
        fit: Callable[[G, int], int],
        prepare: Callable[[G], None] = lambda group: None,
    ) -> Iterator[tuple[str, G, int]]:
        """Source, group and how many of its rollouts start now; a group leaves its queue once all
        have started.

        A group waits until `starts` lets it, in parts if need be.

        free: slots that rollouts may start in. idle: nothing is at work. fit: how many of so many
        rollouts of a group fit into memory beside what this call has yielded; at least 1 when idle.
        prepare: called before a group is looked at, each time; a group may have no rollout left to
        start after it, and then leaves too.
        """
        for source in sorted(self.sources, key=lambda source: source in self.bounds):
            queue = self.sources[source]
            while queue and free and self.may_start(source, queue[0], version, dropped):
                group = queue[0]
                prepare(group)
                unstarted = group.unstarted
                count = fit(group, min(unstarted, free))
                if not starts(count, unstarted, idle=idle, slots=slots):
                    return
                if count == unstarted:
                    queue.popleft()
                free -= count
                idle = False
                yield source, group, count
                if count < unstarted:
                    return


# The trainer's reorder buffer: groups arrive in any order and leave in order of issue, without a
# gap.


T = TypeVar("T")


class InOrder(Generic[T]):
    """Groups by number.

    >>> held = InOrder[str]()
    >>> held.put(1, "b"), held.take(), held.put(0, "a"), held.take(), held.take(), held.put(0, "a")
    (True, None, True, 'a', 'b', False)
    """

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        """first: the first group to give out. holes: groups after it that will never come, because
        they were dropped or trained before a restart.
        """
        self.following = first
        """The group that is to leave next."""
        self._holes = {hole for hole in holes if hole >= first}
        self._held: dict[int, T] = {}
        self._pass_holes()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_ready(self) -> bool:
        """Whether the next group is here."""
        return self.following in self._held

    def put(self, number: int, group: T) -> bool:
        """Take one in; False for one that was here before, or that was never to come."""
        if number < self.following or number in self._held or number in self._holes:
            return False
        self._held[number] = group
        return True

    def take(self) -> T | None:
        """The next in order; None while it is not here."""
        group = self._held.pop(self.following, None)
        if group is not None:
            self.following += 1
            self._pass_holes()
        return group

    def rest(self) -> list[T]:
        """Everything that is left, in order; for the end of the rows."""
        groups = [self._held[number] for number in sorted(self._held)]
        self._held.clear()
        return groups

    def _pass_holes(self) -> None:
        while self.following in self._holes:
            self._holes.remove(self.following)
            self.following += 1


@dataclass(frozen=True)
class QueuedGroup:
    """The rollouts of one prompt."""

    group_id: int
    records: pa.RecordBatch
    release: Callable[[], None]
    """To be called once, when the group has been trained or dropped."""


class ReorderBuffer(InOrder[QueuedGroup]):
    """Groups by group_id, given out one after the other without a gap."""

    def __init__(self, first: int = 0, holes: Iterable[int] = ()) -> None:
        super().__init__(first, holes)
        self.rows = 0
        """Rows it holds."""

    def add(self, batch: Batch) -> int:
        """Take the groups of a batch in, releasing those that were here before; the number of new
        rows.
        """
        new = 0
        for group_id, first, count in group_slices(batch.records):
            records = batch.records.slice(first, count)
            if self.put(group_id, QueuedGroup(group_id, records, partial(batch.release, group_id))):
                new += count
            else:
                batch.release(group_id)
        self.rows += new
        return new

    def take(self) -> QueuedGroup | None:
        """The next group in order; None while it is not here."""
        group = super().take()
        if group is not None:
            self.rows -= group.records.num_rows
        return group

    def rest(self) -> list[QueuedGroup]:
        """Everything that is left, in order; for the end of the rows."""
        self.rows = 0
        return super().rest()
