"""Deadlines of the scheduler, and which of them a worker has overrun: values in, a reason out."""

from dataclasses import dataclass, field

from dataflow.attempts import WorkerState
from dataflow.recovery import Patience

_END_S = 5.0
"""For a worker that failed, or was killed, to be gone; then it is killed again."""

_LOADING = 4
"""A worker that is starting may be silent for so many times `Limits.hang_s`: imports hold up its beats."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Deadlines of the scheduler."""

    start_s: float = 300.0
    """From the first fork until every worker is ready, and for each restart: large models take long to load."""
    hang_s: float = 15.0
    """Without a heartbeat, a worker counts as hanging."""
    stopped_s: float = 1.0
    """A worker that somebody has stopped (SIGSTOP) is let go on after so long."""
    stuck_s: float = 600.0
    """In one slice of work, a worker counts as stuck, though it has a heartbeat."""
    asleep_s: float = 120.0
    """The same where it has computed nothing in all that time, nor has any process that it has started."""
    stop_s: float = 10.0
    """For workers to wind down before they are killed."""
    adopt_s: float = 60.0
    """When the scheduler has died, workers go on for so long and wait for another one; then they finish the step under
    way, write a checkpoint and end."""
    drain_s: float = 120.0
    """For the step under way and its checkpoint, after the user asked to stop, or nobody took the workers over."""
    stall_s: float = 300.0
    """With nothing moving (rows, tokens, steps) and nobody at work, before a warning; twice that ends the run."""
    slice_s: float = 1800.0
    """The same while somebody is at work: a model that loads, a first compile, a long step."""
    patience: Patience = field(default_factory=Patience)
    """With workers that die again and again."""


def overdue(state: WorkerState, limits: Limits, now: float, *, begun: bool) -> str | None:
    """Why a worker is to be killed at `now`; None: it need not. begun: whether the run is past its start."""
    silent = now - state.heard
    if state.state == "dying":
        return state.cause if now - state.dying_since > _END_S else None
    if state.state == "ready":
        if silent > limits.hang_s:
            return f"has not answered for {silent:.0f} s"
        if (turned_s := state.beat.get("turned_s", 0.0)) > limits.stuck_s:
            return f"was stuck in one slice of work for {turned_s:.0f} s"
        if (asleep_s := state.beat.get("asleep_s", 0.0)) > limits.asleep_s:
            return f"was stuck in one slice of work, and has computed nothing for {asleep_s:.0f} s"
    elif begun and state.state == "starting" and silent > _LOADING * limits.hang_s:
        return f"has not answered for {silent:.0f} s while it started"
    elif state.state in ("forked", "starting") and state.is_away and now - state.forked > limits.start_s:
        return f"was not ready within {limits.start_s:.0f} s"
    return None
