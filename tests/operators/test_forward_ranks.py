"""A forward operator as several ranks: the numbers of one rank, whatever the head, and a broken
rank is named.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks_rig import in_a_fork
from rigs.forwards import COLUMNS, LANE, language_model, rollouts, saved
from rigs.heads import classifier
from rigs.operators import make_context
from slices_rig import WAIT_S, Opens, writer

from dataflow import Devices, Graph, GraphError, LoRA, Model, plan
from dataflow.errors import RunError, WorkerDied
from dataflow.runtime import Batch, Runtime
from dataflow.staleness import Bound
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs, RewardModel, Values
from operators.engine.parallel import shards
from operators.forward import ForwardOperator
from operators.models.folders import ModelError
from operators.models.loading import load_merged

GROUPS = [
    rollouts(0),
    rollouts(1, ("b", "c c", "")),
    rollouts(2, ("abcdefgh", "abcdefg", "a")),
    rollouts(3, ("19", "1", "9")),
]


def module_of(kind: str, seed: int = 0) -> Any:
    """A model of that kind, with other weights for each seed."""
    knobs: dict[str, Any] = {"initializer_range": 0.05, "seed": seed}
    if kind == "tied":
        return language_model("Qwen3", tie_word_embeddings=True, head_dim=8, **knobs)
    heads = {"values": "TokenClassification", "judge": "SequenceClassification"}
    return classifier("Llama", heads[kind], **knobs) if kind in heads else language_model(**knobs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("logprobs", "tied", "values", "judge")
    return {kind: saved(module_of(kind), tmp_path_factory.mktemp(kind)) for kind in kinds}


@contextlib.contextmanager
def built(declaration: ForwardOperator, **context: Any) -> Iterator[Any]:
    """The runtime of a declaration on as many ranks as it says."""
    torch.set_num_threads(1)
    ranks = declaration.tensor_parallel
    runtime = declaration.build(
        make_context(node=declaration.name, columns={LANE: COLUMNS}, ranks=ranks, **context)
    )
    try:
        yield runtime
    finally:
        runtime.close()


def numbers(runtime: Runtime, *groups: pa.RecordBatch) -> list[Any]:
    """By row, from a runtime that is given all groups at once."""
    for group in groups:
        runtime.push(Batch(LANE, group, "generator"))
    found: list[Any] = []
    while (made := runtime.work()) is not None:
        found += [row["numbers"] for batch in made for row in batch.records.to_pylist()]
    return found


@contextlib.contextmanager
def fed(
    declaration: ForwardOperator, folder: Path, executor: str, device: str = "cpu"
) -> Iterator[Any]:
    """The runtime of a declaration that reads trained weights, and what has it take a version of
    them.
    """
    trainer: list[Any] = []
    opens, ends = Opens(f"ipc://{folder}/w", str(folder), executor, device), contextlib.ExitStack()
    bound = Bound(max_staleness=0, prompts_per_step=2)

    def take(version: int, weights: dict[str, torch.Tensor]) -> None:
        if not trainer:
            trainer.append(writer(weights, opens))
            ends.callback(trainer[0].close)
        assert trainer[0].publish(version, weights)
        deadline = time.monotonic() + WAIT_S
        while runtime.status()["version"] != version and time.monotonic() < deadline:
            trainer[0].poll()
            runtime.work()
        assert runtime.status()["version"] == version

    with (
        ends,
        built(
            declaration, device=device, reader=opens, feedback=bound, bounds={LANE: bound}
        ) as runtime,
    ):
        yield runtime, take
        for end in opens.end:
            end.close()


def of_one(declaration: ForwardOperator, *groups: pa.RecordBatch) -> list[Any]:
    """What one rank finds."""
    with built(replace(declaration, tensor_parallel=1)) as runtime:
        return numbers(runtime, *groups)


def alike(ours: list[Any], theirs: list[Any], apart: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=apart)


def declared(kind: str, folders: dict[str, Path], **knobs: Any) -> ForwardOperator:
    knobs = {"name": "numbers", "micro_batch_tokens": 24} | knobs
    if kind == "judge":
        return RewardModel(Model(str(folders[kind]), head="score").frozen(), **knobs)
    if kind == "values":
        return Values(Model(str(folders[kind]), head="value").frozen(), **knobs)
    model = Model(
        str(folders.get(kind, folders["logprobs"])),
        dtype="bfloat16" if kind == "rounded" else "float32",
    )
    return Logprobs(replace(model, lora=LoRA(3)) if kind == "adapted" else model.frozen(), **knobs)


@pytest.mark.parametrize(
    ("kind", "ranks", "apart"),
    [
        ("logprobs", 2, 1e-6),
        ("logprobs", 4, 1e-6),
        ("tied", 2, 1e-6),
        ("values", 2, 1e-6),
        ("judge", 2, 1e-6),
        ("rounded", 2, 0.03),
    ],
)
@in_a_fork
def test_ranks_give_the_numbers_of_one(
    kind: str, ranks: int, apart: float, folders: dict[str, Path]
) -> None:
    """With 4 ranks and 2 key/value heads, neighbouring ranks hold the same one."""
    declaration = declared(kind, folders, tensor_parallel=ranks)
    with built(declaration) as runtime:
        ours = numbers(runtime, *GROUPS)
    assert (
        len(ours) == 12
        and None not in ours
        and np.ptp(np.concatenate([np.ravel(one) for one in ours])) > 1e-3
    )
    alike(ours, of_one(declaration, *GROUPS), apart)


@pytest.mark.parametrize(
    ("kind", "ranks", "executor"),
    [
        ("tied", 2, "shared_memory"),
        ("logprobs", 4, "gloo"),
        ("values", 2, "gloo"),
        pytest.param("judge", 2, "shared_memory", marks=pytest.mark.slow),
        pytest.param("tied", 2, "gloo", marks=pytest.mark.slow),
        pytest.param("logprobs", 4, "shared_memory", marks=pytest.mark.slow),
    ],
)
@in_a_fork
def test_ranks_that_took_a_version_give_the_numbers_of_one(
    kind: str, ranks: int, executor: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Every rank its own part, of what two ranks of a trainer send (gloo) or one offers; twice, for
    the second comes into another buffer.
    """
    declaration = declared(kind, folders, tensor_parallel=ranks)
    with fed(declaration, tmp_path, executor) as (runtime, take):
        for version in (1, 2):
            module = module_of(kind, seed=version)
            take(version, dict(module.named_parameters()))
            ours = numbers(runtime, *GROUPS)
            folder = str(saved(module, tmp_path / str(version)))
            expected = replace(declaration, model=replace(declaration.model, source=folder))
            alike(ours, of_one(expected, *GROUPS), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tied", "values"])
def test_two_gpus_that_took_a_version_give_the_numbers_of_one_rank(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    in_a_fork(on_gpus)(kind, folders, tmp_path)


def on_gpus(kind: str, folders: dict[str, Path], folder: Path) -> None:
    """Numbers of ranks on GPUs are those of one on the CPU."""
    declaration, module = declared(kind, folders, tensor_parallel=2), module_of(kind, seed=1)
    with fed(declaration, folder, "gloo", "cuda:0") as (runtime, take):
        take(1, dict(module.named_parameters()))
        ours = numbers(runtime, *GROUPS)
    expected = replace(
        declaration, model=replace(declaration.model, source=str(saved(module, folder / "new")))
    )
    alike(ours, of_one(expected, *GROUPS), 1e-3)


@in_a_fork
def test_ranks_take_the_adapters_that_belong_to_their_slices(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Merged into them, before the next group is read."""
    declaration = declared("adapted", folders, tensor_parallel=2)
    module, merged = load_merged(declaration.model)
    assert merged is not None
    draw = torch.Generator().manual_seed(1)
    found = {
        name: torch.randn(each.shape, generator=draw) * 0.1 for name, each in merged.tensors.items()
    }
    with fed(declaration, tmp_path, "shared_memory") as (runtime, take):
        take(1, found)
        ours = numbers(runtime, *GROUPS)
    for name, tensor in merged.tensors.items():
        tensor.copy_(found[name])
    merged.adopted()
    whole = saved(module, tmp_path / "whole")
    expected = replace(declaration, model=replace(declaration.model, source=str(whole), lora=None))
    alike(ours, of_one(expected, *GROUPS), 1e-5)


@in_a_fork
def test_ranks_that_are_forked_where_others_were_before_hold_their_own_part(
    folders: dict[str, Path],
) -> None:
    """DTensor remembers meshes, and would take an equal one for that of rank 0."""
    declaration = declared("logprobs", folders, tensor_parallel=2)
    for _ in range(2):
        with built(declaration) as runtime:
            ours = numbers(runtime, GROUPS[0])
    alike(ours, of_one(declaration, GROUPS[0]), 1e-6)


@in_a_fork
def test_ids_that_truncation_left_reach_every_rank(folders: dict[str, Path]) -> None:
    groups = [rollouts(0, masks={0: [1, 2, 3], 1: [4, 5]}), rollouts(1, masks={1: [7]})]
    declaration = declared("logprobs", folders, tensor_parallel=2)
    with built(declaration) as runtime:
        alike(numbers(runtime, *groups), of_one(declaration, *groups), 1e-5)


@in_a_fork
def test_each_rank_reads_its_part_of_the_model_and_holds_no_more(folders: dict[str, Path]) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nobody loads the whole")

    shards.load_merged = never  # type: ignore[assignment]
    with built(declared("logprobs", folders, tensor_parallel=2)) as runtime:
        shapes = {
            name: tuple(weight.shape)
            for name, weight in runtime._reading.forward.module.named_parameters()
        }
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (24, 32)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (32, 16)
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (24, 32)


@in_a_fork
def test_a_rank_that_is_killed_is_named_and_ends_the_others(folders: dict[str, Path]) -> None:
    with built(declared("logprobs", folders, tensor_parallel=2)) as runtime:
        team = runtime._reading.forward.ranks.team
        os.kill(team._processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 1 of 'numbers' .* ended by signal 9"):
            numbers(runtime, *GROUPS)
        with pytest.raises(RunError, match="not in step any more"):
            numbers(runtime, *GROUPS)


@in_a_fork
def test_a_rank_that_ends_while_a_version_is_waited_for_is_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Without it none would come."""
    with fed(declared("logprobs", folders, tensor_parallel=2), tmp_path, "gloo") as (runtime, _):
        team = runtime._reading.forward.ranks.team
        os.kill(team._processes[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(WorkerDied, match=r"rank 1 of 'numbers' .* ended by signal 9"):
            while time.monotonic() < deadline:
                runtime.work()


@in_a_fork
def test_heads_that_cannot_be_dealt_out_are_refused(folders: dict[str, Path]) -> None:
    wrong = declared("logprobs", folders, tensor_parallel=3)
    with (
        pytest.raises(ModelError, match="cannot be dealt out to 3 ranks: it has 4 attention heads"),
        built(wrong),
    ):
        pass


def test_knobs_that_cannot_be_right_are_refused() -> None:
    assert (
        "has tensor_parallel=0; give"
        in Logprobs(Model("policy").frozen(), tensor_parallel=0).faults()[0]
    )
    g, policy = Graph("inline"), Model("policy")
    generator, trainer = FakeGenerator(model=policy), FakeTrainer(model=policy)
    trainer(Logprobs(policy.frozen(), tensor_parallel=2)(generator(g.source(FakePrompts()))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    assert plan(g, Devices(cpus=4)).placements["ref_logprobs"].ranks == 2
    with pytest.raises(
        GraphError, match="'ref_logprobs' has tensor_parallel=2, but a run in one process"
    ):
        plan(g, Devices(cpus=4), one_process=True)
