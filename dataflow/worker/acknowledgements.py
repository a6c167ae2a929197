"""Which groups a node answers for: from their arrival until all that they led to is acknowledged by the next node.

So acknowledgements run from end to end: a prompt's comes back to its source only when its rollouts were trained,
dropped or evaluated. What has no outcome yet stands unacknowledged with every node that it has passed, and comes again
to a node that restarts. What comes twice is known by its group, and done once.

Pure: calls in, calls of `ack` out; no socket, no clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Group = tuple[str, int]
"""Source and group_id."""


class Share:
    """Acknowledges rows that came together once none of their groups is needed, and before that each that is not."""

    def __init__(self, ack: Callable[[], None], early: Callable[[int], None], groups: int) -> None:
        """groups: how many there are; with none they are acknowledged at once."""
        self._ack, self._early, self._left = ack, early, groups
        if not groups:
            ack()

    def release(self, group_id: int) -> None:
        """One of them is not needed."""
        self._left -= 1
        if self._left:
            self._early(group_id)
        else:
            self._ack()


@dataclass
class Acknowledgements:
    """The groups that one node holds, or has passed on and not yet heard of again.

    One that comes again is not new. Of each sender the latest delivery stands for it from then on, and the one before
    is acknowledged: the sender that sent that is gone. Those of several senders all stand: any of them may be the only
    one that is asked for the group again.
    """

    released: Callable[[Group], None] = lambda group: None
    """Told of every group that the next nodes are done with."""
    _shares: dict[Group, dict[tuple[str, str], Share]] = field(default_factory=dict)
    """By group, sending node and sender, which is one of its replicas: the delivery that stands for it."""
    _inside: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """Source, origin, group: those that the runtime is not done with."""
    _under_way: Counter[Group] = field(default_factory=Counter)
    """Acknowledgements that next nodes owe."""

    def __len__(self) -> int:
        return len(self._shares)

    def groups(self, source: str) -> list[int]:
        """Those of a source that this node answers for."""
        return sorted({number for of, number in [*self._shares, *self._under_way] if of == source})

    def oldest(self) -> dict[str, int]:
        """By source, the first group that the runtime is not done with."""
        found: dict[str, int] = {}
        for source, _, number in self._inside:
            found[source] = min(number, found.get(source, number))
        return found

    def arrive(
        self, source: str, origin: str, groups: Iterable[int], ack: Callable[[], None], sender: str = "",
        early: Callable[[int], None] = lambda group: None,
    ) -> list[int]:  # fmt: skip
        """Take a delivery's groups in; those that are new, which the runtime is to do.

        ack: called with the last of them that nobody needs any more; early: with each before that.
        """
        numbers = list(groups)
        share = Share(ack, early, len(numbers))
        new = []
        for number in numbers:
            known = self._shares.setdefault((source, number), {})
            if not any(node == origin for node, _ in known):
                new.append(number)
                self._inside[source, origin, number] += 1
            before = known.get((origin, sender))
            known[origin, sender] = share
            if before is not None:
                before.release(number)
        return new

    def sent(self, source: str, groups: Iterable[int], receivers: int) -> None:
        """Groups leave for so many next nodes."""
        if receivers:
            self._under_way.update({(source, number): receivers for number in groups})

    def acknowledged(self, source: str, groups: Iterable[int]) -> None:
        """One of the next nodes is done with these."""
        for number in groups:
            group = (source, number)
            self._under_way[group] -= 1
            if not self._under_way[group]:
                del self._under_way[group]
                self._settle(group)

    def done(self, source: str, origin: str, groups: Iterable[int]) -> None:
        """The runtime has returned all that these groups led to."""
        for number in groups:
            del self._inside[source, origin, number]
            self._settle((source, number))

    def _settle(self, group: Group) -> None:
        """Let go of a group that neither the runtime nor a next node has."""
        source, number = group
        shares = self._shares.get(group, {})
        if group in self._under_way or any((source, origin, number) in self._inside for origin, _ in shares):
            return
        self._shares.pop(group, None)
        for share in shares.values():
            share.release(number)
        self.released(group)
