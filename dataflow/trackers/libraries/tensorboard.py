"""TensorBoard: event files in the run folder, written by its own writer."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dataflow.trackers.tracker import RolloutTable, StepFigures, TrackedRun, Tracker


@dataclass(kw_only=True, eq=False)
class TensorboardTracker(Tracker):
    """Scalars by step; rollouts, knobs and edges as texts. A step that came out otherwise takes the
    place of the old one and all after it: TensorBoard purges them.
    """

    folder: str = ""
    """Where event files go; empty: `tensorboard` in the run folder."""

    packages: ClassVar[Sequence[str]] = ("tensorboard",)
    extra: ClassVar[str] = "tensorboard"

    def start(self, run: TrackedRun) -> str:
        """A new file; after what the tracker was told for certain, so that what it tells twice
        counts once.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._log, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        if self.folder:
            run.kept["folder"] = str(Path(self.folder).absolute())
        elsewhere = run.kept.get("folder")
        place = Path(elsewhere) / run.name if elsewhere else run.folder / "tensorboard"
        self._writer: Any = EventFileWriter(str(place))
        self._kept = run.kept
        if run.goes_on:
            self._purge(int(run.kept.get("step", 0)) + 1)
        else:
            knobs = markdown_table(["knob", "value"], run.knobs.items())
            self._text("config", knobs, 0, time.time())
            self._text(
                "graph", markdown_table(["edge"], [[edge] for edge in run.edges]), 0, time.time()
            )
        return f"tensorboard --logdir {place}"

    def log(self, figures: StepFigures) -> None:
        """A scalar for each number."""
        if figures.is_again and not figures.is_evaluation:
            self._purge(figures.step)
        value = self._summary.Summary.Value
        values = [
            value(tag=_tag(name, figures), simple_value=number)
            for name, number in figures.numbers.items()
        ]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(
            self._event(wall_time=figures.at, step=figures.step, summary=summary)
        )
        if not figures.is_evaluation:
            self._kept["step"] = figures.step

    def rollouts(self, table: RolloutTable) -> None:
        """A text of that step."""
        self._text("rollouts", markdown_table(table.columns, table.rows), table.step, time.time())

    def flush(self) -> None:
        """To the disk."""
        self._writer.flush()

    def finish(self, outcome: str) -> None:
        """Close the file."""
        self._writer.close()

    def _purge(self, step: int) -> None:
        log = self._log(status=self._log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=log))

    def _text(self, tag: str, text: str, step: int, at: float) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=f"{tag}/text_summary",
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor(dtype=self._string, string_val=[text.encode()]),
        )
        self._writer.add_event(
            self._event(wall_time=at, step=step, summary=self._summary.Summary(value=[value]))
        )


def _tag(name: str, figures: StepFigures) -> str:
    """Evaluations, seconds and rates in sections of their own."""
    if "/" in name:
        return name
    section = (
        "eval"
        if figures.is_evaluation
        else "time"
        if name.startswith("seconds_") or "_per_s" in name
        else "train"
    )
    return f"{section}/{name}"


# Tables as Markdown, for libraries that show no other.


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows below heads; what would end a cell or open a tag is shown by other signs.

    >>> print(markdown_table(["a"], [["x|<b>"]]))
    | a |
    | --- |
    | x¦&lt;b&gt; |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_table_cell, line)) + " |" for line in lines)


def _table_cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for sign, shown in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "¦"),
        ("\r", " "),
        ("\n", "⏎"),
    ):
        text = text.replace(sign, shown)
    return text
