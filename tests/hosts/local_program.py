"""A program that runs a graph of fakes on hosts: python local_program.py [flags of a run].

The environment's LIMITS is JSON.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from rigs.graphs import fake_graph  # noqa: E402
from rigs.operators import paced, slow  # noqa: E402

from dataflow import Graph, main  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer  # noqa: E402
from dataflow.worker import worker  # noqa: E402

worker.preload = lambda graph: None


def build(
    *, size: int = 64, seconds: float = 0.0, generator_s: float = 0.0, trainer_s: float = 0.0
) -> Graph:
    """Fakes. size: prompts; 0: without end. seconds: between two prompts. generator_s, trainer_s:
    of sleep, for each group that one makes, and for each step of the other.
    """
    source = FakePrompts(size=size or None)
    return fake_graph(
        source=slow(source, seconds=seconds) if seconds else source,
        generator=paced(FakeGenerator(), generator_s),
        trainer=paced(FakeTrainer(prompts_per_step=8), trainer_s),
    )


if __name__ == "__main__":
    main(build, limits=Limits(**json.loads(os.environ.get("LIMITS", "{}"))))
