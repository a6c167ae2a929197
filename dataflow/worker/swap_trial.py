"""A process that finds out whether an operator can take another one's place: imports it, checks the
graph, and ends.

Nothing of the run has changed by then: neither a module that does not end, nor one that ends its
process, does harm.
"""

import signal
from dataclasses import replace
from typing import Any

import structlog

from dataflow.errors import GraphError, where
from dataflow.folder.live_changes import Swap
from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.planning.wiring import context_facts
from dataflow.runtime import Context
from dataflow.worker import messages
from dataflow.worker.host import Settings
from dataflow.worker.link import SchedulerLink
from dataflow.worker.swapped import find, fit, knobs_of, load, swapped

NAME = "swap.trial"
"""The worker's name, as in the settings; no operator has it."""
TRIAL_S = 15.0
"""Seconds to import a module and check its operator; then the scheduler refuses it."""


def main(graph: Graph, plan: Plan, settings: Settings, link: SchedulerLink) -> int:
    """Run it, in a process that `worker.main` has set up; the exit status."""
    # ends it also where its scheduler does not any more
    signal.setitimer(signal.ITIMER_REAL, 2 * TRIAL_S)
    link.start()
    reply = messages.Tried(attempt=settings.attempt, swap=None, error="")
    try:
        swap = settings.tries
        assert swap is not None, "it was forked for one"
        tried_swap = tried(swapped(graph, settings.swaps), plan, swap)
        reply = messages.Tried(attempt=settings.attempt, swap=tried_swap, error="")
    except GraphError as error:
        reply = messages.Tried(attempt=settings.attempt, swap=None, error=str(error))
    except BaseException as error:
        text = f"trying it failed: {type(error).__name__}: {error} (at {where(error)})"
        reply = messages.Tried(attempt=settings.attempt, swap=None, error=text)
    link.send(reply)
    link.close()
    return 0


def tried(graph: Graph, plan: Plan, request: Swap) -> Swap:
    """The swap, with its text and knobs; its operator was built once. Errors: GraphError where it
    cannot be.
    """
    swap = find(request)
    operator = fit(graph, swap, load(swap)).operators[swap.node]
    facts: dict[str, Any] = context_facts(graph, plan, swap.node)
    operator.build(Context(log=structlog.get_logger(), **facts)).close()
    return replace(swap, knobs=knobs_of(operator))
