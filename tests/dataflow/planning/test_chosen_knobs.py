"""Knobs that a trainer leaves open are chosen by what fits, alike everywhere, and kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.memory.planned import CONFIGS, write
from dataflow import Graph, GraphError, Model
from dataflow.history.describe import plan_facts
from dataflow.history.resume import RecordedRun
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.memory_need import FILLED, SPARE, rollouts_of
from dataflow.planning.model_size import measured
from dataflow.planning.plan import Plan, plan
from dataflow.runtime import Context, DeviceShare
from operators import Generator, Prompts, Trainer

GIB = 1 << 30
H100, H200 = int(79.2 * GIB), int(139.8 * GIB)
FAST = {"compile": True, "gradient_checkpointing": False, "micro_batch_tokens": 8192}


def graph_of(
    model: str, folder: Path, sampler: Mapping[str, Any] | None = None, **knobs: Any
) -> Graph:
    from rigs.graphs import reward

    from operators.credit import advantage

    graph = Graph("chosen")
    policy = Model(str(write(CONFIGS[model], folder / model)), dtype="bfloat16")
    generator = Generator(policy, group_size=8, max_tokens=1024, **(sampler or {}))
    trainer = Trainer(policy, prompts_per_step=64, **knobs)
    trainer(advantage(reward(generator(graph.source(Prompts([{"prompt": "a"}]))))))
    graph.feedback(trainer.weights, generator, max_staleness=4)
    return graph


def planned(
    graph: Graph,
    generators: int,
    trainers: int,
    *,
    room: int = H100,
    main_memory: int = 0,
    **how: Any,
) -> Plan:
    count = generators + trainers
    hosts = [
        Host(
            name=f"h{at}",
            cpus=96,
            gpus=min(8, count),
            gpu_memory_bytes=room,
            memory_bytes=main_memory,
        )
        for at in range(-(-count // 8))
    ]
    devices = Devices.of(hosts)
    sources = {operator.uses.source for operator in graph.operators.values() if operator.uses}
    sizes = {source: size for source in sources if (size := measured(source)) is not None}
    gpus = {"generator": generators, "trainer": trainers}
    return plan(graph, devices, gpus=gpus, sizes=sizes, **how)


def test_a_trainer_as_it_comes_is_planned_on_eight_gpus_with_a_7b(tmp_path: Path) -> None:
    made = planned(graph_of("qwen2.5-7b", tmp_path), 4, 4)
    chosen = made.placements["trainer"].chosen
    assert set(chosen) == set(FAST) and chosen["compile"]
    need = made.placements["trainer"].need
    assert need is not None and need.total <= SPARE * H100
    (line,) = [line for line in made.explain().splitlines() if line.startswith("left to the plan")]
    assert "'trainer' has compile=True" in line
    (cache,) = [line for line in made.explain().splitlines() if "takes what is left" in line]
    assert "KV-cache of each rank of 'generator'" in cache


def test_less_memory_takes_fewer_tokens_at_once_and_then_computes_layers_again(
    tmp_path: Path,
) -> None:
    graph = graph_of("qwen3-1.7b", tmp_path)
    seen = []
    for gib in range(90, 24, -2):
        devices = Devices(cpus=8, gpus=2, gpu_memory_bytes=gib * GIB)
        size = measured(str(tmp_path / "qwen3-1.7b"))
        assert size is not None
        sizes = {str(tmp_path / "qwen3-1.7b"): size}
        try:
            made = plan(graph, devices, gpus={"generator": 1, "trainer": 1}, sizes=sizes)
        except GraphError:
            break
        chosen = dict(made.placements["trainer"].chosen)
        if chosen not in seen:
            seen.append(chosen)
    assert seen[0] == FAST
    kept = [way["gradient_checkpointing"] for way in seen]
    assert list(dict.fromkeys(kept)) == [False, True, "offload"]
    assert [*kept] == sorted(kept, key=[False, True, "offload"].index)


def test_layers_that_are_not_compiled_keep_products_before_they_keep_nothing() -> None:
    trainer = Trainer(Model("policy"), tensor_parallel=2)
    kept = [way["gradient_checkpointing"] for way in trainer.traits.ways]
    assert list(dict.fromkeys(kept)) == [False, "products", True, "offload"]
    compiled = Trainer(Model("policy"))
    assert "products" not in [way["gradient_checkpointing"] for way in compiled.traits.ways]


def test_inputs_of_layers_need_main_memory(tmp_path: Path) -> None:
    graph = graph_of("qwen2.5-7b", tmp_path, gradient_checkpointing="offload", compile=True)
    assert planned(graph, 4, 4, main_memory=100 * GIB)
    with pytest.raises(GraphError, match="main memory of host 'h0'.*inputs of layers 1"):
        planned(graph, 4, 4, main_memory=3 * GIB)


def test_two_versions_of_405b_fit_eight_h200_and_of_eight_h100_one_arrives_in_main_memory(
    tmp_path: Path,
) -> None:
    graph = graph_of("llama-405b", tmp_path, {"tensor_parallel": 8, "weights": "fp8"})
    made = planned(graph, 8, 512, room=H200)
    need = made.placements["generator"].need
    assert need is not None and need.rollout
    versions = need.parts["weights"] + need.parts["version on its way"]
    assert versions == pytest.approx(2 * 51.3e9, rel=0.01), "as docs/weights.md has it"
    assert made.placements["trainer"].chosen["micro_batch_tokens"] == 8192
    assert made.placements["generator"].chosen == {}
    made = planned(graph, 8, 512)
    need = made.placements["generator"].need
    assert made.placements["generator"].chosen == {"arrives_in": "host"}
    assert need is not None and "version on its way" not in need.parts
    assert need.total < FILLED * H100 and rollouts_of(need, H100)[1] > 0
    assert {path.executor for path in made.weight_paths} == {"nccl"}
    assert "'generator' has arrives_in=host" in made.explain()
    with pytest.raises(GraphError, match="main memory of host.*a version that arrives 38"):
        planned(graph, 8, 512, main_memory=300 * GIB)
    stays = graph_of(
        "llama-405b",
        tmp_path,
        {"tensor_parallel": 8, "weights": "fp8", "arrives_in": "device"},
    )
    with pytest.raises(GraphError, match=r"'generator.*more memory, as two versions have to fit"):
        planned(stays, 8, 512)


def test_within_a_host_nobody_writes_into_main_memory_of_a_reader(tmp_path: Path) -> None:
    made = planned(graph_of("qwen2.5-7b", tmp_path, {"arrives_in": "host"}), 4, 4)
    assert {path.executor for path in made.weight_paths} == {"nccl"}
    assert made.executor("trainer", "generator", 0, apart=False) == "nccl"


def test_what_is_given_is_left_as_it_is(tmp_path: Path) -> None:
    graph = graph_of("qwen3-1.7b", tmp_path, compile=False, micro_batch_tokens=1024)
    assert planned(graph, 4, 4).placements["trainer"].chosen == {"gradient_checkpointing": False}
    everything = {"compile": True, "micro_batch_tokens": 512, "gradient_checkpointing": True}
    assert (
        planned(graph_of("qwen3-1.7b", tmp_path, **everything), 4, 4).placements["trainer"].chosen
        == {}
    )


def test_on_cores_nothing_is_chosen(tmp_path: Path) -> None:
    graph = graph_of("qwen3-1.7b", tmp_path)
    made = plan(graph, Devices(cpus=8))
    assert made.placements["trainer"].chosen == {}
    assert "left to the plan" not in made.explain()


def test_a_resumed_run_keeps_what_its_first_start_chose(tmp_path: Path) -> None:
    graph = graph_of("qwen2.5-7b", tmp_path)
    made = planned(graph, 4, 4)
    config = json.loads(json.dumps(plan_facts(graph, made)))
    recorded = RecordedRun(graph={}, config=config, times={})
    chosen = made.placements["trainer"].chosen
    assert recorded.chosen == {"trainer": chosen}
    again = planned(graph, 8, 8, chosen=recorded.chosen)
    assert again.placements["trainer"].chosen == chosen
    before = {**config, "placed": {"trainer": {"ranks": 4}}}
    older = RecordedRun(graph={}, config=before, times={})
    assert planned(graph, 4, 16, chosen=older.chosen).placements["trainer"].chosen == {}


def test_a_trainer_takes_what_its_plan_chose_and_knobs_of_its_own_where_none_did() -> None:
    trainer = Trainer(Model("policy"), compile=False)
    way = {"micro_batch_tokens": 4096, "gradient_checkpointing": True}
    context = Context(node="trainer", devices=DeviceShare(chosen=way))
    settled = trainer.settled(context.devices.chosen)
    assert (settled.micro_batch_tokens, settled.gradient_checkpointing) == (4096, True)
    assert settled.compile is False and settled.settled({}) is settled
    plain = Trainer(Model("policy")).settled({})
    assert (plain.micro_batch_tokens, plain.gradient_checkpointing, plain.compile) == (
        8192,
        False,
        False,
    )


@pytest.mark.parametrize("knob", ["gradient_checkpointing", "micro_batch_tokens"])
def test_ways_have_no_values_for_knobs_that_are_given(knob: str) -> None:
    given = {"gradient_checkpointing": True, "micro_batch_tokens": 4096}[knob]
    ways = Trainer(Model("policy"), **{knob: given}).traits.ways
    assert ways and all(knob not in way for way in ways)
    assert len({tuple(way.items()) for way in ways}) == len(ways)
