"""What a run on this machine's accelerators will take, as it begins: their names are those of known
kinds.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow import Devices, Graph, GraphError, Model, plan
from dataflow.foresight.catalogue import CATALOGUE, kind_named
from dataflow.foresight.command import foreseen_of_run, read_devices
from dataflow.foresight.foresee import foresee
from dataflow.foresight.workload import read_workload
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.rewards import find

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


TEXTS, H100 = "mean=40,prompt=20", "NVIDIA H100 80GB HBM3"


MACHINE = Devices(cpus=96, gpus=8, memory_bytes=1 << 40, gpu_memory_bytes=80 * 10**9)


FOUR_EACH = {"generator": 4, "trainer": 4}


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    g, model = Graph("here"), Model(str(tmp_path), dtype="bfloat16")
    generator = Generator(model, group_size=4, max_tokens=128)
    trainer = Trainer(model, prompts_per_step=8, lr=1e-6)
    prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    trainer(advantage(find("exact")(generator(g.source(prompts)))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


def found(
    graph: Graph, names: list[str], constants: str = "data-sheets", **wishes: Any
) -> dict[str, Any]:
    made = plan(graph, MACHINE, **wishes)
    return foreseen_of_run(graph, made, TEXTS, constants, steps=4, names=lambda: names)


@pytest.mark.parametrize("constants", ["data-sheets", "serving"])
def test_a_run_on_accelerators_is_foreseen_on_the_kind_that_they_are_called(
    graph: Graph, constants: str
) -> None:
    told = found(graph, 8 * [H100], constants, gpus=FOUR_EACH)
    assert [each["devices"] for each in told["operators"]] == ["4 x H100", "4 x H100"]
    if constants == "data-sheets":
        room, texts = read_devices("8xH100"), read_workload(TEXTS)
        asked = foresee(graph, room, gpus=FOUR_EACH, workload=texts, steps=4)
        assert told["step_s"] == asked.step_s and told["gpus"] == 8
    slow = found(graph, 8 * ["NVIDIA L40S"], constants, gpus=FOUR_EACH)
    assert slow["step_s"] > 1.5 * told["step_s"]


def test_a_run_whose_operators_take_turns_is_foreseen_so(graph: Graph) -> None:
    told = found(graph, 8 * [H100], gpus={"generator": 8, "trainer": "generator"})
    by_node = {each["node"]: each for each in told["operators"]}
    assert by_node["generator"]["devices"] == by_node["trainer"]["devices"] == "8 x H100"
    assert told["step_s"] >= by_node["generator"]["busy_s"] + by_node["trainer"]["busy_s"]


def test_a_run_on_cores_is_foreseen_on_them_whatever_accelerators_there_are(graph: Graph) -> None:
    told = found(graph, [], replicas={"generator": 2})
    assert (
        told["operators"][0]["devices"] == "2 x cpu"
        and told["operators"][0]["replicas_x_ranks"] == "2 x 1 rank"
    )


@pytest.mark.parametrize(
    ("names", "wishes", "why"),
    [
        (
            [],
            FOUR_EACH,
            "management library tells none of this machine's; ask with --foresee 8xH100",
        ),
        (["NVIDIA H100 PCIe"], FOUR_EACH, "is called 'NVIDIA H100 PCIe'; the nearest kind is H100"),
        (["NVIDIA A100-PCIE-40GB"], FOUR_EACH, "the nearest kind is A100"),
        (["NVIDIA L40"], FOUR_EACH, "the nearest kind is L40S"),
        (["Tesla K80"], FOUR_EACH, "those known are A100, A100-40"),
        ([H100, "NVIDIA H200"], FOUR_EACH, "this one has H100 and H200"),
    ],
)
def test_accelerators_of_no_known_kind_are_refused(
    graph: Graph, names: list[str], wishes: dict[str, int | str], why: str
) -> None:
    with pytest.raises(GraphError, match=why):
        found(graph, names, gpus=wishes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (H100, "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H20", "H20"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_are_those_that_drivers_give(name: str, kind: str) -> None:
    assert kind_named(name) is CATALOGUE[kind]
    with pytest.raises(GraphError):
        kind_named(f"{name} NVL")
