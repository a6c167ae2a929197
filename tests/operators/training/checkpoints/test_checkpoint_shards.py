"""Checkpoints of several ranks: written without a pickle, read by another number of ranks,
exactly.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from shard_ranks import loaded, ranks_do, step
from trainer_rig import Tokenizer, tiny_learner, tiny_llama, tiny_trainer
from transformers import AutoModelForCausalLM

from dataflow import Model
from dataflow.errors import DeadlineError, RunError
from dataflow.system.files import RunFolderError
from operators import Trainer
from operators.training.checkpoints import checkpoint, shards
from operators.training.learner.build import make_learner, state_tensors
from operators.training.learner.learner import Learner


@pytest.fixture(scope="module")
def straight() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One rank without a checkpoint: weights and optimiser state after two steps, weights after the
    third.
    """
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    for number in range(2):
        step(learner, number)
    weights = {name: weight.detach().clone() for name, weight in learner.parameters.items()}
    state = {
        name: tensor.clone()
        for name, tensor in state_tensors(learner.optimizer, learner.parameters).items()
    }
    step(learner, 2)
    return (
        weights,
        state,
        {name: weight.detach().clone() for name, weight in learner.parameters.items()},
    )


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        pytest.param((1, 1, 1), [(1, 1, 1), (1, 2, 1)], marks=pytest.mark.slow),
        pytest.param((1, 2, 1), [(1, 1, 1), (2, 2, 1)], marks=pytest.mark.slow),
        pytest.param((1, 4, 1), [(1, 1, 1), (1, 2, 1)], marks=pytest.mark.slow),
        ((1, 2, 2), [(1, 2, 1), (1, 1, 2)]),
        pytest.param((2, 2, 1), [(1, 1, 1), (1, 1, 4)], marks=pytest.mark.slow),
        pytest.param((1, 1, 4), [(1, 2, 1)], marks=pytest.mark.slow),
        pytest.param((2, 1, 2), [(1, 1, 2), (1, 2, 4)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_some_ranks_wrote_others_go_on_from_with_the_same_numbers(
    straight, wrote, reads, tmp_path
):
    weights, state, after = straight
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ranks_do("save", wrote, folder)
    assert len(list((folder / checkpoint.OPTIMIZER_FOLDER).iterdir())) == math.prod(wrote)
    saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert saved.keys() == weights.keys()
    assert all(torch.allclose(saved[name], weights[name], rtol=0, atol=1e-6) for name in weights)
    for mesh in reads:
        ranks_do("go_on", mesh, folder)
        found = load_file(loaded(folder, mesh))
        assert {name for name in found if not name.startswith("after/")} == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert all(
            torch.allclose(found[f"after/{name}"], after[name], rtol=0, atol=1e-6) for name in after
        )


@pytest.mark.slow
def test_other_ranks_go_on_from_the_weights_that_the_files_have_rounded(straight, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    ranks_do("save bfloat16", (1, 2, 2), tmp_path / "checkpoint")
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for mesh in ((1, 2, 1), (1, 1, 1)):
        ranks_do("go_on", mesh, tmp_path / "checkpoint")
        found = load_file(loaded(tmp_path / "checkpoint", mesh))
        assert all(
            torch.allclose(found[f"after/{name}"], straight[2][name], rtol=0, atol=1e-6)
            for name in straight[2]
        )


@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 2, 1), (1, 2, 4)))],
    ids=str,
)
def test_every_element_of_the_state_is_written_once_and_nothing_is_pickled(
    straight, mesh, tmp_path
):
    state = straight[1]
    (tmp_path / "checkpoint").mkdir()
    ranks_do("save", mesh, tmp_path / "checkpoint")
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    written: Counter[str] = Counter()
    for path in (tmp_path / "checkpoint" / checkpoint.OPTIMIZER_FOLDER).iterdir():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  -- no mapping
                written[name] += file.get_tensor(name).numel()
    kept = {
        name: written.pop(name) for name in [*written] if "/average-" in name or "/sent-" in name
    }
    assert written == {name: tensor.numel() for name, tensor in state.items()}
    assert kept, "what is kept for readers that are refreshed"
    assert all(
        numel == written[f"{name.rpartition('/')[0]}/exp_avg"] for name, numel in kept.items()
    )


def a_learner(steps: int = 1) -> Learner:
    learner = tiny_learner(tiny_trainer(), tiny_llama())
    for number in range(steps):
        step(learner, number)
    return learner


def test_one_rank_gets_back_its_state_bit_for_bit(tmp_path):
    learner, other = a_learner(2), a_learner(1)
    checkpoint.save(tmp_path, learner, Tokenizer(), {"step": 2})
    checkpoint.restore(other, 0, 1, tmp_path)
    wanted = state_tensors(learner.optimizer, learner.parameters)
    found = state_tensors(other.optimizer, other.parameters)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert checkpoint.read_state(tmp_path)["step"] == 2


def test_the_state_of_another_model_is_refused(tmp_path):
    checkpoint.save(tmp_path, a_learner(), None, {"step": 1})
    other = a_learner()
    name = next(iter(other.parameters))
    other.parameters[name] = torch.nn.Parameter(torch.zeros(5, 7))
    with pytest.raises(RunError, match=r"does not hold this state.*resume with the model"):
        checkpoint.restore(other, 0, 1, tmp_path)
    other.parameters["new"] = other.parameters.pop(name)
    with pytest.raises(RunError, match="new/exp_avg"):
        checkpoint.restore(other, 0, 1, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_of_torch_distributed_checkpoint(tmp_path):
    """What its own writer wrote is read, and a header of ours says what one of its does."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    tensors = {"a": torch.randn(5, 3), "b": torch.tensor(7.0), "c": torch.randn(4).bfloat16()}
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    shards.write(
        tmp_path / "ours" / shards.file_name(0, 1),
        {n: shards.parts_of(t, 0) for n, t in tensors.items()},
    )
    headers = []
    for name in ("theirs", "ours"):
        found = {each: torch.zeros_like(tensor) for each, tensor in tensors.items()}
        shards.read(tmp_path / name, found)
        assert all(torch.equal(found[each], tensors[each]) for each in tensors)
        (file,) = (tmp_path / name).glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            headers.append({key: _parsed(value) for key, value in opened.metadata().items()})
    assert headers[0] == headers[1]


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_rank_0_tells_why_another_rank_has_no_shard(tmp_path):
    shards.give_up(
        tmp_path, 1, RunFolderError("writing 'shard' failed: No space left on device; make room")
    )
    with pytest.raises(RunFolderError, match="No space left"):
        shards.wait_for(tmp_path, 2, 60.0)


def test_rank_0_does_not_wait_for_ever(tmp_path):
    with pytest.raises(DeadlineError, match=r"waited 0 s for the shards of ranks \[0, 1\]"):
        shards.wait_for(tmp_path, 2, 0.0)


def test_a_module_with_adapters_leaves_its_adapters_alone(tmp_path):
    pytest.importorskip("peft")
    from dataflow.model import LoRA, Model
    from operators.models.loading import load_adapted
    from operators.training.learner.build import forward_of, learner_of

    tiny_llama().save_pretrained(tmp_path / "base")
    model = Model(str(tmp_path / "base"), lora=LoRA(4))
    trainer = tiny_trainer()
    module = load_adapted(model)
    learner = learner_of(trainer, forward_of(trainer, module), node="trainer")
    step(learner, 0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.save(folder, learner, None, {"step": 1})
    assert not (folder / "model.safetensors").exists()
    again = load_adapted(Model(str(folder), lora=LoRA(4)))
    other = learner_of(trainer, forward_of(trainer, again), node="trainer")
    checkpoint.restore(other, 0, 1, folder)
    assert all(
        torch.equal(weight, learner.parameters[name]) for name, weight in other.parameters.items()
    )
    wanted = state_tensors(learner.optimizer, learner.parameters)
    found = state_tensors(other.optimizer, other.parameters)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_run_of_two_ranks_leaves_a_checkpoint_that_one_rank_goes_on_from(tmp_path):
    from rigs.graphs import tiny_graph
    from rigs.policy import tiny_policy

    from dataflow import run
    from dataflow.folder.run_folder import RunFolder
    from operators.training.learner.build import make_learner

    graph = tiny_graph(tiny_policy(tmp_path / "policy"), max_staleness=0, checkpoint_every=1)
    result = run(graph, steps=3, ranks={"trainer": 2}, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict
    checkpoints = RunFolder.open(result.folder).checkpoints
    assert checkpoints.steps() == [1, 2, 3]
    assert [checkpoints.damage(step) for step in (1, 2, 3)] == [None] * 3
    folder = checkpoints.folder(3)
    assert len(list((folder / checkpoint.OPTIMIZER_FOLDER).iterdir())) == 2
    trainer = graph.operators["trainer"]
    learner = make_learner(
        trainer, dataclasses.replace(trainer.model, source=str(folder)), node="t", device="cpu"
    )
    checkpoint.restore(learner, 0, 1, folder)
    state = state_tensors(learner.optimizer, learner.parameters)
    assert {float(tensor) for name, tensor in state.items() if name.endswith("/step")} == {3.0}
    assert all(
        tensor.abs().sum() > 0 for name, tensor in state.items() if name.endswith("/exp_avg_sq")
    )


@pytest.mark.parametrize(
    ("asked", "written"),
    [(None, torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)],
)
@pytest.mark.parametrize("alone", [True, False], ids=["by parts", "whole"])
def test_weights_are_kept_as_the_model_came_and_a_resume_goes_on_from_the_trainers_own(
    asked, written, alone, tmp_path, monkeypatch
):
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "came")
    trainer = Trainer(Model(str(tmp_path / "came")), lr=1e-3)
    learner = make_learner(trainer, trainer.model, node="trainer", device="cpu")
    step(learner, 0)
    if not alone:
        monkeypatch.setattr(checkpoint, "saved_as", lambda module: None)
    (tmp_path / "saved").mkdir()
    checkpoint.save(tmp_path / "saved", learner, None, {"step": 1}, dtype=asked)
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()
    } == {written}
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert found.dtype == written
    weights = {name: weight.detach().clone() for name, weight in learner.parameters.items()}
    assert all(
        torch.equal(weight, weights[name].to(written)) for name, weight in found.named_parameters()
    )
    again = make_learner(
        trainer,
        replace(trainer.model, source=str(tmp_path / "saved")),
        node="trainer",
        device="cpu",
    )
    checkpoint.restore(again, 0, 1, tmp_path / "saved")
    assert all(torch.equal(weight, weights[name]) for name, weight in again.parameters.items())
    assert checkpoint.rounded_to(again, asked) == checkpoint.rounded_to(learner, asked)
