"""What a run folder says that a tracker was not told yet: read as it comes, from where the tracker
had come to.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.live.series import numbers
from dataflow.runs.which import evaluations_of, trainers_of
from dataflow.trackers.tracker import StepFigures

FOLDER = "trackers"
"""In the run folder: a file for each tracker, of how far it has come."""
_SAME = ("loss", "reward_mean", "grad_norm", "eval_accuracy", "eval_n")
"""A step that has these as it had them is the same; seconds and rates differ whenever it is made
again."""
_MAP = (dict, type(None))
_LEFT_OUT = "weights_sent."
"""Bytes and seconds of each pair of ranks, which may be thousands."""


@dataclass
class TrackerPlace:
    """How far a tracker has come; kept in the run folder."""

    read: int = 0
    """Bytes of metrics.jsonl that it was told."""
    figures: int = 0
    """The byte up to which it was told all but the rollouts of the last line, where these were
    refused; else 0."""
    kept: dict[str, Any] | None = None
    """As `TrackedRun.kept`; None: it was never started."""
    steps: dict[str, int] | None = None
    """By trainer, the step whose groups it was told last."""

    @classmethod
    def read_from(cls, folder: RunFolder, name: str) -> "TrackerPlace":
        """As the file has it; at the beginning where there is none."""
        fields = folder.read_json(
            f"{FOLDER}/{name}.json", {"read": int, "figures": int, "kept": _MAP, "steps": _MAP}
        )
        return cls(
            read=max(0, fields.get("read", 0)),
            figures=fields.get("figures", 0),
            kept=fields.get("kept"),
            steps=fields.get("steps"),
        )

    def write_to(self, folder: RunFolder, name: str) -> None:
        """Keep it. A disk that refuses that is told once; then a later tracker tells some lines
        again.
        """
        with contextlib.suppress(OSError):
            (folder.path / FOLDER).mkdir(exist_ok=True)
        folder.write_json(f"{FOLDER}/{name}.json", asdict(self))


class Repeats:
    """Which lines tell what was told before."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, bool, int], int] = {}

    def look(self, line: Mapping[str, Any], step: int) -> str:
        """new | same | otherwise: the step was told, and came out otherwise."""
        key = str(line.get("node", "")), "eval_accuracy" in line, step
        print_ = hash(json.dumps([line.get(name) for name in _SAME]))
        before = self._told.get(key)
        self._told[key] = print_
        return "new" if before is None else "same" if before == print_ else "otherwise"


class RunTail:
    """The lines of one run's metrics.jsonl that are new.

    consumes: the file, whole lines of it alone
    produces: figures, each with the byte up to which the file is told then
    waits for: the disk
    unblocked by: -
    """

    def __init__(
        self, folder: RunFolder, start: int, clock: Callable[[], float] = time.time
    ) -> None:
        """start: bytes that were told. clock: seconds since 1970."""
        self._folder, self._read, self._clock = folder, 0, clock
        self._repeats = Repeats()
        self._times: dict[int, float] = {}
        self._nodes: tuple[list[str], int] | None = None
        size = folder.metrics.stat().st_size if folder.metrics.is_file() else 0
        if start > size:
            start = 0  # another run's file stands there
        for place, line in folder.stream_metrics(0):
            if place > start:
                break
            self._read = place
            if (step := _step(line)) is not None:
                self._repeats.look(line, step)

    def __iter__(self) -> Iterator[tuple[int, StepFigures | None]]:
        """What is there now; None for a line that has nothing new, or is no step's."""
        has_asked = is_vain = False
        for place, line in self._folder.stream_metrics(self._read):
            step = _step(line)
            figures = None
            if step is not None and (kind := self._repeats.look(line, step)) != "same":
                # it came while others were told
                if not has_asked or (step not in self._times and not is_vain):
                    self._ask_times(step - 1)
                    has_asked, is_vain = True, step not in self._times
                figures = self._figures(line, step, kind == "otherwise")
            self._read = place
            yield place, figures

    def _figures(self, line: Mapping[str, Any], step: int, is_again: bool) -> StepFigures:
        node = str(line.get("node", ""))
        trainers, evaluations = self._known
        is_evaluation = "eval_accuracy" in line
        several = evaluations > 1 if is_evaluation else len(trainers) > 1
        front = f"{node}/" if several else ""
        values = {
            f"{front}{name}": value
            for name, value in numbers(line)
            if math.isfinite(value) and not name.startswith(_LEFT_OUT)
        }
        return StepFigures(
            node=node,
            step=step,
            numbers=values,
            at=self._times.get(step, self._clock()),
            is_evaluation=is_evaluation,
            is_again=is_again,
        )

    @property
    def _known(self) -> tuple[list[str], int]:
        """Trainers, and how many evaluations."""
        if self._nodes is None:
            graph, config = (
                self._folder.read_json("graph.json"),
                self._folder.read_json("config.json"),
            )
            self._nodes = trainers_of(graph, config), len(evaluations_of(graph, config))
        return self._nodes

    def _ask_times(self, after: int) -> None:
        """When steps were recorded, as the ledger has it; what it does not say was now."""
        trainers = self._known[0]
        with (
            contextlib.suppress(LedgerError, IndexError),
            Ledger.open(self._folder.ledger, readonly=True) as ledger,
        ):
            self._times = dict(ledger.step_times(trainers[0], max(0, after)))


def _step(line: Mapping[str, Any]) -> int | None:
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
        return None
    return int(step)
