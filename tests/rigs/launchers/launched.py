"""A program for launchers, slow enough to be interrupted: python launched.py --steps N --on
LAUNCHER.
"""

import time

from dataflow import Graph, Model, main, scorer
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

MODEL = Model("fake-policy")
NO_BOUND = 1_000_000
"""Staleness: the fake trainer makes no versions."""


@scorer(name="reward")
def patient(completion: str) -> float:
    """Takes a moment."""
    time.sleep(0.005)
    return float(len(completion))


def build() -> Graph:
    """Fakes."""
    g = Graph("launched")
    generator, trainer = FakeGenerator(model=MODEL), FakeTrainer(model=MODEL, prompts_per_step=4)
    trainer(patient(generator(g.source(FakePrompts(size=None)))))
    g.feedback(trainer.weights, generator, max_staleness=NO_BOUND)
    return g


if __name__ == "__main__":
    main(build, steps=10)
