"""Every rank takes its own slices of a version from the trainer's memory, and all ranks compute
with the same one.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.operators import make_context
from slices_rig import WAIT_S, Opens, Rig, assert_slices, publish, values, writer

from dataflow import Graph, Model
from dataflow.errors import DeadlineError, RunError, WorkerDied
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.weight_ends import OpensWeights, WeightSite
from dataflow.worker.host import Settings
from dataflow.worker.ports import Ports
from operators.engine.interface import PromptStart
from operators.generation.runtime import GeneratorRuntime
from transport.weights.executors.shared_memory import HEADER_BYTES

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def rig(declare, tmp_path_factory):
    made: list[Rig] = []

    def make(timeout_s: float = 30.0, executor: str = "shared_memory", **knobs: Any) -> Rig:
        made.append(Rig(declare(**knobs), tmp_path_factory.mktemp("w"), 2, timeout_s, executor))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(limit: int = 60) -> PromptStart:
    return PromptStart(prompt=np.arange(2, 9), limit=limit, tickets=[0, 1], seeds=[0, 1])


def trainer(rig: Rig, first: int, last: int) -> tuple[Any, Any]:
    """A trainer's process, and what it sets when all is published."""
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    given = (rig.opens.address, rig.opens.folder, rig.shapes, first, last, done)
    process = spawn.Process(target=publish, args=given)
    process.start()
    return process, done


def end(process: Any) -> None:
    process.kill()
    process.join(20)


@pytest.mark.slow
def test_under_a_running_trainer_each_rank_holds_its_slices_of_every_version_it_computes_with(rig):
    ranks = rig(slots=2)
    ranks.engine.step([start()])
    process, _ = trainer(ranks, 1, 52)
    seen = [-1]
    try:
        while seen[-1] < 52:
            seen.append(ranks.take())
            ranks.assert_slices(seen[-1])
            ranks.engine.step()
    finally:
        end(process)
    assert seen == sorted(set(seen)) and len(seen) > 20
    assert ranks.engine.progress(0).tokens.versions[-20:].tolist() == seen[-20:]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_twenty_versions_are_taken_by_both_ranks_byte_for_byte_between_steps(executor, rig):
    ranks = rig(slots=2, executor=executor)
    ranks.engine.step([start()])
    for version in range(20):
        ranks.publish(version)
        assert ranks.take() == version
        ranks.assert_slices(version)
        ranks.engine.step()
    drawn = ranks.engine.progress(0).tokens.versions[-20:].tolist()
    assert drawn == list(range(20))


@pytest.mark.slow
def test_slices_by_rows_are_views_of_the_trainers_memory_and_only_slices_by_columns_are_copied(rig):
    ranks = rig()
    for version in (1, 2):
        ranks.publish(version)
        ranks.take()
        mapped = ranks.opens.end[0]._attached._inside
        buffer = mapped.segment.buffer
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
        copied = {
            name
            for name, shard in ranks.shards.items()
            if not begin <= shard.local.data_ptr() < end
        }
        assert copied == {name for name in ranks.shapes if "o_proj" in name or "down_proj" in name}
        assert sum(target.nbytes for target, _ in mapped.copies) == sum(
            ranks.shards[n].local.nbytes for n in copied
        )


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_a_version_that_appears_while_ranks_enter_another_is_the_next_one_for_all(executor, rig):
    ranks = rig(executor=executor)
    ranks.publish(1)
    ranks.offered()
    enter = ranks.reader._enter

    def enter_late(*told: Any) -> Any:
        ranks.reader._enter = enter
        ranks.publish(7)
        time.sleep(0.2)  # it may come
        return enter(*told)

    ranks.reader._enter = enter_late
    assert ranks.reader.adopt() == 1
    ranks.engine.adopted(1)
    ranks.assert_slices(1)
    assert ranks.take() == 7
    ranks.assert_slices(7)


@pytest.mark.slow
def test_a_version_that_one_rank_cannot_enter_is_taken_by_none_and_the_next_by_all(rig):
    ranks = rig()
    ranks.publish(1)
    ranks.take()
    ranks.publish(2)
    offer = ranks.offered()
    path = Path(ranks.opens.folder) / offer.segment
    aside = path.rename(f"{path}.gone")
    assert ranks.reader.adopt() == 1
    ranks.engine.adopted(ranks.reader.version)
    ranks.assert_slices(1)
    aside.rename(path)
    assert ranks.take() == 2
    ranks.assert_slices(2)
    ranks.publish(3)
    assert ranks.take() == 3


@pytest.mark.slow
def test_a_rank_that_can_enter_nothing_for_too_long_ends_the_replica_with_the_cause(rig):
    ranks = rig()
    ranks.publish(1)
    offer = ranks.offered()
    (Path(ranks.opens.folder) / offer.segment).unlink()
    team = ranks.engine._exchange.team
    team.limits = dataclasses.replace(team.limits, exchange_s=0.0)
    ranks.reader._enter = lambda *told: [1]
    with pytest.raises(
        DeadlineError, match=r"ranks \[1\] of 'generator' could enter no version .* version 1 gone"
    ):
        ranks.reader.adopt()


@pytest.mark.slow
def test_a_damaged_version_is_taken_by_no_rank_and_the_next_by_all(rig, caplog):
    ranks = rig()
    ranks.publish(1)
    ranks.take()
    ranks.publish(2)
    newest = next(key for key, version in ranks.writer._offers.segments.items() if version == 2)
    with (Path(ranks.opens.folder) / newest).open("r+b") as file:
        file.seek(HEADER_BYTES + 1)
        found = file.read(1)[0]
        file.seek(HEADER_BYTES + 1)
        file.write(bytes([found ^ 1]))
    assert ranks.take() == 1
    assert "version 2 is damaged" in caplog.text
    ranks.assert_slices(1)
    ranks.publish(3)
    assert ranks.take() == 3
    ranks.assert_slices(3)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_a_rank_that_is_killed_is_named_at_the_next_version_and_holds_the_trainer_up_no_more(
    executor, rig
):
    ranks = rig(executor=executor)
    ranks.publish(1)
    ranks.take()
    ranks.publish(2)
    ranks.offered()
    pid = ranks.engine._exchange.team._processes[1].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=rf"rank 1 of 'generator' \(pid {pid}\) ended by signal 9 .* in its entry"
    ):
        ranks.reader.adopt()
    with pytest.raises(RunError, match="not in step any more"):
        ranks.engine.step()
    ranks.opens.end[0].close()
    for version in (3, 4, 5):
        ranks.publish(version)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_a_rank_that_is_frozen_is_named_when_the_time_out_has_passed(executor, rig):
    ranks = rig(timeout_s=2.0, executor=executor)
    ranks.publish(1)
    ranks.offered()
    pid = ranks.engine._exchange.team._processes[1].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=rf"waited 2 s for 'entry' of rank 1 \(pid {pid}\)"):
        ranks.reader.adopt()


@pytest.mark.slow
def test_ranks_keep_their_version_when_the_trainer_is_killed_and_take_the_next_trainers(rig):
    ranks = rig(slots=2)
    process, done = trainer(ranks, 1, 2)
    try:
        while ranks.reader.version < 2:
            ranks.take()
        assert done.wait(WAIT_S)
    finally:
        end(process)
    ranks.engine.step([start()])
    ranks.assert_slices(2)
    ranks.publish(9)
    assert ranks.take() == 9
    ranks.assert_slices(9)
    ranks.engine.step()


@pytest.mark.slow
def test_a_rank_of_another_version_ends_the_run_before_it_answers(rig):
    ranks = rig(slots=2)
    ranks.publish(1)
    ranks.take()
    ranks.engine.step([start()])
    ranks.engine._engine.version = 2
    with pytest.raises(WorkerDied, match="rank 1 is not in step with rank 0"):
        ranks.engine.step()


@pytest.mark.parametrize("executor", ["shared_memory", "gloo"])
def test_the_generators_runtime_has_every_rank_take_its_own_slices(
    executor, declare, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("w")
    opens = Opens(f"ipc://{folder}/w", str(folder), executor)
    runtime = GeneratorRuntime(
        declare(tensor_parallel=2), make_context(node="generator", reader=opens)
    )
    engine: Any = runtime.engine
    shapes = {name: shard.shape for name, shard in engine.shards.items()}
    trainer_end = writer(values(shapes, 0), opens)
    try:
        assert trainer_end.publish(4, values(shapes, 4))
        deadline = time.monotonic() + WAIT_S
        while engine.version != 4 and time.monotonic() < deadline:
            trainer_end.poll()
            runtime.work()
        assert engine.version == 4
        assert_slices(engine, values(shapes, 4), 2)
        with pytest.raises(RunError, match="lie on 2 ranks; found a call for whole tensors"):
            _ = engine.tensors
    finally:
        runtime.close()
        for each in (*opens.end, trainer_end):
            each.close()


@pytest.mark.parametrize("executor", ["shared_memory", "cuda_ipc", "gloo", "nccl"])
def test_the_ports_tell_other_ranks_where_versions_are(executor, tmp_path):
    graph, model = Graph("test"), Model("policy")
    generator, learner = FakeGenerator(model=model), FakeTrainer(model=model)
    learner(generator(graph.source(FakePrompts())))
    graph.feedback(learner.weights, generator, max_staleness=1)
    made = plan(graph, Devices(cpus=2))
    (path,) = made.weight_paths
    object.__setattr__(made, "weight_paths", (dataclasses.replace(path, executor=executor),))
    settings = Settings(folder="", worker="generator", sockets=str(tmp_path))
    opens = Ports(graph, made, ["generator"], settings).reader_of("trainer", "generator")
    assert isinstance(opens, OpensWeights)
    address = f"ipc://{tmp_path}/weights.trainer.{executor}"
    zero_copy = executor == "gloo"
    assert opens.site == WeightSite(
        executor=executor,
        is_sharded=executor in ("gloo", "nccl"),
        address=address,
        folder=str(tmp_path),
        name="generator-0",
        zero_copy=zero_copy,
    )
