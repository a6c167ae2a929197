"""A trainer of adapters with a real model folder, run folder and ledger: going on from what it
left.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rigs.operators import make_context
from trainer_rig import COLUMNS, VOCABULARY, Plane, group, tiny_llama

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.model import LoRA, Model
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from operators.trainer import Trainer
from operators.warm_start.train import character_tokenizer


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    tiny_llama().save_pretrained(folder)
    character_tokenizer("abcdefghijklmnopqrst"[: VOCABULARY - 3], 64).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, Ledger]]:
    folder = RunFolder.create(tmp_path / "runs", "test")
    with Ledger.create(folder.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(number, f"p{number}") for number in range(8)])
        yield folder, ledger


def _train(
    model: Model, run: tuple[RunFolder, Ledger], steps: int
) -> dict[int, dict[str, torch.Tensor]]:
    plane = Plane([])
    context = make_context(
        node="trainer",
        steps=steps,
        columns={"prompts": COLUMNS},
        folder=run[0],
        ledger=run[1],
        bounds={"prompts": Bound(max_staleness=100, prompts_per_step=2)},
        writer=lambda tensors: plane,
    )
    runtime = Trainer(model, prompts_per_step=2, lr=1e-2, checkpoint_every=2).build(context)
    for number in range(8):
        runtime.push(Batch("prompts", group(number), "reward"))
    while runtime.work() is not None:
        pass
    runtime.close()
    return plane.published


def test_a_trainer_goes_on_from_the_adapters_of_a_checkpoint_with_the_same_weights(policy, run):
    folder, ledger = run
    model = Model(str(policy), lora=LoRA(4))
    first = _train(model, run, 4)
    wanted = folder.read_metrics()[2]["loss"]
    ledger.roll_back_to(2, "trainer")
    again = _train(model, run, 3)
    assert list(again) == [2, 3]
    for version, tensors in again.items():
        assert all(torch.equal(tensor, first[version][name]) for name, tensor in tensors.items())
    assert folder.read_metrics()[2]["loss"] == wanted
    assert {path.name for path in folder.checkpoints.folder(2).glob("*.safetensors")} >= {
        "adapter_model.safetensors"
    }
    assert not (folder.checkpoints.folder(2) / "model.safetensors").exists()
