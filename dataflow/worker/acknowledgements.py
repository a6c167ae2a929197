"""Which groups a node answers for: from their arrival until all that they led to is acknowledged by
the next node.

So acknowledgements run from end to end: a prompt's comes back to its source only when its rollouts
were trained, dropped or evaluated. What has no outcome yet stands unacknowledged with every node
that it has passed, and comes again to a node that restarts. What comes twice is known by its group,
and done once.

Pure: calls in, calls of what acknowledges rows out; no socket, no clock.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Group = tuple[str, int]
"""Source and group_id."""


def replica_of(sender: str) -> int:
    """The number of a sending replica, as 1 of talk-1."""
    return int(sender.rpartition("-")[2])


@dataclass(slots=True)
class HeldGroup:
    """One group at one node: it is let go of when neither the runtime nor a next node has anything
    of it.
    """

    inside: set[str] = field(default_factory=set)
    """Sending nodes whose rows of it the runtime is not done with."""
    under_way: int = 0
    """Acknowledgements that next nodes owe."""
    acks: dict[tuple[str, str], Callable[[], None]] = field(default_factory=dict)
    """By sending node and sender, which is one of its replicas: acknowledges its rows of the
    delivery that stands for it."""


@dataclass
class Acknowledgements:
    """The groups that one node holds, or has passed on and not yet heard of again.

    One that comes again is not new. Of each sender the latest delivery stands for it from then on,
    and the one before is acknowledged: the sender that sent that is gone. Those of several senders
    all stand: any of them may be the only one that is asked for the group again.
    """

    released: Callable[[Group], None] = lambda group: None
    """Told of every group that the next nodes are done with."""
    repeated: Mapping[str, Callable[[int, str], None]] = field(default_factory=dict)
    """By source, told of a group that comes again, and by which sender, when all that it led to has
    left."""
    _held: dict[Group, HeldGroup] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def oldest(self) -> dict[str, int]:
        """By source, the first group that the runtime is not done with."""
        oldest: dict[str, int] = {}
        for (source, number), group in self._held.items():
            if group.inside:
                oldest[source] = min(number, oldest.get(source, number))
        return oldest

    def askers(self, source: str, group: int) -> list[str]:
        """Who has sent rows of a group that is held."""
        return [sender for _, sender in self._held[source, group].acks]

    def arrive(
        self, source: str, origin: str, acks: Mapping[int, Callable[[], None]], sender: str = ""
    ) -> list[int]:
        """Take a delivery's groups in; those that are new, which the runtime is to do.

        acks: by group, what acknowledges its rows; called once, when nobody needs them any more.
        """
        new = []
        for number, ack in acks.items():
            group = self._held.setdefault((source, number), HeldGroup())
            if not any(node == origin for node, _ in group.acks):
                new.append(number)
                group.inside.add(origin)
            before = group.acks.get((origin, sender))
            group.acks[origin, sender] = ack
            if before is not None:
                before()
            if not group.inside and source in self.repeated:
                self.repeated[source](number, sender)
        return new

    def sent(self, source: str, groups: Iterable[int], receivers: int) -> None:
        """Groups leave for so many next nodes."""
        for number in groups if receivers else ():
            self._held.setdefault((source, number), HeldGroup()).under_way += receivers

    def acknowledged(self, source: str, groups: Iterable[int]) -> None:
        """One of the next nodes is done with these."""
        for number in groups:
            self._held[source, number].under_way -= 1
            self._settle((source, number))

    def done(self, source: str, origin: str, groups: Iterable[int]) -> None:
        """The runtime has returned all that these groups led to."""
        for number in groups:
            self._held[source, number].inside.remove(origin)
            self._settle((source, number))

    def inside(self, source: str) -> bool:
        """Whether the runtime is not done with some group of a source."""
        return any(group.inside for (of, _), group in self._held.items() if of == source)

    def _settle(self, group: Group) -> None:
        """Let go of a group that neither the runtime nor a next node has."""
        held_group = self._held[group]
        if not held_group.under_way and not held_group.inside:
            del self._held[group]
            for ack in held_group.acks.values():
                ack()
            self.released(group)
