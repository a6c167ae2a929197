"""Takes out of the run folder what weights drew that a run has gone back behind: they do not exist
any more.

Later weights have their numbers again, and nothing in a rollout tells the ones from the others. So
it is done once, as a run is taken up and nobody is at work yet; what has no outcome is then drawn
anew.
"""

from collections.abc import Callable
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc

from dataflow.folder.finished import File, SealedWriter
from dataflow.records import GROUP_ID, VERSIONS
from dataflow.staleness import newest_versions
from dataflow.system.files import disk, write_atomically

Keep = Callable[[pa.RecordBatch, pa.BooleanArray], pa.RecordBatch]


def take_out_abandoned(finished: Path, source: str, newest: int) -> int:
    """Forget, of a source, finished groups, parts of unfinished rollouts and turns with a token of
    a version above `newest`.

    finished: the folder that holds those of all generators. Only files of parts of the run that
    have ended are looked at (`dataflow.history.resume` names them), and those without such a token
    stay as they are. A crash on the way leaves each file as it was, or done. Returns how many
    rollouts and stretches there were. Errors: RunFolderError.
    """
    kinds: dict[str, Keep] = {
        "arrows": _whole_groups,
        **dict.fromkeys(("parts", "turns"), _good_rows),
    }
    return sum(
        _rewrite(path, newest, keep)
        for ending, keep in kinds.items()
        for path in sorted(finished.glob(f"*/*-part*.{source}.{ending}"))
    )


def _rewrite(path: Path, newest: int, keep: Keep) -> int:
    """Write a file anew without what is younger; how many rows that is."""
    batches = list(File(path).read())
    filtered = [
        keep(batch, pa.array(newest_versions(batch.column(VERSIONS)) <= newest))
        for batch in batches
    ]
    taken_out: int = sum(batch.num_rows for batch in batches) - sum(
        batch.num_rows for batch in filtered
    )
    nonempty = [batch for batch in filtered if batch.num_rows]

    def write(file: IO[bytes]) -> None:
        writer = SealedWriter(file, nonempty[0].schema)
        for batch in nonempty:
            writer.write_batch(batch)
        writer.close()

    if taken_out and nonempty:
        write_atomically(path, write, what="rewriting")
    elif taken_out:
        with disk("removing", path):
            path.unlink(missing_ok=True)
    return taken_out


def _good_rows(batch: pa.RecordBatch, good: pa.BooleanArray) -> pa.RecordBatch:
    return batch.filter(good)


def _whole_groups(batch: pa.RecordBatch, good: pa.BooleanArray) -> pa.RecordBatch:
    """The groups whose rows are all good."""
    bad = pc.unique(batch.filter(pc.invert(good)).column(GROUP_ID))
    return batch.filter(pc.invert(pc.is_in(batch.column(GROUP_ID), bad)))


def number_finished(folder: Path, part: int) -> None:
    """Give files of finished rollouts, parts and turns names that no later process gives:
    0-part1-0-0.source.arrows.

    folder: of the run. part: how often it was taken up, this time included.
    """
    files = folder / "finished"
    for path in [*files.rglob("*.arrows"), *files.rglob("*.parts"), *files.rglob("*.turns")]:
        replica, _, name = path.name.partition("-")
        if not name.startswith("part"):
            path.replace(path.with_name(f"{replica}-part{part}-{name}"))
