"""How old rollouts are in the step that trains them: versions made while they were generated, or
while they waited.
"""

import pyarrow as pa

from dataflow.staleness import NO_TOKEN, newest_versions, oldest_versions


def staleness_at(step: int, versions: pa.ListArray | pa.ChunkedArray) -> pa.Array:
    """Versions that each rollout's oldest token is behind those that a step begins with, int64
    [rows]; null where the policy chose none.

    versions: as `oldest_versions` has them.
    """
    oldest = oldest_versions(versions)
    return pa.array(step - 1 - oldest, pa.int64(), mask=oldest == NO_TOKEN)


def staleness_parts(
    step: int, versions: pa.ListArray | pa.ChunkedArray
) -> tuple[pa.Array, pa.Array]:
    """Of `staleness_at`, the versions that were made while a rollout was generated, from its oldest
    token to its newest, and those while it waited, from there to the step; both int64 [rows], and
    null where the policy chose none.

    versions: as `oldest_versions` has them.
    """
    oldest = oldest_versions(versions)
    newest = newest_versions(versions)
    none = oldest == NO_TOKEN
    return pa.array(newest - oldest, pa.int64(), mask=none), pa.array(
        step - 1 - newest, pa.int64(), mask=none
    )
