"""The trainer with a real model folder, run folder and ledger: what it leaves, and going on from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_rig import COLUMNS, VOCABULARY, Plane, group, rig, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataflow.errors import OperatorError
from dataflow.ledger import Ledger
from dataflow.model import Model
from dataflow.node import Batch, Bound, Context
from dataflow.run_folder import RunFolder
from dataflow.verify import verify
from operators.trainer import Trainer
from operators.training.journal import expected
from operators.warm_start.policy import character_tokenizer

BOUND = Bound(max_staleness=100, prompts_per_step=2)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    tiny_llama().save_pretrained(folder)
    tokenizer = character_tokenizer("abcdefghijklmnopqrst"[: VOCABULARY - 3], 64)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, Ledger]]:
    folder = RunFolder.create(tmp_path / "runs", "test")
    with Ledger.create(folder.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(number, f"p{number}") for number in range(12)])
        yield folder, ledger


def _train(
    policy: Path, run: tuple[RunFolder, Ledger], numbers: range, *, steps: int | None, failed: tuple = (),
    own_folder: str | None = None,
) -> Plane:  # fmt: skip
    plane = Plane([])
    context = Context(
        node="trainer", steps=steps, columns={"prompts": COLUMNS}, bounds={"prompts": BOUND},
        folder=run[0], ledger=run[1], writer=lambda tensors: plane, own_folder=own_folder,
    )  # fmt: skip
    trainer = Trainer(Model(str(policy)), prompts_per_step=2, lr=1e-2, checkpoint_every=2)
    assert trainer.faults() == []
    runtime = trainer.build(context)
    for number in numbers:
        error = "scorer timed out" if number in failed else None
        runtime.push(Batch("prompts", group(number, error=error), "reward"))
    while runtime.work() is not None:
        pass
    runtime.close()
    return plane


def test_a_run_leaves_rollouts_metrics_a_clean_ledger_and_a_checkpoint(policy, run):
    folder, ledger = run
    _train(policy, run, range(12), steps=4, failed=(3,))
    counts = ledger.counts("trainer")
    assert (counts.trained, dict(counts.dropped), sum(counts.in_flight.values())) == (8, {"failed": 1}, 3)
    assert counts.missing == 0
    assert verify(folder.path).clean, verify(folder.path)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3, 4]
    assert folder.read_rollouts(2).column("group_id").unique().to_pylist() == [2, 4]
    assert folder.checkpoints.steps() == [2, 4]
    loaded = AutoModelForCausalLM.from_pretrained(folder.latest_checkpoint())
    assert loaded(torch.tensor([[1, 2]])).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(folder.latest_checkpoint()).decode([3, 4]) == "ab"


def test_a_trainer_goes_on_from_the_last_step_with_the_same_losses(policy, run, tmp_path):
    folder, ledger = run
    _train(policy, run, range(8), steps=4, failed=(1,))
    wanted = [line["loss"] for line in folder.read_metrics()[2:]]
    ledger.roll_back_to(2, "trainer")
    assert folder.checkpoints.latest(at_most=2) == 2
    plane = _train(policy, run, range(8), steps=3, failed=(1,))
    again = folder.read_metrics()
    assert [line["step"] for line in again] == [1, 2, 3, 3]
    assert again[-1]["loss"] == wanted[0]
    assert list(plane.published) == [2, 3]
    assert plane.notes[-1] == {"dropped": 1, "version": 3}


def test_a_trainer_never_goes_on_from_a_step_without_a_checkpoint(policy, run):
    _train(policy, run, range(8), steps=4)
    folder, _ = run
    (folder.checkpoints.folder(4) / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(OperatorError, match=r"has 4 steps in the ledger.*is step-000002; roll back"):
        _train(policy, run, range(8, 12), steps=6)


def test_a_trainer_beside_another_passes_over_what_it_has_trained_while_the_other_has_not(policy, run):
    """Groups that the critic lacks come again to both."""
    ledger = run[1]
    ledger.issue("prompts", [(12, "p12")])
    ledger.commit_step("critic", 1, version=1, source="prompts", trained=[0])
    _train(policy, run, range(4), steps=2)
    assert expected(Context(node="trainer", ledger=ledger), "prompts") == (4, [], 4)
    assert expected(Context(node="critic", ledger=ledger), "prompts") == (1, [], 1)


def test_trainers_with_folders_of_their_own_go_on_from_their_own_checkpoints(policy, run):
    folder = run[0]
    _train(policy, run, range(4), steps=2, own_folder="trainer")
    assert folder.checkpoints_of("trainer").steps() == [2]
    assert folder.checkpoints.steps() == []
    assert folder.read_rollouts(2, node="trainer").column("group_id").unique().to_pylist() == [2, 3]
    plane = _train(policy, run, range(4, 8), steps=3, own_folder="trainer")
    assert list(plane.published) == [2, 3]
    assert verify(folder.path).clean, verify(folder.path)


def test_a_trainer_that_has_made_its_steps_passes_what_still_comes_and_tells_the_generator(tmp_path):
    """So that the trainers beside it get theirs."""
    made = rig(tmp_path, steps=1)
    made.push(group(0), group(1))
    made.run()
    assert made.runtime.status()["done"] == 1
    assert made.runtime.room() > 0
    made.push(group(2), group(3))
    assert made.acks == [0, 2]
    assert made.plane.notes[-1] == {"dropped": 2, "version": 1}
    assert made.runtime.status()["dropped"] == 0
