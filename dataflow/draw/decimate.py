"""Long series as few points, so that nothing that stands out is lost; pure."""

from itertools import pairwise

import numpy as np

from dataflow.records import AnyArray

LEAST_POINTS = 4


def decimate(xs: AnyArray, ys: AnyArray, most: int) -> tuple[AnyArray, AnyArray]:
    """At most `most` of the points of a series, which is finite and whose xs do not fall.

    The first and the last stay, and of each of as many stretches of equal count the least and the
    greatest, in their order. most: 4 or more.
    """
    count = len(xs)
    if count <= most:
        return xs, ys
    stretches = (most - 2) // 2
    edges = 1 + np.arange(stretches + 1) * (count - 2) // stretches
    indices = {0, count - 1}
    for begin, end in pairwise(edges):
        if begin < end:
            indices.add(int(begin + np.argmin(ys[begin:end])))
            indices.add(int(begin + np.argmax(ys[begin:end])))
    chosen = np.array(sorted(indices))
    return xs[chosen], ys[chosen]


def running_mean(ys: AnyArray) -> AnyArray:
    """Of a series, over about a twentieth of its points."""
    half = max(len(ys) // 40, 2)
    sums = np.concatenate([[0.0], np.cumsum(ys, dtype=np.float64)])
    at = np.arange(len(ys))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(ys))
    means: AnyArray = (sums[high] - sums[low]) / (high - low)
    return means
