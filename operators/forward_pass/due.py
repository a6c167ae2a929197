"""Which groups may be computed under the weights at hand: a pure rule over versions and groups,
without a clock.

A group whose newest token is of version v of the policy needs the operator's own weights at the
version that belongs to v, less the feedback's max_staleness: `needed`. With equal steps that is v -
max_staleness; of a reader that is refreshed with every n-th version, the newest that is sent up to
it.

The law: a group that waits is computed in the end. Let P be the policy's groups per step and Q
those of the trainer that feeds this operator.

1. Version v of the policy exists, so its trainer has passed at least v * P groups, and each of them
   went through this operator before. So its own trainer has been sent all that its first v * P // Q
   steps take: the needed version comes, unless that trainer dropped groups that the policy's did
   not (a step that was not finite).
2. Then it may lack rows for that version, and a group that it waits for may wait here for it. So
   group n is computed under what there is as soon as the trainer cannot make another version
   without it: it has passed told * Q + dropped groups, takes them in order, and n is among the next
   Q. The smallest group that has not reached it gets there: all before it have, so it makes a step,
   drops more, or waits for this very group. By induction each gets its turn. Where no groups were
   dropped this second rule allows nothing that the first one forbids.

Groups that wait do not stand in the way of others: the runtime takes whatever is due, and refuses
none."""

from collections.abc import Mapping
from dataclasses import dataclass

from dataflow.staleness import Bound


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a reader of weights knows of them."""

    version: int
    """At hand; -1 before the first."""
    told: int = 0
    """The newest version that the trainer has spoken of."""
    dropped: int = 0
    """Groups that the trainer had passed by then without training them."""


def needed(newest: int, source: Bound | None, own: Bound | None) -> int:
    """The oldest version that a group with a token of version `newest` may be computed under.

    source: of the policy that made the group; None where it may run ahead as it likes, as for
    evaluation. own: of the feedback that brings the weights; its trainer makes no more than
    own.steps versions. newest: -1 where the policy chose no token.
    """
    if source is None or own is None or newest < 0:
        return 0
    wanted = newest * source.prompts_per_step // own.prompts_per_step - own.max_staleness
    wanted = max(0, wanted if own.steps is None else min(wanted, own.steps))
    return _sent(wanted, own)


def is_first(note: Mapping[str, object], own: Bound) -> bool:
    """Whether a reader that was sent no weights yet has the version that it should: its own model,
    where it is one that is refreshed, and its trainer has said (note) that there is no other for
    it."""
    made = note.get("version")
    return own.every is not None and isinstance(made, int) and made < own.every


def is_due(
    group_id: int, newest: int, known: Known, source: Bound | None, own: Bound | None
) -> bool:
    """Whether the group may be computed now."""
    if known.version < 0:
        return False
    if own is None or known.version >= needed(newest, source, own):
        return True
    passed = known.told * own.prompts_per_step + known.dropped
    return known.version >= _sent(known.told, own) and group_id < passed + own.prompts_per_step


def _sent(version: int, own: Bound) -> int:
    """The newest version up to this one that the reader is sent."""
    return version if own.every is None else version // own.every * own.every
