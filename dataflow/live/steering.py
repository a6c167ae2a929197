"""What a page that may steer asks of a run: what its browser sends, checked, and brought to the
scheduler once.
"""

import collections
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dataflow.errors import DataflowError, is_whole
from dataflow.folder.run_folder import RunFolder

BODY_BYTES = 16 * 1024
"""Of a request."""
REMEMBERED = 256
"""Requests whose answers are kept, so that one that comes twice is made once."""
MOST_TEXT = 500
"""Characters of a name or reference."""


@dataclass(frozen=True, kw_only=True)
class Controls:
    """How a run is asked; each returns what came of it, for people, and raises DataflowError where
    nothing did.

    by: who asks.
    """

    stop: Callable[[RunFolder, str], str]
    scale: Callable[[RunFolder, Mapping[str, int], str], str]
    swap: Callable[[RunFolder, str, str, str], str]
    """A node, and the operator that takes its place, as MODULE:ATTRIBUTE."""
    set_knob: Callable[[RunFolder, str, str, str], str]
    """A knob as NODE.KNOB, and its value as one types it."""
    checkpoint: Callable[[RunFolder, str], str]


Action: TypeAlias = Callable[[RunFolder, str], str]
"""Asks a run, in the name of somebody."""


def read_action(controls: Controls, body: bytes) -> tuple[str, Action]:
    """The request's number, and what it asks for: {"number": of the page's own choice, "action":
    "stop" | "checkpoint" | "scale" | "swap" | "set", "node", "replicas", "reference", "knob",
    "value"}.

    Errors: ValueError that says what is wrong.
    """
    try:
        request = json.loads(body)
    except ValueError as error:
        raise ValueError(f"this is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise ValueError(f"a JSON map is asked for, and not {type(request).__name__}")
    number, action = _text(request, "number"), _text(request, "action")
    match action:
        case "stop":
            return number, controls.stop
        case "checkpoint":
            return number, controls.checkpoint
        case "set":
            place, value = (
                f"{_text(request, 'node')}.{_text(request, 'knob')}",
                _text(request, "value"),
            )
            return number, lambda run, by: controls.set_knob(run, place, value, by)
        case "scale":
            node, replicas = _text(request, "node"), request.get("replicas")
            if not is_whole(replicas, 0):
                raise ValueError(
                    f"'replicas' is to be a whole number from 0 on, and not {replicas!r}"
                )
            return number, lambda run, by: controls.scale(run, {node: replicas}, by)
        case "swap":
            node, reference = _text(request, "node"), _text(request, "reference")
            return number, lambda run, by: controls.swap(run, node, reference, by)
    raise ValueError(
        f"no action is called {action!r}; there are stop, checkpoint, scale, swap and set"
    )


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MOST_TEXT:
        raise ValueError(f"'{name}' is to be a text of 1 to {MOST_TEXT} characters")
    return value


class Steering:
    """Makes each request once, whoever sends it again; called in threads.

    consumes: requests of browsers
    produces: requests to the schedulers of runs
    waits for: their answers; who sends the same again waits for the same answer
    unblocked by: the deadlines of `Controls`
    """

    def __init__(self, controls: Controls, by: str) -> None:
        """by: in whose name runs are asked."""
        self._controls, self._by = controls, by
        self._lock = threading.Lock()
        self._requests: collections.OrderedDict[str, _Request] = collections.OrderedDict()

    def __call__(self, run: RunFolder, body: bytes) -> str:
        """What came of it. Errors: ValueError where it is no request, DataflowError where the run
        refuses.
        """
        number, action = read_action(self._controls, body)
        key = f"{run.path}\0{number}"
        with self._lock:
            request = self._requests.setdefault(key, _Request())
            while len(self._requests) > REMEMBERED:
                self._requests.popitem(last=False)
        with request.lock:
            if request.answer is None:
                try:
                    request.answer = action(run, self._by)
                except DataflowError as error:
                    request.answer = error
        if isinstance(request.answer, DataflowError):
            raise request.answer
        return request.answer


class _Request:
    """A request, and what came of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answer: str | DataflowError | None = None
