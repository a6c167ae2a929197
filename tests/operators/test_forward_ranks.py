"""A forward operator as several ranks: the numbers of one rank, whatever the head, and a broken rank is named."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rigs.forwards import COLUMNS, LANE, language_model, rollouts, saved
from rigs.heads import classifier

from dataflow import Devices, Graph, GraphError, LoRA, Model, plan
from dataflow.errors import RunError, WorkerDied
from dataflow.node import Batch, Context, Runtime
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs, RewardModel, Values
from operators.forward import ForwardOperator
from operators.models.errors import ModelError

GROUPS = [
    rollouts(0), rollouts(1, ("b", "c c", "")), rollouts(2, ("abcdefgh", "abcdefg", "a")),
    rollouts(3, ("19", "1", "9")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    mild: dict[str, Any] = {"initializer_range": 0.05}
    made = {
        "policy": language_model(**mild), "critic": classifier("Llama", "TokenClassification", **mild),
        "judge": classifier("Llama", "SequenceClassification", **mild),
    }  # fmt: skip
    return {name: saved(module, tmp_path_factory.mktemp(name)) for name, module in made.items()}


@pytest.fixture
def built() -> Iterator[Any]:
    """Makes the runtime of a declaration on several ranks."""
    made: list[Runtime] = []

    def build(declaration: ForwardOperator, ranks: int) -> Runtime:
        context = Context(node=declaration.name, columns={LANE: COLUMNS}, ranks=ranks)
        made.append(declaration.build(context))
        return made[-1]

    yield build
    for runtime in made:
        runtime.close()


def numbers(runtime: Runtime, *groups: pa.RecordBatch) -> list[Any]:
    """By row, from a runtime that is given all groups at once."""
    for group in groups:
        runtime.push(Batch(LANE, group, "generator"))
    found: list[Any] = []
    while (made := runtime.work()) is not None:
        found += [row["numbers"] for batch in made for row in batch.records.to_pylist()]
    return found


def declared(kind: str, folders: dict[str, Path], **knobs: Any) -> ForwardOperator:
    if kind == "judge":
        return RewardModel(Model(str(folders["judge"]), head="score").frozen(), name="numbers", **knobs)
    if kind == "values":
        return Values(Model(str(folders["critic"]), head="value").frozen(), name="numbers", **knobs)
    model = Model(str(folders["policy"]), dtype="bfloat16" if kind == "rounded" else "float32").frozen()
    return Logprobs(model, name="numbers", **knobs)


@pytest.mark.parametrize(
    ("kind", "ranks", "apart"),
    [("logprobs", 2, 1e-6), ("logprobs", 4, 1e-6), ("values", 2, 1e-6), ("judge", 2, 1e-6), ("rounded", 2, 0.03)],
)
def test_ranks_give_the_numbers_of_one(
    kind: str, ranks: int, apart: float, folders: dict[str, Path], built: Any
) -> None:
    """With 4 ranks and 2 key/value heads, neighbouring ranks hold the same one."""
    ours = numbers(built(declared(kind, folders, micro_batch_tokens=24, tensor_parallel=ranks), ranks), *GROUPS)
    theirs = numbers(built(declared(kind, folders, micro_batch_tokens=24), 1), *GROUPS)
    assert len(ours) == 12 and None not in ours and np.ptp(np.concatenate([np.ravel(one) for one in ours])) > 1e-3
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=apart)


def test_ids_that_truncation_left_reach_every_rank(folders: dict[str, Path], built: Any) -> None:
    groups = [rollouts(0, masks={0: [1, 2, 3], 1: [4, 5]}), rollouts(1, masks={1: [7]})]
    ours = numbers(built(declared("logprobs", folders, tensor_parallel=2), 2), *groups)
    for one, other in zip(ours, numbers(built(declared("logprobs", folders), 1), *groups), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_each_rank_holds_its_part_of_the_layers(folders: dict[str, Path], built: Any) -> None:
    runtime = built(declared("logprobs", folders, tensor_parallel=2), 2)
    shapes = {name: tuple(weight.shape) for name, weight in runtime._reading.forward.module.named_parameters()}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (24, 32)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (32, 16)
    assert shapes["model.embed_tokens.weight"] == (48, 32)


def test_a_rank_that_is_killed_is_named_and_ends_the_others(folders: dict[str, Path], built: Any) -> None:
    runtime = built(declared("logprobs", folders, tensor_parallel=2), 2)
    team = runtime._reading.forward._exchange.team
    pid = team._processes[1].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 1 of 'numbers' .* ended by signal 9"):
        numbers(runtime, *GROUPS)
    with pytest.raises(RunError, match="not in step any more"):
        numbers(runtime, *GROUPS)


def test_heads_that_cannot_be_dealt_out_are_refused(folders: dict[str, Path], built: Any) -> None:
    with pytest.raises(ModelError, match="cannot be dealt out to 3 ranks: it has 4 attention heads"):
        built(declared("logprobs", folders, tensor_parallel=3), 3)


def test_knobs_that_cannot_be_right_are_refused() -> None:
    assert "has tensor_parallel=0; give" in Logprobs(Model("policy").frozen(), tensor_parallel=0).faults()[0]
    (fault,) = Logprobs(Model("policy", lora=LoRA()), tensor_parallel=2).faults()
    assert "merged into whole layers; use tensor_parallel=1" in fault
    g, policy = Graph("inline"), Model("policy")
    generator, trainer = FakeGenerator(model=policy), FakeTrainer(model=policy)
    trainer(Logprobs(policy.frozen(), tensor_parallel=2)(generator(g.source(FakePrompts()))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    assert plan(g, Devices(cpus=4)).placements["ref_logprobs"].ranks == 2
    with pytest.raises(GraphError, match="'ref_logprobs' has tensor_parallel=2, but a run in one process"):
        plan(g, Devices(cpus=4), one_process=True)
