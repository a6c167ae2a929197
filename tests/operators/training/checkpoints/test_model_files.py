"""The weights of a checkpoint as files: under the names that they came with, in as many as needed,
of one step.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_rig import (
    VOCABULARY,
    Tokenizer,
    group,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)
from transformers import AutoModelForCausalLM, MixtralConfig

from dataflow.model import Model
from operators.models.loading import load_model
from operators.training.checkpoints import checkpoint, shards
from operators.training.learner.learner import Learner

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def names(folder: Path) -> set[str]:
    """Of all tensors in a folder's files."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def test_experts_are_written_under_the_names_that_they_came_with(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "first")
    learner = tiny_learner(tiny_trainer(), load_model(Model(str(tmp_path / "first"))))
    with torch.no_grad():
        for weight in learner.parameters.values():
            weight.add_(torch.randn(weight.shape))
    (tmp_path / "saved").mkdir()
    checkpoint.save(tmp_path / "saved", learner, Tokenizer(), {"step": 1})
    assert names(tmp_path / "saved") == names(tmp_path / "first")
    assert any("experts.2." in name for name in names(tmp_path / "saved"))
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    assert again.keys() == learner.parameters.keys()
    assert all(torch.equal(again[name], weight) for name, weight in learner.parameters.items())


def test_large_models_are_cut_into_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MOST_BYTES", 10_000)
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    checkpoint.save(tmp_path, learner, Tokenizer(), {"step": 1})
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names(tmp_path) and set(index["weight_map"].values()) == set(
        files
    )
    assert index["metadata"]["total_size"] == sum(
        weight.nbytes for weight in learner.parameters.values()
    )
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in learner.parameters.items())


def made(learner: Learner) -> None:
    """One step."""
    for part in learner.begin(rows_of(group(0), group(1)), 0):
        learner.micro(part)
    learner.end(1e-2)


def test_an_update_waits_for_a_checkpoint_that_reads_the_weights(tmp_path, monkeypatch):
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    wanted = {name: weight.detach().clone() for name, weight in learner.parameters.items()}
    reads, write = threading.Event(), shards.ModelFiles.write

    def late(self: Any, *given: Any, **named: Any) -> None:
        assert reads.wait(WAIT_S)
        write(self, *given, **named)

    monkeypatch.setattr(shards.ModelFiles, "write", late)
    checkpoint.prepare(tmp_path)
    staged = checkpoint.stage(learner, 0, 1, tmp_path)
    assert staged is not None
    step = threading.Thread(target=made, args=(learner,))
    step.start()
    step.join(2.0)
    assert step.is_alive() and all(
        torch.equal(learner.parameters[name], wanted[name]) for name in wanted
    )
    reads.set()
    step.join(WAIT_S)
    assert not step.is_alive()
    assert not all(torch.equal(learner.parameters[name], wanted[name]) for name in wanted)
    staged.write(tmp_path, Tokenizer(), {"step": 0})
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_what_goes_wrong_in_the_background_is_raised_where_the_checkpoint_is_waited_for(
    tmp_path, monkeypatch
):
    learner = tiny_learner(tiny_trainer(), tiny_llama())

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_part", full)
    checkpoint.prepare(tmp_path)
    staged = checkpoint.stage(learner, 0, 1, tmp_path)
    assert staged is not None
    with pytest.raises(
        shards.RunFolderError,
        match=r"model\.safetensors' failed: No space left on device; make room",
    ):
        staged.write(tmp_path, Tokenizer(), {"step": 1})
    made(learner)
