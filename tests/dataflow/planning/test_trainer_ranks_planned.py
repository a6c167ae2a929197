"""How a trainer of several ranks is planned: its threads and memory, how its shards travel, and
what is refused.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model
from dataflow.app import main
from dataflow.node import Split, Traits
from dataflow.planning.hosts import Devices
from dataflow.planning.model_size import ModelSize
from dataflow.planning.plan import Plan, plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")


SIZES = {"policy": ModelSize(parameters=2_150_000)}


CPUS, GPUS = Devices(cpus=8), Devices(cpus=8, gpus=8)


@dataclass(frozen=True, eq=False)
class Sharing(FakeTrainer):
    """A trainer whose layers may be shared out, and which may hold several replicas of its
    model.
    """

    tensor_parallel: int = 1
    dp_replicate: int = 1

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            split=Split(tensor_parallel=self.tensor_parallel, dp_replicate=self.dp_replicate),
        )


@dataclass(frozen=True, eq=False)
class Narrow(FakeGenerator):
    """A generator that takes its weights as int8."""

    @property
    def quantized(self) -> str | None:
        return "int8"


def build(
    tensor_parallel: int = 1, generator: FakeGenerator | None = None, dp_replicate: int = 1
) -> Graph:
    graph = Graph("test")
    trainer = Sharing(
        name="trainer", model=POLICY, tensor_parallel=tensor_parallel, dp_replicate=dp_replicate
    )
    generator = generator or FakeGenerator(model=POLICY)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def weights_line(made: Plan) -> str:
    (line,) = [line for line in made.explain().splitlines() if line.startswith("weights")]
    return line


def test_ranks_on_the_cpu_share_the_cores_and_the_models_memory() -> None:
    one = plan(build(), CPUS, sizes=SIZES).placements["trainer"]
    made = plan(build(), CPUS, ranks={"trainer": 3}, sizes=SIZES)
    trainer, generator = made.placements["trainer"], made.placements["generator"]
    assert (one.ranks, one.threads, trainer.ranks, trainer.replicas) == (1, 4, 3, 1)
    assert trainer.threads == generator.threads == 2
    assert one.memory_bytes is not None and trainer.memory_bytes is not None
    assert 0 <= one.memory_bytes // 3 - trainer.memory_bytes < 3, (
        "each of its three parts is rounded"
    )
    assert made.processes().count(("trainer", 0, ["trainer"])) == 1


def test_tensor_parallel_alone_asks_for_as_many_ranks() -> None:
    assert plan(build(2), CPUS).placements["trainer"].ranks == 2
    assert plan(build(2), CPUS, ranks={"trainer": 4}).placements["trainer"].ranks == 4
    assert plan(build(2), GPUS, gpus={"trainer": 4}).placements["trainer"].ranks == 4


@pytest.mark.parametrize(
    ("knobs", "how", "ranks", "said"),
    [
        ({"dp_replicate": 2}, {}, 2, "2 (replicate)"),
        ({"dp_replicate": 2}, {"ranks": {"trainer": 4}}, 4, "2 x 2 (replicate x shard)"),
        ({"dp_replicate": 2, "tensor_parallel": 2}, {}, 4, "2 x 2 (replicate x tensor)"),
        (
            {"dp_replicate": 2, "tensor_parallel": 2},
            {"gpus": {"trainer": 8}},
            8,
            "2 x 2 x 2 (replicate x shard x tensor)",
        ),
        ({"tensor_parallel": 2}, {"ranks": {"trainer": 4}}, 4, "2 x 2 (shard x tensor)"),
        ({"tensor_parallel": 2}, {}, 2, None),
        ({}, {"ranks": {"trainer": 4}}, 4, None),
    ],
)
def test_a_plan_says_how_ranks_make_up_a_mesh_in_words_and_in_the_picture(
    knobs: dict[str, int], how: dict[str, Any], ranks: int, said: str | None
) -> None:
    made = plan(build(**knobs), GPUS, sizes=SIZES, **how)
    assert made.placements["trainer"].ranks == ranks
    assert [line for line in made.explain().splitlines() if line.startswith("the ranks of")] == (
        [f"the ranks of 'trainer' are {said}"] if said else []
    )
    (label,) = [frame.label for frame in made.frames() if frame.nodes == ("trainer",)]
    assert label.endswith(f" · {said}") if said else "(" not in label


@pytest.mark.parametrize(
    ("devices", "how", "executor"),
    [
        (CPUS, {"ranks": {"trainer": 2}}, "shared_memory"),
        (CPUS, {"ranks": {"trainer": 2}, "weights": "gloo"}, "gloo"),
        (GPUS, {"gpus": {"trainer": 2}}, "shared_memory"),
        (GPUS, {"gpus": {"trainer": 2, "generator": 2}}, "cuda_ipc"),
        (GPUS, {"gpus": {"trainer": 2, "generator": 2}, "weights": "nccl"}, "nccl"),
        (GPUS, {"gpus": {"trainer": 2, "generator": 2}, "weights": "gloo"}, "gloo"),
        (GPUS, {"gpus": {"generator": 2, "trainer": "generator"}}, "cuda_ipc"),
        (GPUS, {"gpus": {"trainer": 1, "generator": 2}}, "cuda_ipc"),
    ],
)
def test_each_rank_sends_its_own_shards_by_one_executor_for_all_and_the_plan_says_so(
    devices: Devices, how: dict[str, Any], executor: str
) -> None:
    made = plan(build(), devices, **how)
    assert {path.executor for path in made.weight_paths} == {executor}
    assert weights_line(made).startswith(f"weights trainer -> generator: {executor} (")


@pytest.mark.parametrize(
    ("tensor_parallel", "devices", "how", "said"),
    [
        (
            1,
            CPUS,
            {"ranks": {"trainr": 2}},
            r"'trainr', but the graph has .*did you mean 'trainer'",
        ),
        (1, CPUS, {"ranks": {"trainer": 0}}, "given 0 ranks; give it 1 rank or more"),
        (
            1,
            CPUS,
            {"ranks": {"generator": 2}},
            "given 2 ranks, but it trains nothing; .*tensor_parallel",
        ),
        (
            1,
            GPUS,
            {"ranks": {"trainer": 2}, "gpus": {"trainer": 4}},
            "2 ranks and 4 GPUs; .*leave ranks= out",
        ),
        (
            2,
            CPUS,
            {"ranks": {"trainer": 3}},
            "on 3 ranks, but has tensor_parallel=2, .*multiple of 2",
        ),
        (
            2,
            GPUS,
            {"gpus": {"trainer": 3}},
            "on 3 ranks, but has tensor_parallel=2, .*multiple of 2",
        ),
        (
            2,
            CPUS,
            {"one_process": True},
            "on 2 ranks, but a run in one process has one of everything",
        ),
        (
            1,
            CPUS,
            {"ranks": {"trainer": 2}, "weights": "nccl"},
            "needs both ends on GPUs; .*use shared_memory",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_what_to_do(
    tensor_parallel: int, devices: Devices, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        plan(build(tensor_parallel), devices, **how)


@pytest.mark.parametrize(
    ("tensor_parallel", "how", "said"),
    [
        (
            1,
            {"ranks": {"trainer": 3}},
            "on 3 ranks, but has dp_replicate=2, .*multiple of 2 ranks, or another dp_rep",
        ),
        (
            2,
            {"ranks": {"trainer": 6}},
            "on 6 ranks, but has dp_replicate=2 and tensor_parallel=2, .*multiple of 4",
        ),
        (1, {"one_process": True}, "on 2 ranks, but a run in one process .*dp_replicate=1"),
    ],
)
def test_ranks_that_replicas_do_not_divide_are_refused(
    tensor_parallel: int, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        plan(build(tensor_parallel, dp_replicate=2), CPUS, **how)


def test_several_ranks_send_weights_narrow_as_one_does() -> None:
    graph = build(generator=Narrow(model=POLICY))
    for ranks in (1, 2):
        made = plan(graph, CPUS, ranks={"trainer": ranks})
        assert {path.executor for path in made.weight_paths} == {"shared_memory"}


def graph_of_main() -> Graph:
    return build()


def test_the_command_line_takes_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.model_files.start_fault", lambda model: None)
    main(graph_of_main, args=["--ranks", "trainer=2", "--explain", "--runs", str(tmp_path)])
    said = capsys.readouterr().out
    assert (
        "weights trainer -> generator: shared_memory (2 trainer ranks -> 1 reader, from the weights"
        in said
    )
    with pytest.raises(SystemExit) as ended:
        main(graph_of_main, args=["--ranks", "trainer=many", "--explain", "--runs", str(tmp_path)])
    assert ended.value.code == 1
    assert "write it as trainer=2" in capsys.readouterr().err.replace("\n", " ")
