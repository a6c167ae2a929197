"""Which waiting groups start now: pure policy over sources, versions, slots and memory; it knows no
tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dataflow.records import AnyArray
from dataflow.rules.room import starts
from dataflow.staleness import Bound, admit


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
