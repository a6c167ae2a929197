"""Whole runs in which each rank of the trainer sends each rank of the generator the bytes that it
needs, no more.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.graphs import losses, tiny_graph, words
from rigs.policy import tiny_policy
from rigs.sent import Sent
from safetensors import safe_open

from dataflow import Graph, Model, collect, run
from dataflow.folder.run_folder import RunFolder
from operators import Generator, Prompts
from transport.weights import Layout, Mesh, reshard

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(300)]

TO = "generator-0"


def tensors_of(policy: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes of the model's tensors, tied ones once."""
    with safe_open(policy / "model.safetensors", "pt") as file:
        return {
            name: (tuple(file.get_slice(name).get_shape()), "float32")
            for name in sorted(file.keys())
        }


def cut(tensors: dict[str, Any], ranks: int) -> Layout:
    """As tensor parallelism cuts a Llama, written out."""
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")

    def dim(name: str) -> tuple[int | None]:
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        return (0 if kind in rows else 1 if kind in ("o_proj", "down_proj") else None,)

    return Layout.cut(tensors, Mesh.of(ranks), dim)


def assert_pairs(
    sent: Sent,
    policy: Path,
    trainer: int,
    generator: int,
    versions: int,
    layout: Layout | None = None,
) -> None:
    """What each pair of ranks has exchanged is the plan's, to the byte; no pair exchanges a whole
    sharded tensor. layout: the generator's, where it is another than `cut`.
    """
    tensors = tensors_of(policy)
    plan = reshard(Layout.fsdp(tensors, trainer), layout or cut(tensors, generator)).pair_bytes
    counts = sent.transfers(TO)
    (times,) = set(counts.values())
    assert versions <= times <= versions + 1, (
        "each version that was computed with, and perhaps the last one"
    )
    pairs = {
        (a, b): int(plan[a, b]) for a in range(trainer) for b in range(generator) if plan[a, b]
    }
    assert counts.keys() == pairs.keys()
    assert sent.payload(TO) == {pair: nbytes * times for pair, nbytes in pairs.items()}
    size = {name: int(np.prod(shape)) * 4 for name, (shape, _) in tensors.items()}
    most = sent.parts(TO)
    assert most.keys() == size.keys()
    whole = {name for name, nbytes in most.items() if nbytes >= size[name]}
    assert whole == set(), (
        "every tensor is cut by the trainer, so none travels whole between two ranks"
    )


def drawn(result: Any, step: int) -> dict[int, list[int]]:
    rows = RunFolder.open(result.folder).rollouts_of().read(step)
    return dict(
        zip(rows.column("rollout_id").to_pylist(), rows.column("tokens").to_pylist(), strict=True)
    )


@pytest.mark.parametrize("weights", [pytest.param("gloo", marks=pytest.mark.slow), "shared_memory"])
def test_each_rank_of_the_trainer_sends_each_rank_of_the_generator_what_it_needs_and_nothing_else(
    weights: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(tmp_path / "sent", monkeypatch)
    graph = tiny_graph(policy, max_staleness=0, generator_knobs={"tensor_parallel": 2})
    result = run(
        graph, ranks={"trainer": 2}, steps=3, weights=weights, runs=tmp_path / "runs", quiet=True
    )
    assert result.verdict.clean, result.verdict.line
    assert all(line["mismatch"] < 1e-5 for line in result.metrics if "loss" in line)
    assert_pairs(sent, policy, 2, 2, versions=3)
    *_, last = [line["weights_sent"][TO] for line in result.metrics if "loss" in line]
    tensors = tensors_of(policy)
    assert (
        last["pair_bytes"] == reshard(Layout.fsdp(tensors, 2), cut(tensors, 2)).pair_bytes.tolist()
    )
    assert last["version"] in (2, 3)
    assert last["seconds"] > 0
    assert any(
        line["weights_sent"][TO]["held_seconds"] > 0 for line in result.metrics if "loss" in line
    )


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy whose weights are many times what the plane adds to them."""
    return tiny_policy(
        tmp_path_factory.mktemp("larger"), layers=2, width=128, heads=4, mlp_width=256
    )


def long_run(policy: Path, folder: Path, trainer: int, generator: int) -> Any:
    """20 synchronous steps, for which the order of additions matters little."""
    graph = tiny_graph(
        policy,
        max_staleness=0,
        max_tokens=16,
        prompts_per_step=2,
        lr=1e-3,
        eps=1e-3,
        generator_knobs={"tensor_parallel": generator},
    )
    result = run(
        graph, ranks={"trainer": trainer}, steps=20, seed=3, weights="gloo", runs=folder, quiet=True
    )
    assert result.verdict.clean, result.verdict.line
    return result


def greedy(result: Any, ranks: int) -> list[list[int]]:
    """What the policy that a run has made says to each prompt when it takes the likeliest token."""
    model = Model(str(RunFolder.open(result.folder).latest_checkpoint()))
    generator = Generator(
        model, group_size=1, max_tokens=24, temperature=0.0, tensor_parallel=ranks
    )
    table = collect(
        generator(Graph("greedy").source(Prompts(words(), columns=("answer",), epochs=1))), rows=40
    )
    return list(table.sort_by("group_id").column("tokens").to_pylist())


@pytest.mark.slow
def test_four_ranks_and_two_step_as_one_and_one_and_the_kernel_counts_the_plans_bytes(
    larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = long_run(larger, tmp_path / "one", 1, 1)
    sent = Sent(tmp_path / "sent", monkeypatch)
    many = long_run(larger, tmp_path / "many", 4, 2)
    np.testing.assert_allclose(losses(many.folder), losses(one.folder), rtol=0, atol=1e-5)
    assert len(losses(one.folder)) == 20
    for step in (1, 10, 20):
        assert drawn(many, step) == drawn(one, step)
    outputs = greedy(one, 1)
    assert len(outputs) == 40 and greedy(many, 2) == outputs
    assert_pairs(sent, larger, 4, 2, versions=20)
    payload, kernel = sent.payload(TO), sent.kernel(TO)
    for rank in range(4):
        counted = sum(nbytes for (sender, _), nbytes in payload.items() if sender == rank)
        assert counted <= kernel[rank] <= 1.01 * counted, (rank, counted, kernel)
