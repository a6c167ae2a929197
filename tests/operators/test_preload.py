"""What a worker needs is imported before it is forked, so that one that is started again is at work at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.node import Operator
from dataflow.worker import worker

IN_A_FRESH_PROCESS = """
import sys
from dataflow import Model
from dataflow.worker import worker
from operators import Generator, Trainer
from operators.losses import aipo

model = Model(sys.argv[1])
worker.preload([Generator(model), Trainer(model, loss=aipo)])
known = set(sys.modules)
from operators.engine.decode import Engine
from operators.models.loading import load_model
from operators.training.learner.build import make_learner
load_model(model)
print(*sorted(name for name in set(sys.modules) - known if name.startswith(("torch.", "operators.", "transformers."))))
"""


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


def test_what_cannot_be_imported_before_the_fork_is_left_for_the_worker_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stumbling, "calls", 0)
    worker.preload([Stumbling(), Light(), Stumbling()])
    assert Stumbling.calls == 2, "light ones are not asked"
