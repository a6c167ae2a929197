"""A program as a user writes one, around a tiny policy: python resumable.py --policy FOLDER --steps
6 ...
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from dataflow import Graph, main  # noqa: E402
from rigs.graphs import tiny_graph  # noqa: E402


def build(
    *,
    policy: str,
    max_staleness: int = 0,
    eval_every: int = 4,
    checkpoint_every: int = 2,
    sampling_mask: bool = False,
) -> Graph:
    """A tiny run."""
    return tiny_graph(
        Path(policy),
        max_staleness=max_staleness,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        generator_knobs={"sampling_mask": sampling_mask},
    )


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main(build)
