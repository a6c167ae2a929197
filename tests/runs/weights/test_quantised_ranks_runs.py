"""Whole runs whose generator is quantised and shared out, of a trainer of several ranks: all bytes
are one rank's.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from rigs.graphs import tiny_graph
from rigs.operators import Around, wrapped
from transformers import AutoModelForCausalLM

from dataflow import run
from dataflow.folder.run_folder import RunFolder
from dataflow.runtime import Batch, Runtime
from operators.engine.precision import linear_weights, quantise
from transport.weights.encoding import SCALE, Encoding
from transport.weights.layout.from_torch import layout_of
from transport.weights.tensor_encoder import Encoder

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(240)]


STEPS = 2


CUT_ROWS = ("o_proj.weight", "down_proj.weight")


CUT = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    *CUT_ROWS,
)


class _Telling(Around):
    """Leaves in a file for each version what each rank of the engine holds, as checksums by
    name.
    """

    def __init__(self, inner: Runtime, folder: Path) -> None:
        super().__init__(inner)
        self._folder = folder

    def work(self) -> list[Batch] | None:
        made = super().work()
        engine: Any = self.inner.engine  # type: ignore[attr-defined]
        path = self._folder / f"{engine.version}.json"
        if engine.version >= 0 and not path.exists():
            path.write_text(json.dumps(engine.digests()))
        return made


def digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    )


def slice_of(name: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What a generator's rank holds, written out; all ranks have the scales of rows that are
    cut.
    """
    weight = name.removesuffix(SCALE)
    if not weight.endswith(("embed_tokens.weight", "lm_head.weight", *CUT)) or (
        name != weight and weight.endswith(CUT_ROWS)
    ):
        return full
    return full.chunk(size, -1 if weight.endswith(CUT_ROWS) else 0)[rank]


@pytest.mark.parametrize(
    ("ranks", "weights", "knobs"),
    [
        (2, "int8", {"tensor_parallel": 2}),
        pytest.param(1, "int8", {}, marks=pytest.mark.slow),
        pytest.param(2, "fp8", {}, marks=pytest.mark.slow),
        pytest.param(4, "int8", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(4, "int8", {"dp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_generator_ranks_hold_slices_of_what_a_trainer_rank_quantises_and_record_their_samples(
    policy: Path, tmp_path: Path, ranks: int, weights: str, knobs: dict[str, Any]
) -> None:
    told = tmp_path / "told"
    told.mkdir()
    graph = tiny_graph(
        policy,
        max_staleness=0,
        checkpoint_every=1,
        generator_knobs={"weights": weights, "tensor_parallel": 2},
        **knobs,
    )
    generator = graph.operators["generator"]
    object.__setattr__(
        generator, "build", wrapped(generator, lambda inner: _Telling(inner, told)).build
    )
    result = run(graph, ranks={"trainer": ranks}, steps=STEPS, runs=tmp_path / "runs", quiet=True)
    assert result.verdict.clean, result.verdict.line
    rollouts = RunFolder.open(result.folder)
    for step in range(2, STEPS + 1):
        folder = next((Path(result.folder) / "checkpoints").glob(f"step-*{step - 1}"))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        parameters = dict(model.named_parameters())
        encoding = Encoding(dtype="float32", quantized=weights, names=linear_weights(model))
        encoder = Encoder(encoding, layout_of(parameters, [0]), 0, parameters)
        new = {
            name: tensor
            for name, tensor in encoder.encode(parameters).items()
            if name not in encoder.layout.aliases
        }
        for rank, digests in enumerate(json.loads((told / f"{step - 1}.json").read_text())):
            for name, full in new.items():
                assert digests[name] == digest(slice_of(name, full, rank, 2)), (
                    f"{name} on rank {rank}, step {step}"
                )
            assert digests.keys() == new.keys()
        if weights != "int8":
            continue
        quantise(model, weights)
        for row in rollouts.rollouts_of().read(step).to_pylist():
            drawn = np.array(row["versions"]) == step - 1
            assert drawn.sum() > 0
            ids = torch.tensor([row["tokens"]])
            with torch.inference_mode():
                logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            again = logits.gather(1, ids[0, 1:, None])[:, 0].numpy()
            np.testing.assert_allclose(
                np.array(row["logprobs"])[drawn], again[drawn[1:]], atol=1e-4
            )
