"""The user's program on a host: it runs up to its `run(...)`, which hands graph and plan to the
host's forkserver.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dataflow.graph import Graph

if TYPE_CHECKING:
    from dataflow.planning.inputs import PlanInputs
    from dataflow.planning.plan import Plan


@dataclass(frozen=True)
class Hosted:
    """What `run` finds where an agent runs the program."""

    inputs: "PlanInputs"
    """That the scheduler's plan is made from."""
    serve: "Callable[[Graph, Plan], NoReturn]"
    """Takes what was built."""


HOSTED: ContextVar[Hosted | None] = ContextVar("hosted", default=None)
"""None: the program runs by itself."""
