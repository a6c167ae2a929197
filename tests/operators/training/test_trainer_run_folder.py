"""The trainer with a real model folder, run folder and ledger: what it leaves, and going on from
it.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rigs.operators import make_context
from safetensors.torch import load_file
from trainer_rig import COLUMNS, VOCABULARY, Plane, Rig, group, rig, tiny_llama, tiny_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataflow.errors import DeadlineError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.model import Model
from dataflow.runtime import Batch, Context
from dataflow.staleness import Bound
from dataflow.system.files import RunFolderError
from dataflow.system.forking import fork
from operators.trainer import Trainer
from operators.training.checkpoints import checkpoint, shards
from operators.training.checkpoints.checkpoint import Background, expected
from operators.warm_start.train import character_tokenizer

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
    policy: Path,
    run: tuple[RunFolder, Ledger],
    numbers: range,
    *,
    steps: int | None,
    failed: tuple = (),
    own_folder: str | None = None,
) -> Plane:
    plane = Plane([])
    context = make_context(
        node="trainer",
        steps=steps,
        columns={"prompts": COLUMNS},
        bounds={"prompts": BOUND},
        folder=run[0],
        ledger=run[1],
        writer=lambda tensors: plane,
        own_folder=own_folder,
    )
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
    assert (counts.trained, dict(counts.dropped), sum(counts.in_flight.values())) == (
        8,
        {"failed": 1},
        3,
    )
    assert counts.missing == 0
    assert verify(folder.path).clean, verify(folder.path)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3, 4]
    assert folder.rollouts_of().read(2).column("group_id").unique().to_pylist() == [2, 4]
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
    assert [line["step"] for line in again] == [1, 2, 3]
    assert again[-1]["loss"] == wanted[0]
    assert list(plane.published) == [2, 3]
    assert plane.notes[-1] == {"dropped": 1, "version": 3}


def test_a_trainer_beside_another_passes_over_what_it_has_trained_while_the_other_has_not(
    policy, run
):
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
    assert folder.rollouts_of("trainer").read(2).column("group_id").unique().to_pylist() == [2, 3]
    plane = _train(policy, run, range(4, 8), steps=3, own_folder="trainer")
    assert list(plane.published) == [2, 3]
    assert verify(folder.path).clean, verify(folder.path)


def test_a_trainer_that_has_made_its_steps_passes_what_still_comes_and_tells_the_generator(
    tmp_path,
):
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


# Checkpoints beside the training


class Held:
    """Holds back, in the rollouts' flush, every checkpoint's write until the test lets it go on."""

    def __init__(self, world: Rig) -> None:
        self.go_on, self.began = threading.Event(), threading.Event()
        rollouts = world.folder.rollouts_of()
        flush = rollouts.flush

        def held(steps: Iterable[int]) -> None:
            flush(steps)
            self.began.set()
            assert self.go_on.wait(60)

        rollouts.flush = held  # type: ignore[method-assign]
        world.folder.rollouts_of = lambda node=None: rollouts  # type: ignore[method-assign]


def train(world: Rig, *numbers: int) -> None:
    world.push(*[group(number) for number in numbers])
    world.run()


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_its_own_step(tmp_path):
    world = rig(tmp_path, tiny_trainer(checkpoint_every=2), max_staleness=100)
    held = Held(world)
    train(world, *range(6))
    assert world.runtime.status()["step"] == 3
    assert held.began.wait(60) and ("checkpoint", 2) not in world.events
    held.go_on.set()
    world.runtime.close()
    loaded = load_file(tmp_path / "step-000002" / "model.safetensors")
    assert all(torch.equal(loaded[name], world.plane.published[2][name]) for name in loaded)
    assert any(not torch.equal(loaded[name], world.plane.published[3][name]) for name in loaded)


def test_rollouts_then_ledger_are_on_the_disk_before_a_checkpoint_is_marked_and_noted(tmp_path):
    world = rig(tmp_path, tiny_trainer(checkpoint_every=2), steps=5, max_staleness=100)
    train(world, *range(10))
    kept = [
        event
        for event in world.events
        if event[0] in ("flush rollouts", "flush", "checkpoint", "recorded")
    ]
    assert kept == [
        ("flush rollouts", 1, 2),
        ("flush",),
        ("checkpoint", 2),
        ("recorded", 2),
        ("flush rollouts", 3, 4),
        ("flush",),
        ("checkpoint", 4),
        ("recorded", 4),
        ("flush rollouts", 5),
        ("flush",),
        ("checkpoint", 5),
        ("recorded", 5),
    ]
    for step in (2, 4, 5):
        flushed = next(
            at
            for at, event in enumerate(world.events)
            if event[0] == "flush rollouts" and step in event
        )
        assert world.events.index(("ledger", step)) < flushed
        assert world.events.index(("rollouts", step)) < flushed


def test_a_checkpoint_waits_for_the_one_before_it(tmp_path):
    world = rig(tmp_path, tiny_trainer(checkpoint_every=1))
    held = Held(world)
    threading.Timer(0.2, held.go_on.set).start()
    train(world, *range(4))
    world.runtime.close()
    assert [event for event in world.events if event[0] == "checkpoint"] == [
        ("checkpoint", 1),
        ("checkpoint", 2),
    ]


def test_a_write_that_hangs_is_an_error_that_says_so(tmp_path):
    background, never = Background("the checkpoint being written"), threading.Event()
    background.start(lambda: never.wait(60), 1.0)
    with pytest.raises(DeadlineError, match="checkpoint being written was not over after 0 s"):
        background.wait(0.0)
    never.set()


def test_a_checkpoint_that_the_disk_refuses_ends_the_run_with_the_file_and_leaves_the_one_before(
    policy, run, monkeypatch
):
    folder, _ = run
    _train(policy, run, range(4), steps=2)
    write, (soft, hard) = checkpoint.RankParts.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def with_little_room(*arguments: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(checkpoint.RankParts, "write", with_little_room)
    with pytest.raises(
        RunFolderError, match=r"step-000004.*\.safetensors' failed: File too large; raise the limit"
    ):
        _train(policy, run, range(4, 8), steps=4)
    assert folder.checkpoints.latest() == 2
    assert [path.name for path in folder.checkpoints.path.iterdir()] == ["step-000002"]


def test_a_process_killed_while_it_writes_a_checkpoint_leaves_the_one_before(policy, run):
    folder, ledger = run
    _train(policy, run, range(4), steps=2)
    mark = folder.path / "writing"
    child = fork()
    if child == 0:
        _write_for_ever(policy, folder, mark)
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert mark.exists()
    (partial,) = folder.checkpoints.path.glob(".step-*.partial")
    assert (partial / "model.safetensors").exists()
    assert folder.checkpoints.latest() == 2
    assert ledger.last_step("trainer") == 4
    ledger.roll_back_to(2, "trainer")
    assert list(_train(policy, run, range(4, 8), steps=4).published) == [2, 3, 4]
    assert folder.checkpoints.latest() == 4


def _write_for_ever(policy: Path, folder: RunFolder, mark: Path) -> NoReturn:
    """In a process of its own: train two steps more, and stop in the write of their checkpoint."""
    try:

        def stop(path: Path, pieces: object) -> None:
            mark.touch()
            time.sleep(600)

        shards.write = stop  # type: ignore[assignment]
        with Ledger.open(folder.ledger) as ledger:
            _train(policy, (folder, ledger), range(4, 8), steps=4)
    finally:
        os._exit(1)
