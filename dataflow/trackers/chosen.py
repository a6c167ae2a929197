"""Which trackers a run has: by name, by reference, or as they are; checked before the run begins,
and sent as JSON. At the end what the run and a tracker's process say to each other.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dataflow.errors import GraphError, nearest
from dataflow.system.files import to_json
from dataflow.system.messages import Codec, Message
from dataflow.system.modules import module_at
from dataflow.trackers.tracker import Tracker

TRACK = "track"
"""In config.json."""
_ROOM = "dataflow.trackers.libraries"
LIBRARIES: Mapping[str, str] = {
    "wandb": f"{_ROOM}.wandb:WandbTracker",
    "tensorboard": f"{_ROOM}.tensorboard:TensorboardTracker",
    "trackio": f"{_ROOM}.trackio:TrackioTracker",
    "mlflow": f"{_ROOM}.mlflow:MlflowTracker",
    "prometheus": f"{_ROOM}.prometheus:PrometheusTracker",
    "opentelemetry": f"{_ROOM}.opentelemetry:OpenTelemetryTracker",
}
"""By what --track calls them."""
_LOADS: ContextVar[bool] = ContextVar("_LOADS")
"""Whether a module is being imported for the sake of a tracker: what would run a graph then is
refused."""

Wished: TypeAlias = "str | Tracker | type[Tracker]"


@dataclass(frozen=True, kw_only=True)
class ChosenTracker:
    """A tracker of a run, as it goes to the process that has it."""

    name: str
    """For people, and of its file in the run folder."""
    module: str
    """Or the path of a file."""
    attribute: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """The fields that it is made with."""

    @classmethod
    def of(cls, wished: Wished) -> "ChosenTracker":
        """What a user named. Errors: GraphError where there is no such tracker, or it cannot be
        used here.
        """
        chosen = _named(wished) if isinstance(wished, str) else _object(wished)
        tracker = wished if isinstance(wished, Tracker) else chosen.make()
        if (why := tracker.missing()) is not None:
            raise GraphError(why)
        return chosen

    @property
    def reference(self) -> str:
        """What --to calls it."""
        return self.name if self.name in LIBRARIES else f"{self.module}:{self.attribute}"

    def make(self) -> Tracker:
        """The tracker itself. Errors: GraphError."""
        value = _attribute(self.module, self.attribute)
        try:
            tracker = value(**self.given) if isinstance(value, type) else value
        except TypeError as error:
            raise GraphError(
                f"tracker '{self.attribute}' cannot be made: {error}; give its fields a default"
            ) from error
        if not isinstance(tracker, Tracker):
            raise GraphError(
                f"'{self.module}:{self.attribute}' is no tracker, but a {type(tracker).__name__};"
                " derive a class from dataflow.trackers.Tracker"
            )
        return tracker


def choose(wished: Iterable[Wished]) -> tuple[ChosenTracker, ...]:
    """All that a user named, for a run or for `dataflow track`. Errors: GraphError, also where two
    are the same.
    """
    _refuse_import()
    trackers: dict[str, ChosenTracker] = {}
    for name_or_tracker in wished:
        chosen = ChosenTracker.of(name_or_tracker)
        if chosen.name in trackers:
            raise GraphError(
                f"a run has each tracker once, but '{chosen.name}' was given twice; leave one out"
            )
        trackers[chosen.name] = chosen
    return tuple(trackers.values())


def _refuse_import() -> None:
    """Errors: GraphError where a graph is run since a tracker's module is imported."""
    if _LOADS.get(False):
        raise GraphError(
            "a tracker's process imports this program, and found that it runs a graph; put that"
            " below if __name__ == '__main__', or the tracker into a file of its own"
        )


def _named(text: str) -> ChosenTracker:
    name, colon, attribute = text.partition(":")
    if not colon:
        if text not in LIBRARIES:
            raise GraphError(
                f"there is no tracker '{text}'; name one of"
                f" {', '.join(LIBRARIES)}{nearest(text, LIBRARIES)}, or your own as"
                " my_module:MyTracker or path/to/file.py:MyTracker"
            )
        name, _, attribute = LIBRARIES[text].partition(":")
        return ChosenTracker(name=text, module=name, attribute=attribute)
    if name.endswith(".py"):
        name = str(Path(name).absolute())
    return ChosenTracker(name=_file_name(attribute), module=name, attribute=attribute)


def _object(wished: "Tracker | type[Tracker]") -> ChosenTracker:
    kind = wished if isinstance(wished, type) else type(wished)
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise GraphError(
            "a tracker is named, or derived from dataflow.trackers.Tracker, but got a"
            f" {type(wished).__name__}; give 'wandb', say, or a class of your own"
        )
    arguments = {} if isinstance(wished, type) else _fields(wished)
    if "<locals>" in kind.__qualname__:
        raise GraphError(
            f"tracker {kind.__name__} is defined within a function, where its process does not find"
            " it; define it at the top of its file"
        )
    name = next(
        (n for n, at in LIBRARIES.items() if at == f"{kind.__module__}:{kind.__qualname__}"),
        kind.__name__,
    )
    return ChosenTracker(
        name=_file_name(name), module=_place(kind), attribute=kind.__qualname__, given=arguments
    )


def _fields(tracker: Tracker) -> dict[str, Any]:
    if not dataclasses.is_dataclass(tracker):
        if vars(tracker):
            raise GraphError(
                f"tracker {type(tracker).__name__} has values of its own"
                f" ({', '.join(vars(tracker))}), which its process would not have; make it a"
                " dataclass, and open things in `start`"
            )
        return {}
    fields = [field for field in dataclasses.fields(tracker) if field.init]
    values = {field.name: getattr(tracker, field.name) for field in fields}
    values = {
        f.name: values[f.name]
        for f in fields
        if f.default is dataclasses.MISSING or values[f.name] != f.default
    }
    try:
        to_json(values)
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"the fields of tracker {type(tracker).__name__} go to its process as JSON, but"
            f" {error}; use texts, numbers, lists and maps"
        ) from error
    return values


def _place(kind: type) -> str:
    """Where its process finds it: the module's name, or of a program that was started as a file
    that file.
    """
    if kind.__module__ != "__main__":
        return kind.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name)
    if not getattr(main, "__file__", None):
        raise GraphError(
            f"tracker {kind.__name__} is defined in a notebook or prompt, where its process does"
            " not find it; write it into a file and import it"
        )
    return str(Path(main.__file__ or "").absolute())


def _attribute(module: str, attribute: str) -> Any:
    loads = _LOADS.set(True)
    try:
        value: Any = module_at(module, suffix="_trackers")
    except Exception as error:
        raise GraphError(
            f"tracker '{module}:{attribute}' cannot be imported: {type(error).__name__}: {error};"
            " mend it, or name another"
        ) from error
    finally:
        _LOADS.reset(loads)
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise GraphError(
            f"'{module}' has no tracker '{attribute}'; define it there, or name another"
        )
    return value


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in name)


def recorded_names(chosen: Sequence[ChosenTracker]) -> list[str] | None:
    """For config.json: the libraries among them, which a run that is resumed by a script has
    again.
    """
    return [tracker.name for tracker in chosen if tracker.name in LIBRARIES] or None


# What a tracker's process and the run say to each other.

LONGEST = 600
"""Characters of a text for people."""
SEND_S = 5.0
"""For the other side to read."""

# From a tracker's process


class TrackerAt(Message):
    """A sign of life."""

    call: str
    """Of the tracker, that begins now; empty: it waits for lines."""


class TrackerSees(Message):
    """Where to look."""

    text: str


class TrackerToldOf(Message):
    """A batch was taken in."""

    lines: int


class TrackerFailed(Message):
    """It ends."""

    call: str
    error: str


class TrackerDone(Message):
    """All is told; it ends."""


# To a tracker's process


class TrackRun(Message):
    """Tell a tracker of a run; the first message."""

    folder: str
    tracker: ChosenTracker
    path: Sequence[str]
    """Where modules are found."""
    leader: int
    """The scheduler whose tracker this is; 0: whoever that is."""
    within_s: float
    """To take in what is left, once nobody leads the run."""
    steps_back: bool
    """Whether it has what nobody else wants of processors and disks."""


class RunIsOver(Message):
    """Tell what is left, and finish."""

    outcome: str
    """finished | stopped | failed | died."""


class LeaveRun(Message):
    """End, so that another goes on from there later: the run's disk is full, or nobody waits any
    more.
    """


TRACKER_CODEC: Codec[Any] = Codec(
    "tracker",
    1,
    TrackerAt,
    TrackerSees,
    TrackerToldOf,
    TrackerFailed,
    TrackerDone,
    TrackRun,
    RunIsOver,
    LeaveRun,
)
