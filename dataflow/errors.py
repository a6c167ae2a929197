"""Every error of the engine, as one tree.

    DataflowError
    ├── GraphError (ValueError)    the graph, or an operator's knob, cannot be right; raised before anything runs
    ├── RecordError (ValueError)   rows do not have the columns or types that were promised
    └── RunError                   a run could not go on
        ├── OperatorError          an operator of the user's graph failed, with the node and the user's file and line
        │   └── Unusable           what the user's functions or data give cannot be used, however often it is tried
        ├── WorkerDied             a worker process ended or stopped answering
        ├── DeadlineError          a wait reached its deadline; names who waited for whom
        ├── WorldFailed            raised by a user's function: what failed is outside, and may be tried again
        └── Replaced               this scheduler, or attempt of a worker, was replaced: another one is in its place

Messages have three parts: what is wrong, what was found, what to do.
"""

import contextlib
import difflib
import traceback
from collections.abc import Iterable, Iterator
from typing import ClassVar


class DataflowError(Exception):
    """Anything this engine raises on purpose.

    >>> from dataflow import DataflowError, Graph
    >>> try:
    ...     Graph("a b")
    ... except DataflowError as error:
    ...     print(error)
    a graph's name becomes a folder, but 'a b' cannot; use letters, digits, '-' and '_', as in Graph("aipo")
    """

    is_lasting: ClassVar[bool] = False
    """Whether a process that is started anew would meet it again: settings, data, models and functions are as they
    were."""


class GraphError(DataflowError, ValueError):
    """A graph or a knob that cannot be right, found before anything runs.

    >>> from dataflow import GraphError, Model
    >>> try:
    ...     Model("policies/tiny", head="lmm")
    ... except GraphError as error:
    ...     print("refused:", isinstance(error, ValueError))
    refused: True
    """

    is_lasting = True


class RecordError(DataflowError, ValueError):
    """Rows that do not have the promised columns or types."""

    is_lasting = True


class RunError(DataflowError, RuntimeError):
    """A run that could not go on.

    >>> from dataflow import RunError, verify
    >>> try:
    ...     verify("runs/nowhere")
    ... except RunError as error:
    ...     print("nowhere" in str(error))
    True
    """


class OperatorError(RunError):
    """An operator failed; the message names the node and the line of the user's function."""


class Unusable(OperatorError):
    """What the user's functions or data give cannot be used; the message says which, and why."""

    is_lasting = True


class WorkerDied(RunError):
    """A worker process ended, or stopped answering, while the run needed it."""


class DeadlineError(RunError, TimeoutError):
    """A wait reached its deadline; the message names who waited for whom."""


class WorldFailed(RunError):
    """What a scorer raises where something outside failed: a judge, a network, a service that is too busy.

    The call is made again, a few times; a rollout for which it still fails has the cause `world`.

    >>> from dataflow import WorldFailed, scorer
    >>> @scorer(retries=5)
    ... def judged(completion: str) -> float:
    ...     raise WorldFailed("the judge is being restarted", after_s=2.0)
    """

    def __init__(self, found: str, *, after_s: float | None = None) -> None:
        """after_s: seconds after which it may be tried again, where that is known."""
        super().__init__(found)
        self.after_s = after_s


class Replaced(RunError):
    """A scheduler, or a worker, finds that another one is in its place; it must touch nothing of the run any more."""


@contextlib.contextmanager
def boundary(node: str, doing: str) -> Iterator[None]:
    """Attribute whatever is raised inside to `node`: the one place where errors are attributed."""
    try:
        yield
    except DataflowError as error:
        if f"'{node}'" in str(error):
            raise
        raise type(error)(f"'{node}': {error}") from error
    except Exception as error:
        raise OperatorError(
            f"'{node}' failed while {doing}: {type(error).__name__}: {error} (at {where(error)}); "
            f"its log has the whole traceback"
        ) from error


def where(error: BaseException) -> str:
    """File and line that raised `error`, the innermost frame outside installed packages if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown line"


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' where something known is spelled much like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
