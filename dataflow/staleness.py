"""How far behind generation may fall: pure rules of admission and of the sweep where the trainer
takes groups in.

Step k trains, under weights of version k - 1, the first `prompts_per_step` groups in issue order
that no step has consumed and nobody has dropped. A group is started under version v only if

    group_id - dropped < (v + max_staleness + 1) * prompts_per_step

The law: then no group is trained when it is older than `max_staleness`. Let d be the dropped groups
below group n, so that step k = (n - d) // prompts_per_step + 1 consumes n. The trainer reports
groups as dropped when it has passed them, so `dropped` <= d for every n that it still waits for;
hence

    k - 1 <= (n - dropped) // prompts_per_step < v + max_staleness + 1

Later tokens come from later versions. The rule never deadlocks: the group that the trainer waits
for satisfies it under the trainer's own version. The sweep keeps the bound where this argument does
not reach: a resume, or drops reported ahead of their turn.

Pure: values in, values out, no clock. Versions count steps; -1 stands where the policy chose no
token.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataflow.records import AnyArray

NO_TOKEN = np.iinfo(np.int64).max
"""Oldest version of a rollout in which the policy chose no token: younger than any."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far a source's generation may run ahead of its trainer."""

    max_staleness: int
    """Versions."""
    prompts_per_step: int
    """Groups that one step consumes."""
    steps: int | None = None
    """Steps the run will make; no group beyond them is started."""
    every: int | None = None
    """Versions between two that a refreshed reader gets, whose own model is version 0; None: it
    gets the newest."""


def capacity(prompts_per_step: int, max_staleness: int) -> int:
    """Groups that may be issued and without an outcome: those of the step under way, and of each
    version ahead of it.

    >>> capacity(prompts_per_step=64, max_staleness=4)
    320
    """
    return (max_staleness + 1) * prompts_per_step


def admissible(
    next_group_id: int,
    dropped: int,
    version: int,
    prompts_per_step: int,
    max_staleness: int,
    in_flight_limit: int | None = None,
) -> int:
    """How many groups may be started now, from `next_group_id` on.

    dropped: groups that the trainer has passed without training them. version: of the weights that
    the generator has adopted. in_flight_limit: groups that may be ahead of those that `version` has
    trained, None for no further bound; below prompts_per_step it would deadlock.
    """
    ahead = capacity(prompts_per_step, max_staleness)
    if in_flight_limit is not None:
        ahead = min(ahead, in_flight_limit)
    return max(0, version * prompts_per_step + dropped + ahead - next_group_id)


def admit(
    group_id: int,
    dropped: int,
    version: int,
    prompts_per_step: int,
    max_staleness: int,
    in_flight_limit: int | None = None,
) -> bool:
    """Whether the group may be started under weights of `version`; arguments as in admissible()."""
    return (
        admissible(group_id, dropped, version, prompts_per_step, max_staleness, in_flight_limit) > 0
    )


def oldest_versions(versions: pa.ListArray | pa.ChunkedArray) -> AnyArray:
    """Version behind the oldest token of each rollout, int64 [rows]; NO_TOKEN where the policy
    chose none.

    versions: the column of that name, list<int32> with -1 where the mask is false.
    """
    return _of_each(versions, np.minimum, NO_TOKEN)


def newest_versions(versions: pa.ListArray | pa.ChunkedArray) -> AnyArray:
    """Version behind the newest token of each rollout, int64 [rows]; -1 where the policy chose
    none.

    versions: as `oldest_versions` has them.
    """
    return _of_each(versions, np.maximum, -1)


def _of_each(versions: pa.ListArray | pa.ChunkedArray, reduce: np.ufunc, none: int) -> AnyArray:
    """The versions of each rollout reduced to one; `none` counts for tokens that the policy did not
    choose.
    """
    column = versions.combine_chunks() if isinstance(versions, pa.ChunkedArray) else versions
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()[offsets[0] : offsets[-1]].astype(np.int64)
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    reduced = np.full(len(column), none, np.int64)
    if len(values):
        values[values < 0] = none
        reduced[lengths > 0] = reduce.reduceat(values, starts[lengths > 0])
    return reduced


def sweep(oldest_versions: AnyArray, trainer_version: int, max_staleness: int) -> AnyArray:
    """Which rollouts are too old to train under `trainer_version`: bool [rows]."""
    return oldest_versions < trainer_version - max_staleness
