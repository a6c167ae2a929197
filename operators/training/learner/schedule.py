"""The learning rate by step."""

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(
    step: int,
    lr: float,
    *,
    warmup_steps: int,
    schedule: str = "constant",
    decay_steps: int | None = None,
    min_lr: float = 0.0,
) -> float:
    """The rate of step 1, 2, ...: it rises linearly over `warmup_steps`, then follows the schedule.

    decay_steps: steps, the warm-up included, until it is at `min_lr`, where it stays; without them
    it is constant.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant" or decay_steps is None:
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_lr + (lr - min_lr) * share
