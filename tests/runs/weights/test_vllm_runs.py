"""Whole runs whose rollouts vLLM decodes; where DATAFLOW_VLLM_PYTHON names an interpreter that has
it.
"""

import os
from ast import literal_eval
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from rigs.graphs import tiny_graph
from rigs.policy import tiny_policy
from rigs.sent import Sent
from test_live_shards import TO, assert_pairs, cut, tensors_of

from dataflow import run
from dataflow.folder.run_folder import RunFolder
from dataflow.model import LoRA
from operators.engine.vllm.engine import VllmEngine
from operators.engine.vllm.process import PYTHON
from transport.weights import Layout, Shards

pytestmark = [
    pytest.mark.usefixtures("machine", "one_core"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter"),
]


WIDTH, MLP = 128, 256
ADAPTERS = 2 * 4 * 4 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + MLP))
"""Bytes of adapters of rank 4, in float32: two layers, of seven matrices each."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose heads are as wide as vLLM's kernels for processors ask."""
    return tiny_policy(
        tmp_path_factory.mktemp("wide"), layers=2, width=WIDTH, heads=4, mlp_width=MLP
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_draws_what_the_trainer_computes_and_each_rank_takes_its_part_alone(
    ranks: int, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, own = Sent(tmp_path / "sent", monkeypatch), held(tmp_path / "about", monkeypatch)
    graph = tiny_graph(
        wide, max_staleness=0, generator_knobs={"engine": "vllm", "tensor_parallel": ranks}
    )
    result = run(graph, ranks={"trainer": 2}, steps=3, runs=tmp_path / "runs", quiet=True)
    assert result.verdict.clean, result.verdict.line
    steps = [line for line in result.metrics if "loss" in line]
    assert all(line["mismatch"] < 1e-5 for line in steps)
    for step in (1, 2, 3):
        rows = RunFolder.open(result.folder).rollouts_of().read(step)
        versions = pc.list_flatten(rows.column("versions"))
        assert set(pc.unique(versions).to_pylist()) == {-1, step - 1}
    whole, parts = tensors_bytes(wide), own()
    assert len(parts) == ranks
    assert sum(parts) <= whole * 1.1 and max(parts) <= whole / ranks * 1.1, "norms are on all ranks"
    assert_pairs(sent, wide, 2, ranks, versions=3, layout=dealt(wide, ranks))


def held(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, ...]]:
    """Reads, after a run, what bytes of a version each rank of vLLM held in it."""

    def noted(self: VllmEngine, *args: Any, init: Any = VllmEngine.__init__, **given: Any) -> None:
        init(self, *args, **given)
        path.write_text(f"{self.about.bytes_held}")

    monkeypatch.setattr(VllmEngine, "__init__", noted)
    return lambda: literal_eval(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("trainers", "ranks"), [(1, 1), (2, 2)])
def test_adapters_alone_are_sent_and_vllm_draws_with_them(
    trainers: int, ranks: int, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, own = Sent(tmp_path / "sent", monkeypatch), held(tmp_path / "about", monkeypatch)
    graph = tiny_graph(
        wide,
        max_staleness=0,
        model_knobs={"lora": LoRA(4, alpha=8)},
        generator_knobs={"engine": "vllm", "tensor_parallel": ranks},
        lr=3e-2,
    )
    result = run(graph, ranks={"trainer": trainers}, steps=4, runs=tmp_path / "runs", quiet=True)
    assert result.verdict.clean, result.verdict.line
    steps = [line for line in result.metrics if "loss" in line]
    assert len(steps) == 4 and all(line["mismatch"] < 1e-5 for line in steps)
    assert own() == (ADAPTERS,) * ranks
    if trainers > 1:
        (times,) = set(sent.transfers(TO).values())
        assert sum(sent.payload(TO).values()) == times * ADAPTERS * ranks


def dealt(policy: Path, ranks: int) -> Layout:
    """As vLLM's ranks share a Llama out, written out: a vocabulary in ranks of as many rows, of the
    next multiple of 64, and all else as tensor parallelism does.
    """
    tensors = tensors_of(policy)
    ends = ("embed_tokens.weight", "lm_head.weight")
    tall = {
        name: ((-(-shape[0] // 64) * 64, *shape[1:]), dtype)
        if name.endswith(ends)
        else (shape, dtype)
        for name, (shape, dtype) in tensors.items()
    }
    padded = cut(tall, ranks).tensors
    layouts = {}
    for name, (shape, _) in tensors.items():
        shards = padded[name].shards
        if name.endswith(ends):
            rows = np.minimum(shards.stop[:, 0], shape[0]) - shards.start[:, 0]
            stop = shards.stop.copy()
            stop[:, 0] = shards.start[:, 0] + rows
            local = shards.local_shape.copy()
            local[:, 0] = rows
            shards = Shards(shards.ranks, shards.start, stop, shards.local_start, local)
        layouts[name] = replace(padded[name], shape=shape, shards=shards)
    return Layout(tensors=layouts, aliases={})


def tensors_bytes(policy: Path) -> int:
    """Of all tensors of the model."""
    return sum(4 * prod(shape) for shape, _ in tensors_of(policy).values())
