"""What a tracker is: takes in a run's figures, rollouts and graph, as its folder has them, and
tells them elsewhere.
"""

import errno
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

TEXT = 2_000
"""Characters of a prompt or completion in a table."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that is told of."""

    name: str
    """Its folder's: graph, day, time."""
    folder: Path
    graph: Mapping[str, Any]
    """Nodes with their knobs, and edges, as graph.json has them."""
    config: Mapping[str, Any]
    """Flags, plan, versions of packages, as config.json has them."""
    goes_on: bool
    """Whether the same tracker was told of this run before: it is to go on there."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What the tracker wants to find again when it goes on, as JSON has it: an id, say. To be
    changed in place."""

    @property
    def knobs(self) -> dict[str, str | int | float | bool]:
        """Every knob of every node as `trainer.lr`; seed, steps, and the versions of packages."""
        knobs: dict[str, str | int | float | bool] = {"graph": str(self.graph.get("name"))}
        for node in self.graph.get("nodes", ()):
            knobs[f"{node.get('name')}.operator"] = str(node.get("operator"))
            knobs |= {
                f"{node.get('name')}.{knob}": str(value)
                for knob, value in (node.get("knobs") or {}).items()
            }
        knobs |= {
            name: self.config[name]
            for name in ("seed", "steps")
            if self.config.get(name) is not None
        }
        environment = self.config.get("environment") or {}
        knobs |= {
            f"version.{name}": str(value)
            for name, value in (environment.get("packages") or {}).items()
        }
        return knobs

    @property
    def edges(self) -> list[str]:
        """`generator -> reward`, and `trainer => generator` for weights, each once."""
        arrows = {"data": "->", "weights": "=>"}
        missing = [
            f"{e['from']} {arrows.get(e.get('plane'), '->')} {e['to']}"
            for e in self.graph.get("edges", ())
        ]
        return list(dict.fromkeys(missing))


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One line of metrics.jsonl."""

    node: str
    """The trainer or evaluation that says so."""
    step: int
    numbers: Mapping[str, float]
    """All finite ones, those within maps by a path, as `dropped.stale`; with `trainer/` in front
    where several trainers or evaluations say something."""
    at: float
    """When the step was recorded, in seconds since 1970."""
    is_evaluation: bool = False
    is_again: bool = False
    """Whether the step was told before, and has come out otherwise now, after a return to a
    checkpoint. What came out the same is not told again."""


@dataclass(frozen=True, kw_only=True)
class RolloutTable:
    """Some rollouts of one step: the best, the worst, some by chance, some with an error."""

    node: str
    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Texts, numbers and None; of texts what could act in a terminal or page is shown by its
    number."""


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The groups that one step trained or gave up, and when each was seen to come how far."""

    node: str
    step: int
    source: str
    began: float | None
    """When the step before was recorded, in seconds since 1970; None: this is the first that is
    known."""
    at: float
    """When this one was."""
    seen: Mapping[int, Mapping[str, float]]
    """By group: issued | generating | generated | scored -> seconds since 1970, as far as somebody
    looked in time."""
    dropped: Mapping[int, str]
    """By group, why."""
    metrics: Mapping[str, Any]
    """The step's line."""


class Tracker:
    """Derive from it, and write `log`; the rest may stay. A dataclass has its fields from the
    graph's program.

    Its methods are called one after another in a process of its own, which reads the run folder:
    what they raise, and how long they take, is no matter of the run.

    >>> from dataflow.trackers import StepFigures, Tracker
    >>> class Shout(Tracker):
    ...     def log(self, figures: StepFigures) -> None:
    ...         print(f"step {figures.step}: {figures.numbers['reward_mean']}!")
    >>> Shout().log(StepFigures(node="trainer", step=3, numbers={"reward_mean": 0.5}, at=0.0))
    step 3: 0.5!
    """

    packages: ClassVar[Sequence[str]] = ()
    """Modules that it imports."""
    extra: ClassVar[str] = ""
    """The optional part of this project that brings them."""
    takes_groups: ClassVar[bool] = False
    """Whether `groups` is called."""
    takes_activity: ClassVar[bool] = False
    """Whether `activity` is called, and `crossed`."""
    rollouts_every: ClassVar[int] = 10
    """Steps from one table of rollouts to the next; 0: none."""
    settles_s: ClassVar[float] = 0.0
    """Seconds after which what was taken in, and brought out by `flush`, cannot be lost any more;
    what a process took in less before it was killed is told again. inf: only `close` and `finish`
    make it certain."""

    def missing(self) -> str | None:
        """Why it cannot be used here, in three parts; asked before the run begins. None: it can."""
        lacking = [name for name in self.packages if not _is_installed(name)]
        if not lacking:
            return None
        how = (
            f"pip install 'dataflow-rl[{self.extra}]'"
            if self.extra
            else f"pip install {' '.join(lacking)}"
        )
        return (
            f"tracker {type(self).__name__} needs {', '.join(lacking)}, which is not installed;"
            f" {how}"
        )

    def start(self, run: TrackedRun) -> str:
        """Begin, or go on; where to look, for people. Empty: nothing is said."""
        return ""

    def log(self, figures: StepFigures) -> None:
        """Take in one line."""
        raise TypeError(
            f"tracker {type(self).__name__} cannot be told figures: it has no method `log`;"
            " write one"
        )

    def rollouts(self, table: RolloutTable) -> None:
        """Take in rollouts of a step, after its line."""

    def groups(self, groups: StepGroups) -> None:
        """Take in what became of the groups of a step."""

    def activity(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        """Take in what each node has done since the run began."""

    def crossed(self, edges: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Take in what has crossed each data edge since the run began, after `activity`: batches,
        rows and bytes as `sent`, `received` and `acknowledged`.
        """

    def flush(self) -> None:
        """Bring out what was taken in; called when there is nothing more for now."""

    def close(self) -> None:
        """The process ends before the run does, and another goes on later: bring out what is held
        back, for certain.
        """

    def finish(self, outcome: str) -> None:
        """The run is over: finished | stopped | failed | died."""


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# Room for libraries that write later than they take: what a disk refuses them they lose, and do
# not say so.

SPARE_BYTES = 64 << 20
"""More than such a library holds back, and another program takes in a second or two."""


def check_room(place: Path) -> None:
    """Raise OSError where the disk of a folder, which need not be there yet, has less room than
    that.
    """
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < SPARE_BYTES:
        has = (
            f"{os.strerror(errno.ENOSPC)}: {free >> 20} MiB are free, and {SPARE_BYTES >> 20} are"
            " needed"
        )
        raise OSError(errno.ENOSPC, has, str(place))
