"""A rank that dies, is silent or falls out of step ends the others with an error that names it;
nothing hangs.
"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from rigs.machine import descendants

from dataflow.errors import RunError, WorkerDied
from dataflow.runtime import Context
from operators.engine.interface import PromptStart
from operators.engine.parallel.lockstep import make_parallel
from operators.models.folders import ModelError

pytestmark = pytest.mark.usefixtures("forked")


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
def test_a_rank_that_drew_other_tokens_ends_the_run_before_it_answers(declare, together):
    engine = together(declare())
    engine.step([start()])
    engine.rows.last[0] += 1
    with pytest.raises(WorkerDied, match=r"rank 1 is not in step with rank 0: before step 2"):
        engine.step()


@pytest.mark.slow
def test_a_model_that_cannot_be_dealt_out_is_refused_and_no_rank_is_left(declare):
    declaration, before = declare(), descendants()
    with pytest.raises(ModelError, match="4 attention heads and 2 key/value heads"):
        make_parallel(declaration, Context(node="generator"), 3)
    assert descendants() <= before, "no rank runs, and none is left to be waited for"
