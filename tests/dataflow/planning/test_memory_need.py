"""A plan that cannot fit into its devices' memory is refused, with the sum and its parts."""

import ctypes
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.memory.planned import CONFIGS, write
from dataflow import Graph, GraphError, Model
from dataflow.model import LoRA
from dataflow.model_files import start_fault
from dataflow.planning.hosts import Devices
from dataflow.planning.memory_need import FILLED, Passes, check_fit, need_of, rollouts_of
from dataflow.planning.model_size import ModelSize, measure_models, measured
from dataflow.planning.placement import Need
from dataflow.planning.plan import Plan, plan
from dataflow.system.gpu_memory import gpu_memory, gpu_names
from operators import Generator, Logprobs, Prompts, Trainer

GIB = 1 << 30


SIZE = ModelSize(
    parameters=1 << 30,
    largest_end=1 << 27,
    linear=(("q_proj", 1 << 14, 1 << 14),) * 3,
    layers=16,
    width=2048,
    cache_elements=2 * 16 * 1024,
    key_value_heads=2,
    context=4096,
    query_width=2048,
    inner=8192,
)


"""A model of 2 ** 30 parameters, of which 3 * 2 ** 28 are in linear layers."""


KV = 4096 * 2 * 16 * 1024 * 2


"""Of one rollout in bfloat16."""


def planned(gpu_gib: float, gpus: Any = None, *, main_gib: float = 0, **knobs: Any) -> Plan:
    model = Model("policy", dtype="bfloat16", lora=knobs.pop("lora", None))
    graph = Graph("test")
    generator = Generator(model, group_size=4, max_tokens=512, **knobs.pop("generator", {}))
    settled = {"gradient_checkpointing": False, "compile": False, "micro_batch_tokens": 8192}
    trainer = Trainer(model, prompts_per_step=2, **{**settled, **knobs})
    trainer(_scored(generator(graph.source(Prompts([{"prompt": "a"}])))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    devices = Devices(
        cpus=8, gpus=8, gpu_memory_bytes=int(gpu_gib * GIB), memory_bytes=int(main_gib * GIB)
    )
    return plan(graph, devices, gpus=gpus, sizes={"policy": SIZE})


def _scored(stream: Any) -> Any:
    from rigs.graphs import reward

    from operators.credit import advantage

    return advantage(reward(stream))


def parts(made: Plan, node: str) -> dict[str, int]:
    need = made.placements[node].need
    assert need is not None
    return dict(need.parts)


ONE_EACH = {"generator": 1, "trainer": 1}


def test_a_trainer_needs_weights_gradients_moments_and_what_its_passes_keep() -> None:
    made = planned(80, ONE_EACH)
    found = parts(made, "trainer")
    assert found["weights"] == found["gradients"] == 4 * GIB and found["optimiser"] == 8 * GIB
    assert found["version on its way"] == 2 * GIB, "in the memory of the trainer's device"
    kept = Passes(size=SIZE, wide=False).at_most(2 * 4 * 512)
    assert found["activations"] == kept - found["gradients"], "a step of one micro-batch"
    assert parts(made, "generator") == {
        "weights": 2 * GIB,
        "KV-cache": KV,
        "a forward pass": 2048 * 2 * (4 * 2048 + 3 * 8192) + 256 * (1 << 16) * 14,
        "captured steps": (256 + 512) * 2 * (4 * 2048 + 3 * 8192) + 256 * (1 << 16) * 14,
    }


def test_more_tokens_widths_and_trained_weights_keep_more_and_knobs_that_spare_keep_less() -> None:
    base = Passes(size=SIZE, wide=False)
    for more in (
        replace(base, size=replace(SIZE, width=4096)),
        replace(base, size=replace(SIZE, inner=9000)),
        replace(base, size=replace(SIZE, query_width=4096)),
        replace(base, size=replace(SIZE, norms_heads=True)),
        replace(base, wide=True),
    ):
        assert more.at_most(4096) > base.at_most(4096) and more.of_layer > base.of_layer
    spare = [
        replace(base, checkpointed=True),
        replace(base, compiled=True),
        replace(base, shares=2),
    ]
    for each in (base, *spare):
        assert each.at_most(2048) < each.at_most(4096)
    assert all(each.at_most(4096) < base.at_most(4096) for each in spare)
    assert base.one_layer(4096) < base.at_most(4096) / 8


@pytest.mark.parametrize(
    ("knobs", "gib"),
    [({}, 54.7), ({"compile": True}, 42.4), ({"gradient_checkpointing": True}, 27.1)],
)
def test_a_trainer_needs_what_it_took_on_an_h200(
    tmp_path: Path, knobs: dict[str, bool], gib: float
) -> None:
    """Peak memory in docs/figures.md: Qwen3-1.7B, four rollouts of 2,048 tokens in one
    micro-batch, measured while layers computed with float32 weights.
    """
    policy = write(CONFIGS["qwen3-1.7b"], tmp_path)
    graph, model = Graph("bench"), Model(str(policy), dtype="bfloat16")
    generator = Generator(model, group_size=4, max_tokens=2048)
    trainer = Trainer(
        model,
        prompts_per_step=1,
        **{"micro_batch_tokens": 8192, "gradient_checkpointing": False, "compile": False, **knobs},
    )
    trainer(_scored(generator(graph.source(Prompts([{"prompt": "a"}])))))
    size = measured(model.source)
    assert size is not None and size.is_foreseen and size.parameters == 1_720_574_976
    need = need_of(graph, trainer, size, 1, on_gpu=True)
    assert need is not None and need.total / GIB == pytest.approx(gib, rel=0.15)


@pytest.mark.parametrize(
    ("knobs", "gpus", "node", "wanted"),
    [
        (
            {},
            {"generator": 1, "trainer": 4},
            "trainer",
            {"weights": GIB, "gradients": GIB, "optimiser": 2 * GIB},
        ),
        (
            {"dp_replicate": 2},
            {"generator": 1, "trainer": 4},
            "trainer",
            {"weights": 2 * GIB, "gradients": 2 * GIB, "optimiser": 4 * GIB},
        ),
        (
            {"copy_weights": True},
            {"generator": 1, "trainer": 4},
            "trainer",
            {"version on its way": 2 * 2 * GIB // 4},
        ),
        (
            {"lora": LoRA(16)},
            ONE_EACH,
            "trainer",
            {
                "weights": 2 * GIB,
                "gradients": 4 * 3 * 16 * (2 << 14),
                "optimiser": 8 * 3 * 16 * (2 << 14),
            },
        ),
        (
            {"lora": LoRA(16)},
            ONE_EACH,
            "generator",
            {"weights": 2 * GIB, "adapted layers": 2 * (3 << 28)},
        ),
        (
            {"generator": {"weights": "int8"}},
            ONE_EACH,
            "generator",
            {"weights": 2 * GIB - (3 << 28)},
        ),
        (
            {"generator": {"tensor_parallel": 2}},
            {"generator": 2, "trainer": 1},
            "generator",
            {"weights": GIB, "KV-cache": KV // 2},
        ),
        (
            {"generator": {"tensor_parallel": 4}},
            {"generator": 4, "trainer": 1},
            "generator",
            {"weights": GIB // 2, "KV-cache": KV // 2},
        ),
        ({"generator": {"context_tokens": 1024}}, ONE_EACH, "generator", {"KV-cache": KV // 4}),
        ({"generator": {"cache_bytes": 3 * GIB}}, ONE_EACH, "generator", {"KV-cache": 3 * GIB}),
        (
            {"generator": {"cache_bytes": 900 * GIB, "slots": 8}},
            ONE_EACH,
            "generator",
            {"KV-cache": 8 * KV},
        ),
    ],
)
def test_knobs_change_what_they_are_for(
    knobs: Any, gpus: Any, node: str, wanted: dict[str, int]
) -> None:
    found = parts(planned(2000, gpus, **knobs), node)
    assert {name: found[name] for name in wanted} == wanted


def test_a_cache_that_nobody_sizes_takes_what_is_left_beside_a_version_that_arrives() -> None:
    made = planned(80, {"generator": 1, "trainer": 4})
    need = made.placements["generator"].need
    assert need is not None and need.parts["version on its way"] == 2 * GIB
    nbytes, rollouts = rollouts_of(need, 80 * GIB)
    assert rollouts == 256 and nbytes == 256 * KV, "all of its slots"
    nbytes, rollouts = rollouts_of(need, 16 * GIB)
    beside = need.total - KV
    assert 0 < FILLED * 16 * GIB - beside - nbytes < KV and rollouts == nbytes // KV
    assert "takes what is left: 64.0 GiB, 256 rollouts of full length" in made.explain()
    sized = planned(80, {"generator": 1, "trainer": 4}, generator={"cache_bytes": 3 * GIB})
    assert "takes what is left" not in sized.explain()
    too_small, gpus = need.total / FILLED / GIB - 0.1, {"generator": 1, "trainer": 4}
    with pytest.raises(GraphError, match=r"generator.*version on its way.*two versions"):
        planned(too_small, gpus, generator={"arrives_in": "device"})


def test_a_version_of_several_ranks_arrives_in_the_type_that_all_readers_want() -> None:
    sized = {"generator": {"weights": "int8"}}
    made = planned(80, {"generator": 1, "trainer": 4}, **sized)
    assert parts(made, "generator")["version on its way"] == 2 * GIB - (3 << 28)


def test_what_does_not_fit_is_refused_with_the_sum_and_its_parts() -> None:
    wanted = (
        r"does not fit into the memory of gpu 1: it needs at least ([0-9.]+) GiB of 18\.0 GiB;"
        r" found "
        r"'trainer-0' \1 GiB \(weights 4\.0 GiB, gradients 4\.0 GiB, optimiser 8\.0 GiB,"
        r" compute copies 2\.0 GiB, activations .* GiB\); "
        r"give it more.*lora"
    )
    with pytest.raises(GraphError, match=wanted):
        planned(18, ONE_EACH)
    assert planned(33, ONE_EACH)


def test_of_those_that_take_turns_on_a_device_the_larger_one_has_to_fit() -> None:
    shared = {"generator": 1, "trainer": "generator"}
    made = planned(80, shared, main_gib=64)
    needs = {node: made.placements[node].memory_bytes or 0 for node in shared}
    most = max(needs.values()) / GIB
    assert planned(most + 0.1, shared, main_gib=64)
    with pytest.raises(GraphError, match=r"gpu 0: .* found 'trainer-0' "):
        planned(most - 0.1, shared, main_gib=64)
    with pytest.raises(GraphError, match=r"main memory: .* needs at least .* of 12\.0 GiB"):
        planned(1, {"trainer": "generator"}, main_gib=12)


def test_who_takes_turns_has_moments_elsewhere_while_it_computes_and_all_while_it_sleeps() -> None:
    apart, shared = planned(80, ONE_EACH), {"generator": 1, "trainer": "generator"}
    in_turn = planned(80, shared, main_gib=13)
    spared = sum(parts(apart, "trainer").values()) - sum(parts(in_turn, "trainer").values())
    assert spared == min(8 * GIB, parts(apart, "trainer")["activations"])
    assert parts(in_turn, "generator")["version on its way"] == 2 * GIB, (
        "in the trainer's memory, on the same device"
    )
    with pytest.raises(
        GraphError,
        match=r"main memory.* 12\.0 GiB .*'trainer' .*while others have their turn 12\.0",
    ):
        planned(80, shared, main_gib=11)


def test_every_rank_has_a_device_of_its_own_and_main_memory_is_for_all() -> None:
    assert planned(8.5, {"generator": 1, "trainer": 4}, gradient_checkpointing=True)
    with pytest.raises(GraphError, match=r"main memory: .* of 22\.0 GiB"):
        planned(1, main_gib=22)
    assert planned(1, main_gib=32)


def test_a_rank_of_a_reference_has_its_share_and_gathers_one_end_of_its_model() -> None:
    graph, model = Graph("test"), Model("policy", dtype="bfloat16")
    generator = Generator(model, group_size=4, max_tokens=512, tensor_parallel=2)
    reference, trainer = (
        Logprobs(model.frozen(), tensor_parallel=2),
        Trainer(model, prompts_per_step=2),
    )
    trainer(_scored(reference(generator(graph.source(Prompts([{"prompt": "a"}]))))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.feedback(trainer.weights, reference, every=2)
    made = plan(graph, Devices(cpus=8), sizes={"policy": SIZE})
    needed = {"weights": GIB, "embedding or head while it computes": GIB // 4}
    assert parts(made, "ref_logprobs") == needed and parts(made, "generator")["weights"] == GIB
    assert {path.reader: path.nbytes for path in made.weight_paths} == {
        "generator": GIB,
        "ref_logprobs": GIB,
    }


def test_where_a_size_is_not_known_nothing_is_refused() -> None:
    assert planned(0, ONE_EACH)
    check_fit(
        [("a-0", ("", "cuda:0"), Need({"weights": 9})), ("b-0", ("", "cpu"), Need({"weights": 9}))],
        {("", "cpu"): 0},
    )


def test_the_sum_is_part_of_what_a_plan_says_of_itself() -> None:
    (line,) = [
        line
        for line in planned(80, ONE_EACH).explain().splitlines()
        if "process of 'trainer'" in line
    ]
    assert re.search(
        r"needs at least .* GiB \(weights 4.0 GiB, gradients 4.0 GiB, optimiser 8.0 GiB, compute",
        line,
    )


def test_layers_are_measured_from_the_config_of_a_folder(policy: Any) -> None:
    graph = Graph("g")
    Generator(Model(str(policy)))(graph.source(Prompts([{"prompt": "a"}])))
    (size,) = measure_models(graph).values()
    config = json.loads((policy / "config.json").read_text())
    assert (size.layers, size.width) == (config["num_hidden_layers"], config["hidden_size"])
    heads = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    assert size.key_value_heads == config["num_key_value_heads"]
    assert (
        size.cache_elements == 2 * size.layers * heads
        and size.context == config["max_position_embeddings"]
    )
    assert start_fault(Model(str(policy))) is None


class Library:
    """Plays NVIDIA's: one result for each device, its bytes or an error."""

    def __init__(self, *totals: int | None, begins: int = 0) -> None:
        self.totals, self.begins, self.calls = totals, begins, []

    def nvmlInit_v2(self) -> int:
        return self.begins

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.totals)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        handle._obj.value = number + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        total = self.totals[(handle.value or 0) - 1]
        memory._obj.total = total or 0
        return 0 if total else 3

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: Any, longest: int) -> int:
        total = self.totals[(handle.value or 0) - 1]
        name.value = f"NVIDIA H{total}"[: longest - 1].encode()
        return 0 if total else 3


@pytest.mark.parametrize(
    ("library", "found"),
    [
        (Library(80, 40), 40),
        (Library(80, None), 80),
        (Library(None), 0),
        (Library(), 0),
        (Library(80, begins=9), 0),
        (object(), 0),
    ],
)
def test_the_memory_of_accelerators_is_that_of_the_smallest_that_answers(
    library: Any, found: int
) -> None:
    assert gpu_memory(library) == found
    assert getattr(library, "calls", ["shutdown"]) == (
        [] if getattr(library, "begins", 0) else ["shutdown"]
    )


def test_accelerators_that_answer_have_names() -> None:
    assert gpu_names(Library(100, None, 200)) == ["NVIDIA H100", "NVIDIA H200"]
    assert gpu_names(Library(100, begins=9)) == [] == gpu_names(object())
