"""Mean staleness of trained rollouts, in versions, in closed form."""


def mean_staleness(
    *, in_flight: float, batch: float, ratio: float, tail: float, queue: float = 2.0
) -> float:
    """Versions between the start of a rollout and its training.

    While a rollout is generated, `in_flight / batch` steps' worth of others are, times `tail`, as
    the longest of a group counts; where generation is the faster side, rollouts wait in the queue
    besides. Applied Compute's form (2026-07), within 0.27 of six runs that it published.

    in_flight, batch: rollouts that are generated at once, and in a step. ratio: rollouts generated
    per second over those trained, were both alone. tail: the longest of a group over the mean.
    queue: batches that may wait.
    """
    if ratio <= 1:
        return in_flight * tail / batch + ratio
    return in_flight * tail / (ratio * batch) + (2 * queue + ratio - 1) / (2 * ratio)
