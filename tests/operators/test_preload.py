"""What a worker needs is imported before it is forked, so that one that is started again is at work
at once.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dataflow import Graph
from dataflow.node import Operator
from dataflow.worker import worker

IN_A_FRESH_PROCESS = """
import sys
from types import SimpleNamespace
from dataflow import Model
from dataflow.worker import worker
from operators import Generator, Trainer
from operators.losses import aipo
from operators.ranks.group import leave

model = Model(sys.argv[1])
operators = {"generator": Generator(model), "trainer": Trainer(model, loss=aipo)}
worker.preload(SimpleNamespace(operators=operators, feedbacks=["the trainer's weights"]))
known = set(sys.modules)
from operators.engine.decode import Engine
from operators.models.loading import load_model
from operators.training.learner.build import make_learner
from dataflow.worker import weight_ports
from transport.weights.sharded.reader import ShardedReader
from transport.weights.sharded.writer import ShardedWriter
from transport.weights.sharded.process_group import abort_gloo
load_model(model)
import torch.distributed.tensor
leave()
packages = ("torch.", "operators.", "transformers.", "transport.")
print(*sorted(name for name in set(sys.modules) - known if name.startswith(packages)))
"""


@pytest.mark.slow
def test_a_worker_that_is_forked_imports_nothing_to_load_its_model(policy: Path) -> None:
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not done.stdout.split(), "these had to be imported by the worker"


class Stumbling(Operator):
    """Counts the calls, and cannot import what it needs."""

    calls = 0

    def preload(self) -> None:
        Stumbling.calls += 1
        raise ImportError("no such module")


class Light(Stumbling):
    light = True


def test_what_cannot_be_imported_before_the_fork_is_left_for_the_worker_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stumbling, "calls", 0)
    graph = SimpleNamespace(
        operators={"a": Stumbling(), "b": Light(), "c": Stumbling()}, feedbacks=[]
    )
    worker.preload(cast("Graph", graph))
    assert Stumbling.calls == 2, "light ones are not asked"
