"""A rank that dies, is silent or falls out of step ends the others with an error that names it;
nothing hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rigs.machine import descendants

from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.runtime import Context
from operators.engine import decode
from operators.engine.interface import PromptStart
from operators.engine.parallel.lockstep import make_parallel
from operators.models.folders import ModelError

pytestmark = pytest.mark.usefixtures("forked")


ROOT = Path(__file__).parents[4]


def start() -> PromptStart:
    return PromptStart(prompt=np.arange(2, 9), limit=40, tickets=[0, 1], seeds=[0, 1])


def follower(engine) -> int:
    return engine._exchange.team._processes[1].pid


@pytest.mark.parametrize("kind", ["fork", "interpreter"])
def test_a_killed_rank_is_named_and_the_engine_is_done(kind, declare, together, request):
    if kind == "interpreter":
        request.getfixturevalue("interpreters")
    engine = together(declare())
    engine.step([start()])
    pid, folder = follower(engine), engine._exchange.team.folder
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=rf"rank 1 of 'generator' \(pid {pid}\) ended by signal 9 .* in step 2"
    ):
        engine.step()
    with pytest.raises(RunError, match="not in step any more"):
        engine.step()
    assert not folder.exists()


@pytest.mark.slow
def test_a_silent_rank_is_named_when_the_time_out_has_passed(declare, together):
    engine = together(declare(), timeout_s=2.0)
    engine.step([start()])
    pid = follower(engine)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=rf"waited 2 s for rank 1 \(pid {pid}\) in step 2"):
        engine.step()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_rank_with_other_tokens_ends_the_run_when_their_checksums_have_come(
    declare, together, monkeypatch
):
    monkeypatch.setattr(decode, "CHECK_STEPS", 4)
    engine = together(declare())
    engine.step([start()])
    engine.step()
    engine.rows.last[0] += 1
    with pytest.raises(WorkerDied, match=r"rank 1 is not in step with rank 0: before step 5"):
        for _ in range(4):
            engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (signal.SIGKILL, WorkerDied, r"rank 2 of 'generator' \(pid {pid}\) ended by signal 9"),
        (signal.SIGSTOP, DeadlineError, r"waited 3 s for rank 2 \(pid {pid}\) in step 2"),
    ],
)
def test_of_three_ranks_beside_rank_0_the_one_that_broke_the_exchange_is_named(
    number, error, says, declare, together
):
    engine = together(declare(changes={"num_key_value_heads": 4}), 4, timeout_s=3.0)
    engine.step([start()])
    pid = engine._exchange.team._processes[2].pid
    os.kill(pid, number)
    with pytest.raises(error, match=says.format(pid=pid)):
        engine.step()


@pytest.mark.slow
def test_a_model_that_cannot_be_dealt_out_is_refused_and_no_rank_is_left(declare):
    declaration, before = declare(), descendants()
    with pytest.raises(ModelError, match="4 attention heads and 2 key/value heads"):
        make_parallel(declaration, Context(node="generator"), 3)
    assert descendants() <= before, "no rank runs, and none is left to be waited for"


RANK_0 = """
import os, signal, sys
import numpy as np, torch
torch.set_num_threads(1)
from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.runtime import Context, RunSettings
from operators.engine.parallel import lockstep
from operators.engine.interface import PromptStart
from operators.generator import Generator
lockstep.has_used_cuda = lambda: sys.argv[3] == "interpreter"
declaration = Generator(Model(sys.argv[1]), slots=6, context_tokens=64, cache_bytes=1 << 22)
context = Context(node="generator", run=RunSettings(limits=Limits(exchange_s=10.0)))
engine = lockstep.make_parallel(declaration, context, 2).engine
engine.step([PromptStart(prompt=np.arange(2, 9), limit=40, tickets=[0, 1], seeds=[0, 1])])
if sys.argv[2] == "in a step":
    layer = engine.model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    engine.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "start", "says"),
    [
        ("in a step", "fork", ""),  # the kernel ends it
        ("between steps", "interpreter", "rank 1 waited for a word of rank 0"),
        ("in a step", "interpreter", "rank 1 waited for the other ranks in step 2, and rank 0"),
    ],
)
def test_the_others_end_when_rank_0_is_killed(when, start, says, declare):
    """The command is over when nobody holds its output any more."""
    declaration = declare()
    done = subprocess.run(
        [sys.executable, "-c", RANK_0, declaration.model.source, when, start],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == -signal.SIGKILL
    assert says in done.stderr, done.stderr[-2000:]
