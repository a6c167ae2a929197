"""A plan that cannot fit into its devices' memory is refused, with the sum and its parts."""

import ctypes
import json
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model
from dataflow.model import LoRA
from dataflow.model_files import start_fault
from dataflow.planning.hosts import Devices
from dataflow.planning.memory_need import check_fit
from dataflow.planning.model_size import ModelSize, measure_models
from dataflow.planning.placement import Need
from dataflow.planning.plan import Plan, plan
from dataflow.system.gpu_memory import gpu_memory, gpu_names
from operators import Generator, Logprobs, Prompts, Trainer

GIB = 1 << 30
SIZE = ModelSize(
    parameters=1 << 30, largest_end=1 << 27, linear=(("q_proj", 1 << 14, 1 << 14),) * 3, layers=16, width=2048,
    cache_elements=2 * 16 * 1024, key_value_heads=2, context=4096,
)  # fmt: skip
"""A model of 2 ** 30 parameters, of which 3 * 2 ** 28 are in linear layers."""
KV = 4096 * 2 * 16 * 1024 * 2
"""Of one rollout in bfloat16."""


def planned(gpu_gib: float, gpus: Any = None, *, main_gib: float = 0, **knobs: Any) -> Plan:
    model = Model("policy", dtype="bfloat16", lora=knobs.pop("lora", None))
    graph = Graph("test")
    generator = Generator(model, group_size=4, max_tokens=512, **knobs.pop("generator", {}))
    trainer = Trainer(model, prompts_per_step=2, **knobs)
    trainer(_scored(generator(graph.source(Prompts([{"prompt": "a"}])))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    devices = Devices(cpus=8, gpus=8, gpu_memory_bytes=int(gpu_gib * GIB), memory_bytes=int(main_gib * GIB))
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


def test_a_trainer_needs_weights_gradients_moments_and_activations() -> None:
    made = planned(80, ONE_EACH)
    tokens = 2 * 4 * 512
    assert parts(made, "trainer") == {
        "weights": 4 * GIB, "gradients": 4 * GIB, "optimiser": 8 * GIB, "activations": tokens * 16 * 2048 * 16 * 2,
    }  # fmt: skip
    assert parts(made, "generator") == {"weights": 2 * GIB, "KV-cache": KV}


@pytest.mark.parametrize(
    ("knobs", "gpus", "node", "wanted"),
    [
        ({}, {"generator": 1, "trainer": 4}, "trainer", {"weights": GIB, "gradients": GIB, "optimiser": 2 * GIB}),
        ({"dp_replicate": 2}, {"generator": 1, "trainer": 4}, "trainer",
         {"weights": 2 * GIB, "gradients": 2 * GIB, "optimiser": 4 * GIB}),
        ({"gradient_checkpointing": True}, ONE_EACH, "trainer", {"activations": 4096 * 16 * 2048 * 2}),
        ({"micro_batch_tokens": 1024}, ONE_EACH, "trainer", {"activations": 1024 * 16 * 2048 * 16 * 2}),
        ({"lora": LoRA(16)}, ONE_EACH, "trainer",
         {"weights": 2 * GIB, "gradients": 4 * 3 * 16 * (2 << 14), "optimiser": 8 * 3 * 16 * (2 << 14)}),
        ({"lora": LoRA(16)}, ONE_EACH, "generator", {"weights": 2 * GIB, "adapted layers": 2 * (3 << 28)}),
        ({"generator": {"weights": "int8"}}, ONE_EACH, "generator", {"weights": 2 * GIB - (3 << 28)}),
        ({"generator": {"tensor_parallel": 2}}, {"generator": 2, "trainer": 1}, "generator",
         {"weights": GIB, "KV-cache": KV // 2}),
        ({"generator": {"tensor_parallel": 4}}, {"generator": 4, "trainer": 1}, "generator",
         {"weights": GIB // 2, "KV-cache": KV // 2}),
        ({"generator": {"context_tokens": 1024}}, ONE_EACH, "generator", {"KV-cache": KV // 4}),
        ({"generator": {"cache_bytes": 3 * GIB}}, ONE_EACH, "generator", {"KV-cache": 3 * GIB}),
        ({"generator": {"cache_bytes": 900 * GIB, "slots": 8}}, ONE_EACH, "generator", {"KV-cache": 8 * KV}),
    ],
)  # fmt: skip
def test_knobs_change_what_they_are_for(knobs: Any, gpus: Any, node: str, wanted: dict[str, int]) -> None:
    found = parts(planned(2000, gpus, **knobs), node)
    assert {name: found[name] for name in wanted} == wanted


def test_what_does_not_fit_is_refused_with_the_sum_and_its_parts() -> None:
    wanted = (
        r"does not fit into the memory of gpu 1: it needs at least 20\.0 GiB of 18\.0 GiB; found 'trainer-0' 20\.0 GiB "
        r"\(weights 4\.0 GiB, gradients 4\.0 GiB, optimiser 8\.0 GiB, activations 4\.0 GiB\); give it more.*lora"
    )
    with pytest.raises(GraphError, match=wanted):
        planned(18, ONE_EACH)
    assert planned(21, ONE_EACH)


def test_of_those_that_take_turns_on_a_device_the_larger_one_has_to_fit() -> None:
    shared = {"generator": 1, "trainer": "generator"}
    with pytest.raises(GraphError, match=r"gpu 0: .* 20\.0 GiB of 19\.0 GiB; found 'trainer-0' 20\.0 GiB \("):
        planned(19, shared)
    assert planned(21, shared)
    with pytest.raises(GraphError, match=r"main memory: .* 20\.0 GiB of 19\.0 GiB"):
        planned(1, {"trainer": "generator"}, main_gib=19)
    assert planned(1, {"trainer": "generator"}, main_gib=21)


def test_every_rank_has_a_device_of_its_own_and_main_memory_is_for_all() -> None:
    assert planned(6.5, {"generator": 1, "trainer": 4}, gradient_checkpointing=True)
    with pytest.raises(GraphError, match=r"main memory: .* 22\.2 GiB of 22\.0 GiB"):
        planned(1, main_gib=22)
    assert planned(1, main_gib=23)


def test_a_rank_of_a_reference_has_its_share_and_gathers_one_end_of_its_model() -> None:
    graph, model = Graph("test"), Model("policy", dtype="bfloat16")
    generator = Generator(model, group_size=4, max_tokens=512, tensor_parallel=2)
    reference, trainer = Logprobs(model.frozen(), tensor_parallel=2), Trainer(model, prompts_per_step=2)
    trainer(_scored(reference(generator(graph.source(Prompts([{"prompt": "a"}]))))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.feedback(trainer.weights, reference, every=2)
    made = plan(graph, Devices(cpus=8), sizes={"policy": SIZE})
    needed = {"weights": GIB, "embedding or head while it computes": GIB // 4}
    assert parts(made, "ref_logprobs") == needed and parts(made, "generator")["weights"] == GIB
    assert {path.reader: path.nbytes for path in made.weight_paths} == {"generator": GIB, "ref_logprobs": GIB}


def test_where_a_size_is_not_known_nothing_is_refused() -> None:
    assert planned(0, ONE_EACH)
    check_fit(
        [("a-0", ("", "cuda:0"), Need({"weights": 9})), ("b-0", ("", "cpu"), Need({"weights": 9}))], {("", "cpu"): 0}
    )


def test_the_sum_is_part_of_what_a_plan_says_of_itself() -> None:
    (line,) = [line for line in planned(80, ONE_EACH).explain().splitlines() if "process of 'trainer'" in line]
    assert line.endswith(
        "needs at least 20.0 GiB (weights 4.0 GiB, gradients 4.0 GiB, optimiser 8.0 GiB, activations 4.0 GiB)"
    )


def test_layers_are_measured_from_the_config_of_a_folder(policy: Any) -> None:
    graph = Graph("g")
    Generator(Model(str(policy)))(graph.source(Prompts([{"prompt": "a"}])))
    (size,) = measure_models(graph).values()
    config = json.loads((policy / "config.json").read_text())
    assert (size.layers, size.width) == (config["num_hidden_layers"], config["hidden_size"])
    heads = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    assert size.key_value_heads == config["num_key_value_heads"]
    assert size.cache_elements == 2 * size.layers * heads and size.context == config["max_position_embeddings"]
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
def test_the_memory_of_accelerators_is_that_of_the_smallest_that_answers(library: Any, found: int) -> None:
    assert gpu_memory(library) == found
    assert getattr(library, "calls", ["shutdown"]) == ([] if getattr(library, "begins", 0) else ["shutdown"])


def test_accelerators_that_answer_have_names() -> None:
    assert gpu_names(Library(100, None, 200)) == ["NVIDIA H100", "NVIDIA H200"]
    assert gpu_names(Library(100, begins=9)) == [] == gpu_names(object())
