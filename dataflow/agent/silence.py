"""What an agent does that does not hear its scheduler: a pure function of how long, and of what it
was told before."""

from dataflow.agent.forkserver_messages import Stay

SEEK_S = 2.0
"""Without a word for so long it looks who leads the run, and asks to join again; and again after as
much."""
UNBEGUN_S = 30.0
"""A run that has not begun ends with its scheduler."""


def over(silent_s: float, stays: Stay | None, *, keeps: bool) -> bool:
    """Whether an agent ends that heard nothing for so long, though nobody stopped the run.

    stays: as it was told; None: the run has not begun. keeps: whether a worker is left that the
    others wait for."""
    if stays is None:
        return silent_s > UNBEGUN_S
    return silent_s > stays.wait_s + (stays.end_s if keeps else 0.0)
