"""A run whose generator and trainer take turns on one GPU: who sleeps leaves it to the other."""

from functools import partial
from pathlib import Path

import pytest
from rigs.graphs import tiny_graph
from rigs.operators import Around, wrapped
from rigs.policy import tiny_policy

from dataflow import run
from dataflow.runtime import Runtime

pytestmark = pytest.mark.timeout(120)


class Noting(Around):
    """Writes down what its process has on the GPU, awake and asleep."""

    def __init__(self, inner: Runtime, path: Path) -> None:
        super().__init__(inner)
        self._path = path

    def sleep(self) -> None:
        import torch

        awake = torch.cuda.memory_allocated()
        super().sleep()
        with self._path.open("a") as out:
            out.write(f"{awake} {torch.cuda.memory_allocated()} {torch.cuda.memory_reserved()}\n")


@pytest.mark.gpu
def test_who_sleeps_has_next_to_nothing_on_the_gpu_that_it_shares(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, layers=4, width=512, heads=8, mlp_width=2048)
    graph = tiny_graph(policy, max_staleness=0, generator_knobs={"cache_bytes": 256 << 20})
    for name in ("generator", "trainer"):
        noted = wrapped(graph.operators[name], partial(Noting, path=tmp_path / name))
        object.__setattr__(graph.operators[name], "build", noted.build)
    result = run(
        graph,
        steps=3,
        gpus={"generator": 1, "trainer": "generator"},
        runs=tmp_path / "runs",
        quiet=True,
    )
    assert (result.steps, result.verdict.clean) == (3, True), result.verdict.line
    weights = sum(path.stat().st_size for path in policy.glob("*.safetensors"))
    for name in ("generator", "trainer"):
        noted_bytes = [
            [int(word) for word in line.split()]
            for line in (tmp_path / name).read_text().splitlines()
        ]
        assert len(noted_bytes) >= 3 and max(awake for awake, _, _ in noted_bytes) > 2 * weights
        assert max(asleep for _, asleep, _ in noted_bytes) < weights / 4
        assert max(reserved for _, _, reserved in noted_bytes) < weights
