"""Rollouts that are finished and not trained yet, in Arrow files of the run folder: no crash makes anybody generate
them again.

A generator's process appends every group before it sends it on, and lets go of it when it has an outcome: files
<node>/<replica>-<attempt>-<number>.<source>.arrows (dataflow.folder.arrow_log).
"""

from collections.abc import Callable, Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.folder.arrow_log import FILE_BYTES, ArrowLog
from dataflow.records import GROUP_ID, group_slices


class Finished:
    """The finished groups of one source of one generator.

    consumes: rows by `append`; the news that groups have an outcome, by `forget`
    produces: the rows of a group that some process finished before, by `find`
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: Path, source: str, *, replica: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES,
        waited_for: Callable[[], Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """folder: that of the node. No two processes of a run have the same replica and attempt.

        waited_for: asked when the first group is looked for, which is then the time of `load`: all nodes have started
        by then, and a trainer that had to has gone back."""
        self._files = ArrowLog(folder, f"{source}.arrows", replica=replica, attempt=attempt, file_bytes=file_bytes)
        self._waited_for = waited_for
        self._found: dict[int, pa.RecordBatch] = {}
        """Rows of earlier processes by group, mapped into memory, not read into it."""

    def load(self, waited_for: Collection[int]) -> None:
        """Look at what all processes finished: of the groups waited for it is kept. Files of this replica's earlier
        attempts that have none of them are removed; other replicas may be writing theirs."""
        wanted = set(waited_for)
        for file in self._files.earlier():
            for batch in file.read():
                for group, first, count in group_slices(batch):
                    if group in wanted and group not in self._found:
                        self._found[group] = batch.slice(first, count)
                        self._files.hold(file, group)
            self._files.let_go(file)

    def find(self, group: int) -> pa.RecordBatch | None:
        """The rows of a group that an earlier process finished; None where there is none."""
        if self._waited_for is not None:
            waited_for, self._waited_for = self._waited_for(), None
            self.load(waited_for)
        return self._found.get(group)

    def append(self, rows: pa.RecordBatch) -> None:
        """Write whole groups down, before they are sent on. Raises RunFolderError when the disk refuses."""
        self._files.append(rows, pc.unique(rows.column(GROUP_ID)).to_pylist())

    def forget(self, group: int) -> None:
        """The group has an outcome. A file that holds no other is removed."""
        self._found.pop(group, None)
        self._files.forget(group)

    def close(self) -> None:
        """End the file that is being written; nothing is left of it when all its groups are done with."""
        self._files.close()


def number_finished(folder: Path, part: int) -> None:
    """Give files of finished rollouts, and of parts, names that no later process gives: 0-part1-0-0.source.arrows.

    folder: of the run. part: how often it was taken up, this time included."""
    files = folder / "finished"
    for path in [*files.rglob("*.arrows"), *files.rglob("*.parts")]:
        replica, _, rest = path.name.partition("-")
        if not rest.startswith("part"):
            path.replace(path.with_name(f"{replica}-part{part}-{rest}"))
