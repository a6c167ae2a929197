"""The folder of one run: where each thing stands, written so that a crash leaves it readable."""

import contextlib
import difflib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import xxhash

from dataflow.folder.arrow_reading import NO_SUM, SUM, read_arrow
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.placing import Placing
from dataflow.system.files import (
    Extras,
    Kind,
    RunFolderError,
    disk,
    flush_to_disk,
    read_lines,
    read_map,
    stream_lines,
    to_json,
    write_atomically,
)

# The rollouts that a trainer was given and an evaluation read, an Arrow file for each step.

COMPRESSED_BYTES = 1 << 20
"""Of rows, from which on a file of them is compressed: 4 ms for each MiB, of which 0.4 MiB are
left. Smaller ones would cost a short step, and whoever reads thousands of them, more than they
save."""
_ZSTD = pa.Codec("zstd", 1)
_FOOTER_BYTES = 1 << 20
"""Of a write in which the sum's place is looked for, at most."""

Rows: TypeAlias = pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class RolloutFiles:
    """The files of one folder, each whole or absent; holds no open file."""

    path: Path
    placing: Placing
    """Gives the files their names."""

    def step_file(self, step: int) -> Path:
        """The file of what step `step` trained."""
        return self.path / f"step-{step:06d}.arrow"

    def evaluation_file(self, step: int) -> Path:
        """The file of what the evaluation at `step` read."""
        return self.path / f"eval-{step:06d}.arrow"

    def write(self, step: int, rows: Rows) -> Path:
        """Write what `step` trained, before it is committed to the ledger. Errors: RunFolderError.

        Whole or not there after any crash of the process; flush() is for power cuts.
        """
        return self._put(self.step_file(step), rows)

    def flush(self, steps: Iterable[int]) -> None:
        """Bring the files of these steps to the disk itself, before the checkpoint after them is
        marked.

        So a power cut takes at most what a resume from that checkpoint makes again. Errors:
        RunFolderError.
        """
        with disk("flushing", self.path):
            for step in steps:
                flush_to_disk(self.step_file(step))
            flush_to_disk(self.path)

    def read(self, step: int) -> pa.Table:
        """What step `step` trained, in order. Errors: RunFolderError when the file is missing or
        damaged.
        """
        return self._read(self.step_file(step))

    def write_evaluation(self, step: int, rows: Rows) -> Path:
        """Write what the evaluation at `step` read. Errors: RunFolderError."""
        return self._put(self.evaluation_file(step), rows)

    def read_evaluation(self, step: int) -> pa.Table:
        """What the evaluation at `step` read. Errors: RunFolderError when the file is missing or
        damaged.
        """
        return self._read(self.evaluation_file(step))

    def files(self, kind: str) -> list[tuple[int, Path]]:
        """Steps and paths of the files that there are, ascending. kind: step | eval."""
        matches = [
            (re.fullmatch(rf"{kind}-(\d+)\.arrow", path.name), path)
            for path in self.path.glob(f"{kind}-*.arrow")
        ]
        return sorted((int(match[1]), path) for match, path in matches if match)

    def _put(self, path: Path, rows: Rows) -> Path:
        written = self.placing.aside(path)
        write_arrow(written, rows)
        if written != path:
            self.placing.place(written, path, None)
        return path

    def _read(self, path: Path) -> pa.Table:
        self.placing.see(path)
        return read_arrow(path)


def write_arrow(path: Path, rows: Rows) -> None:
    """Write rows as an Arrow IPC file at `path`, whole or not at all. Errors: RunFolderError."""
    table = rows if isinstance(rows, pa.Table) else _table(path, rows)
    with disk("writing", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: _put_table(file, table), flush=False)


def _table(path: Path, rows: pa.RecordBatch | Iterable[pa.RecordBatch]) -> pa.Table:
    batches = [rows] if isinstance(rows, pa.RecordBatch) else list(rows)
    try:
        return pa.Table.from_batches(batches)
    except (pa.ArrowException, ValueError) as error:
        raise RunFolderError(
            f"rows for '{path}' do not make one table: {error}; give at least one batch, all of one"
            " schema"
        ) from error


class _Summing:
    """A file that sums its bytes, and knows where its sum stands."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self._digest, self._place = xxhash.xxh3_64(), 0

    def write(self, content: Any) -> int:
        """As a file's `write`."""
        self._digest.update(content)
        if (at := bytes(content).rfind(SUM + NO_SUM) if len(content) < _FOOTER_BYTES else -1) >= 0:
            self._place = self._file.tell() + at + len(SUM)
        return self._file.write(content)

    def close(self) -> None:
        """Write the sum in its place."""
        self._file.seek(self._place)
        self._file.write(self._digest.hexdigest().encode())


def _put_table(file: BinaryIO, table: pa.Table) -> None:
    # of a batch for each group a copy takes a tenth of what `nbytes` takes, or a write
    whole = table.combine_chunks()
    is_large = whole.nbytes >= COMPRESSED_BYTES
    options = pa.ipc.IpcWriteOptions(compression=_ZSTD if is_large else None)
    sink = _Summing(file)
    with pa.ipc.new_file(
        sink, table.schema, options=options, metadata={"sum": SUM + NO_SUM}
    ) as writer:
        writer.write_table(table if is_large else whole)
    sink.close()


FORESEEN = "foreseen.json"


@dataclass(frozen=True)
class RunFolder:
    """Paths and files of one run (DESIGN section 7); holds no open file, so any worker may have a
    copy.
    """

    path: Path
    """runs/<graph>-<time>/."""
    extras: Extras = field(default_factory=Extras, compare=False, repr=False)
    """Writes optional files."""
    placing: Placing = field(default_factory=Placing, compare=False, repr=False)
    """Gives rollouts and checkpoints their names."""

    @classmethod
    def create(cls, root: str | Path, graph_name: str, *, now: float | None = None) -> "RunFolder":
        """A new folder <root>/<graph_name>-<YYYYmmdd-HHMMSS>[-n]/, and <root>/latest pointing to
        it.

        now: seconds since 1970, the clock's when None. Errors: RunFolderError.
        """
        root = Path(root)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', graph_name).strip('-.') or 'graph'}-{stamp}"
        with disk("creating the run folder", root / name):
            root.mkdir(parents=True, exist_ok=True)
            path = _new_folder(root, name)
            for below in ("logs", "rollouts", "checkpoints"):
                (path / below).mkdir()
        folder = cls(path.absolute())
        folder.make_latest()
        return folder

    @classmethod
    def open(cls, path: str | Path, extras: Extras | None = None) -> "RunFolder":
        """The folder of a run that was made before. Errors: RunFolderError when there is none."""
        folder = Path(path)
        if not folder.is_dir():
            why = "that is a file" if folder.exists() else f"nothing is there{_alike(folder)}"
            raise RunFolderError(
                f"no run folder at '{path}': {why}; give the folder that the run printed, or"
                " runs/latest"
            )
        return cls(folder.resolve(), extras or Extras())

    def make_latest(self) -> None:
        """Let `latest` beside it point to it."""
        link = self.path.parent / "latest"
        self.extras.attempt(link, lambda: _point(link, self.path.name), "pointing")

    @property
    def foreseen(self) -> dict[str, Any]:
        """What was foreseen of the run before it began (dataflow.foresight.report); empty: nothing
        was.
        """
        return self.read_json(FORESEEN)

    @property
    def graph_json(self) -> Path:
        """Nodes and edges of the graph."""
        return self.path / "graph.json"

    @property
    def graph_svg(self) -> Path:
        """Picture of the graph."""
        return self.path / "graph.svg"

    @property
    def config(self) -> Path:
        """Flags, plan and bounds of the run."""
        return self.path / "config.json"

    @property
    def flags(self) -> Path:
        """The flags that made it, for --config of its program; there is none where a script called
        `run`.
        """
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """A line per step."""
        return self.path / "metrics.jsonl"

    @property
    def activity(self) -> Path:
        """What each node had done by when, a line now and then."""
        return self.path / "activity.jsonl"

    @property
    def ledger(self) -> Path:
        """What became of every prompt group (dataflow.folder.ledger)."""
        return self.path / "ledger.db"

    @property
    def rollouts(self) -> Path:
        """Arrow files of all that was trained and evaluated."""
        return self.path / "rollouts"

    def rollouts_of(self, node: str | None = None) -> RolloutFiles:
        """The rollouts of one trainer; `node` where several keep their own."""
        return RolloutFiles(self.rollouts / (node or ""), self.placing)

    def finished(self, node: str) -> Path:
        """Where a generator keeps rollouts until they have an outcome
        (dataflow.folder.finished).
        """
        return self.path / "finished" / node

    @property
    def logs(self) -> Path:
        """One log file per worker."""
        return self.path / "logs"

    @property
    def trace(self) -> Path:
        """Chrome trace of the run."""
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run, with their commit markers."""
        return self.checkpoints_of(None)

    def checkpoints_of(self, node: str | None) -> Checkpoints:
        """The checkpoints of one trainer; `node` where several keep their own."""
        return Checkpoints(self.path / "checkpoints" / (node or ""), self.placing)

    def log(self, node: str, rank: int = 0) -> Path:
        """Log file of one rank of a node."""
        return self.logs / f"{node}-{rank}.log"

    def latest_checkpoint(
        self, at_most: int | None = None, *, node: str | None = None
    ) -> Path | None:
        """Folder of the newest checkpoint that is committed and undamaged, None if there is
        none.
        """
        checkpoints = self.checkpoints_of(node)
        self.placing.see_newest(checkpoints.path, at_most)
        step = checkpoints.latest(at_most)
        return None if step is None else checkpoints.folder(step)

    def note_activity(
        self,
        seconds: float,
        nodes: Mapping[str, Any],
        edges: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    ) -> None:
        """Add a line to activity.jsonl: what each node has done after so many seconds of training,
        and what has crossed each data edge.
        """
        self.extras.append(
            self.activity,
            to_json({"seconds": round(seconds, 4), "nodes": nodes, "edges": edges or {}}),
        )

    def read_activity(self) -> list[dict[str, Any]]:
        """The lines of activity.jsonl; none where it is missing. A torn line is left out."""
        return read_lines(self.activity, self.extras.tell)[0]

    def stream_activity(self, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The same lines one by one from a byte on, as `stream_metrics`."""
        return stream_lines(self.activity, start, self.extras.tell)

    def write_json(self, name: str, value: Any, *, flush: bool = True) -> bool:
        """Put `value` as strict JSON at `name` in the folder, whole or not at all; `flush`: wait
        for the disk.

        Whether the disk took it.
        """
        return self.extras.write(self.path / name, to_json(value, indent=1) + "\n", flush=flush)

    def read_json(self, name: str, kinds: Mapping[str, Kind] | None = None) -> dict[str, Any]:
        """The JSON map at `name`, as `files.read_map` has it: an empty one where it is
        missing or broken.
        """
        return read_map(self.path / name, kinds, self.extras.tell)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl in one write; NaN becomes null."""
        self.extras.attempt(self.metrics, lambda: self.placing.append(self.metrics, to_json(line)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says, in order: the last line of each step, none that a crash tore."""
        return surviving(self.scan_metrics()[0])

    def stream_metrics(self, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The whole lines of metrics.jsonl from a byte on, one by one, each with the byte at which
        the next begins.
        """
        return stream_lines(self.metrics, start, self.extras.tell)

    def scan_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """All lines of metrics.jsonl in order, and how many were torn by a crash."""
        self.placing.see(self.metrics)
        return read_lines(self.metrics, self.extras.tell)

    @property
    def size_bytes(self) -> int:
        """The size of all files in the folder; a file that goes meanwhile counts as nothing."""
        total = 0
        for place, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118
        return total


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without those that a later line about the same step of the same node
    supersedes.

    A step is made again after a return to a checkpoint, an evaluation after a crash in the midst of
    its record.
    """
    lines_by_step: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        key = line.get("node"), line.get("step")
        lines_by_step[number if None in key else (*key, "eval_accuracy" in line)] = dict(line)
    return list(lines_by_step.values())


def _alike(path: Path) -> str:
    """'; did you mean ...?' where a run beside it, or in runs/, is called much like it, or begins
    so.
    """
    runs: dict[str, Path] = {}
    for root in (Path("runs"), path.parent):
        with contextlib.suppress(OSError):
            runs |= {run.name: run for run in root.iterdir() if (run / "config.json").exists()}
    begin_so = [name for name in sorted(runs) if name.startswith(path.name)]
    close = difflib.get_close_matches(path.name, runs, n=1) or begin_so[-1:]
    return f"; did you mean '{runs[close[0]]}'?" if close else ""


def _new_folder(root: Path, name: str) -> Path:
    attempt = 1
    while True:
        path = root / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            attempt += 1


def _point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except OSError:
        temporary.unlink()
        raise
