"""A trainer that is started behind its ledger comes to the weights that the dead one had, and then
goes on.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lives_rig import GROUPS, TrainerLife, declared, policy_folder, run_folder, same
from ranks_rig import in_a_fork
from trainer_rig import COLUMNS, group

from dataflow.errors import GraphError, OperatorError
from dataflow.folder.finished import Finished, SealedWriter
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.model import LoRA
from dataflow.records import DROP_REASON, schema
from dataflow.system.files import RunFolderError
from operators.losses import aipo, value_loss
from operators.trainer import Trainer
from operators.training.checkpoints import checkpoint
from operators.training.checkpoints.checkpoint import missing_lines
from operators.training.learner.build import state_tensors
from operators.training.learner.learner import Learner
from operators.training.learner.together import local
from transport.life import Life


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy"))


def with_noise(new_logprobs: Any, logprobs: Any, advantage: Any, mask: Any) -> Any:
    """A loss that draws random numbers."""
    return -(torch.rand_like(new_logprobs) * advantage * new_logprobs)[mask].mean()


def with_values(number: int) -> pa.RecordBatch:
    """A group as a critic reads it."""
    rows = group(number).to_pylist()
    draw = np.random.default_rng(number)
    for row in rows:
        row["values"] = draw.normal(size=len(row["tokens"])).tolist()
    return pa.RecordBatch.from_pylist(rows, schema=schema(VALUED))


SLOW = pytest.mark.slow


VALUED = {**COLUMNS, "values": pa.list_(pa.float32())}


KINDS: dict[str, tuple[dict[str, Any], Any, Callable[[int], pa.RecordBatch]]] = {
    "aipo": ({"loss": partial(aipo, rho=2.0), "checkpoint_every": 2}, COLUMNS, group),
    "no checkpoint": ({"warmup_steps": 3}, COLUMNS, group),
    "random numbers": (
        {"loss": with_noise, "skip_zero_advantage": False, "checkpoint_every": 2},
        COLUMNS,
        group,
    ),
    "lora": ({"model": {"lora": LoRA(4)}}, COLUMNS, group),
    "critic": (
        {"model": {"head": "value"}, "loss": value_loss, "checkpoint_every": 3},
        VALUED,
        with_values,
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW) if kind == "lora" else kind for kind in KINDS]
)
def test_a_trainer_catches_up_to_the_very_bits_of_the_dead_one_and_goes_on_as_it_would_have(
    policy, tmp_path, kind
):
    knobs, columns, make = KINDS[kind]
    trainer, folder = declared(policy, **knobs), run_folder(tmp_path)
    first = TrainerLife(folder, trainer, columns=columns)
    first.push(*map(make, range(10)))
    first.run()
    had, published = first.state(), first.plane.published[5]
    first.end()
    lines = folder.metrics.read_bytes()
    torch.manual_seed(12345)  # whatever the process has drawn
    again = TrainerLife(folder, trainer, columns=columns)
    counts = again.ledger.counts("trainer")
    assert not again.plane.published
    again.run()
    assert same(again.state(), had)
    assert list(again.plane.published) == [5] and same(again.plane.published[5], published)
    assert again.ledger.counts("trainer") == counts
    assert folder.metrics.read_bytes() == lines
    again.push(*map(make, range(10, 14)))
    again.run()
    again.end()
    undisturbed = TrainerLife(run_folder(tmp_path), trainer, columns=columns)
    undisturbed.push(*map(make, range(14)))
    undisturbed.run()
    assert same(again.state(), undisturbed.state())
    losses = [
        [line["loss"] for line in life.folder.read_metrics()] for life in (again, undisturbed)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 7
    assert verify(folder.path).clean, verify(folder.path)
    undisturbed.end()


def test_it_catches_up_a_slice_at_a_time_says_how_far_it_is_and_takes_no_group_before(
    policy, tmp_path
):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(8)).end()
    again = TrainerLife(folder, declared(policy))
    assert again.runtime.room() == 0 and again.runtime.pending() == 4
    again.push(group(8), group(9))  # nobody has to ask for room
    said = [status.get("catching_up") for status in again.work()]
    left = [number for number in said if number is not None]
    assert left == sorted(left, reverse=True) and set(left) == {4, 3, 2, 1, 0}
    assert len(left) > 4 * 3, "reading, micro-batches and updates are slices of their own"
    assert list(again.plane.published) == [4, 5] and again.acks == [8, 9]
    assert {again.runtime.status()["step"]} == {5}
    again.end()


def test_while_it_catches_up_it_tells_the_step_that_it_comes_to(policy, tmp_path):
    """So that the run never seems to go back."""
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(8)).end()
    again = TrainerLife(folder, declared(policy))
    assert {(status["step"], status["version"]) for status in again.work()} == {(4, 4)}
    again.end()


def test_drained_on_its_way_it_keeps_a_checkpoint_of_where_it_is(policy, tmp_path):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(8)).end()
    again = TrainerLife(folder, declared(policy))
    for status in again.work():
        if status.get("catching_up") == 2:
            again.runtime.tell({"drain": True})
    assert again.runtime.status()["done"] == 1 and not again.plane.published
    again.end()
    assert folder.checkpoints.latest() == 2
    third = TrainerLife(folder, declared(policy))
    assert third.runtime.status()["catching_up"] == 2
    third.end()


def test_the_last_step_of_a_run_whose_checkpoint_was_lost_is_kept_after_catching_up(
    policy, tmp_path
):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy), steps=3).run(range(6)).end()
    (folder.checkpoints.folder(3) / "model.safetensors").write_bytes(b"torn")
    again = TrainerLife(folder, declared(policy), steps=3).run()
    assert again.runtime.status()["done"] == 1 and list(again.plane.published) == [3]
    assert folder.checkpoints.latest() == 3
    again.end()


def test_a_schedule_that_was_changed_does_not_change_the_steps_that_were_made(policy, tmp_path):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy, schedule="linear", decay_steps=6)).run(range(8))
    first.end()
    again = TrainerLife(folder, declared(policy, schedule="linear", decay_steps=20)).run()
    assert same(first.state(), again.state())
    again.end()


def test_a_schedule_keeps_its_end_whatever_steps_a_run_is_given_later(policy, tmp_path):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy, schedule="cosine"), steps=6).run(range(8)).end()
    for knobs, steps, ends in (
        ({}, 5, 6),
        ({}, 6, 6),
        ({"min_lr": 1e-3}, 20, 6),
        ({"decay_steps": 20}, 20, 20),
    ):
        again = TrainerLife(folder, declared(policy, schedule="cosine", **knobs), steps=steps)
        assert again.runtime._making.decay_steps == ends
        again.end()
    with pytest.raises(GraphError, match=r"began as one of 6 steps .* to make 20; ask for 6 steps"):
        TrainerLife(folder, declared(policy, schedule="cosine"), steps=20)


# What is lost


@pytest.mark.parametrize(
    "damage", ["torn", *(pytest.param(each, marks=SLOW) for each in ("missing", "of other groups"))]
)
def test_a_rollouts_file_that_is_lost_takes_the_ledger_back_and_its_groups_are_trained_again(
    policy, tmp_path, damage
):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy, checkpoint_every=2)).run(range(10))
    had = first.state()
    first.end()
    (folder.checkpoints.folder(4) / "model.safetensors").unlink()
    path = folder.rollouts_of().step_file(4)
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        os.truncate(path, 500)
    else:
        path.write_bytes(folder.rollouts_of().step_file(5).read_bytes())
    again = TrainerLife(folder, declared(policy, checkpoint_every=2)).run()
    assert "steps taken back" in again.log
    assert again.runtime.status()["taken_back"] == 4
    assert list(again.plane.published) == [3]
    assert [waiting.group_id for waiting in again.ledger.in_flight("prompts")][:4] == [6, 7, 8, 9]
    again.run(range(10))
    assert list(again.plane.published) == [3, 4, 5]
    assert same(again.state(), had)
    again.end()
    assert verify(folder.path).clean, verify(folder.path)


def test_a_rollouts_file_that_is_lost_takes_nothing_back_in_a_run_that_goes_on_meanwhile(
    policy, tmp_path
):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy)).run(range(4))
    first.end()
    os.truncate(folder.rollouts_of().step_file(2), 500)
    with pytest.raises(OperatorError, match=r"cannot make step 2 again .* stop it and resume it"):
        TrainerLife(folder, declared(policy), life=Life(attempt=1))
    with Ledger.open(folder.ledger) as ledger:
        assert ledger.last_step("trainer") == 2


def younger(number: int, version: int) -> pa.RecordBatch:
    """A group whose tokens are of this version."""
    return group(number, version=version)


def test_what_the_weights_of_lost_steps_drew_is_forgotten_before_anybody_works(policy, tmp_path):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(8)).end()
    kept = folder.finished("generator") / "0-part1-0-0.prompts.arrows"
    kept.parent.mkdir(parents=True)
    rows = {number: younger(number, version) for number, version in ((8, 2), (9, 3))}
    with kept.open("wb") as sink:
        writer = SealedWriter(sink, rows[8].schema)
        for batch in rows.values():
            writer.write_batch(batch)
    os.truncate(folder.rollouts_of().step_file(3), 500)
    for attempt in (0, 0):
        again = TrainerLife(folder, declared(policy), life=Life(attempt=attempt))
        again.end()
        later = Finished(kept.parent, "prompts", attempt=1)
        later.load(rows)
        assert later.find(8) == rows[8] and later.find(9) is None


def test_no_rollout_of_a_version_is_trained_that_is_not_there_yet(policy, tmp_path):
    folder = run_folder(tmp_path)
    life = TrainerLife(folder, declared(policy))
    life.push(younger(0, 0), younger(1, 1), younger(2, 0))
    life.run()
    with Ledger.open(folder.ledger) as ledger:
        (step,) = ledger.steps("trainer")
    assert step.trained == (0, 2) and step.dropped == {1: "abandoned"}
    life.end()
    assert verify(folder.path).clean, verify(folder.path)


def test_checkpoints_of_steps_that_were_taken_back_are_never_taken_for_those_of_the_new_ones(
    policy, tmp_path
):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy, checkpoint_every=2)).run(range(8)).end()
    with Ledger.open(folder.ledger) as ledger:
        ledger.roll_back_to(2, "trainer")
    changed = [group(number, seed=100 + number) for number in range(4, 10)]
    first = TrainerLife(folder, declared(policy))
    first.push(*changed)
    had = first.run().state()
    first.end()
    assert folder.checkpoints.steps() == [2]
    assert (folder.checkpoints.path / "taken-back-1-step-000004").is_dir()
    again = TrainerLife(folder, declared(policy)).run()
    assert same(again.state(), had)
    again.end()


def test_lines_of_metrics_that_a_crash_lost_are_written_again(policy, tmp_path):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(6)).end()
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(lines[0] + lines[2][:40])
    TrainerLife(folder, declared(policy)).end()
    found = folder.read_metrics()
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [line["loss"] for line in found] == [json.loads(line)["loss"] for line in lines]
    TrainerLife(folder, declared(policy)).end()
    assert len(folder.read_metrics()) == 3
    assert verify(folder.path).clean


def test_a_line_of_a_step_that_was_taken_back_is_not_that_of_the_step(policy, tmp_path):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy)).run(range(4))
    first.end()
    with Ledger.open(folder.ledger) as ledger:
        made = ledger.steps("trainer")
    lines = folder.read_metrics()
    assert missing_lines(made, lines) == []
    lines[1]["loss"] += 1.0
    assert missing_lines(made, lines) == [dict(made[1].metrics)]


def test_seconds_since_the_start_never_go_back(policy, tmp_path):
    folder = run_folder(tmp_path)
    TrainerLife(folder, declared(policy)).run(range(6)).end()
    TrainerLife(folder, declared(policy)).run(range(6, 10)).end()
    seconds = [line["seconds"] for line in folder.read_metrics()]
    assert seconds == sorted(seconds) and len(seconds) == 5


def test_what_the_ledger_refuses_was_never_published(policy, tmp_path, monkeypatch):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy))

    def refuse(*given: Any, **named: Any) -> None:
        raise LedgerError("ledger could not commit: disk is full; make room")

    monkeypatch.setattr(first.ledger, "commit_step", refuse)
    with pytest.raises(LedgerError, match="make room"):
        first.run(range(2))
    assert list(first.plane.published) == [0] and folder.rollouts_of().step_file(1).exists()
    first.end()
    again = TrainerLife(folder, declared(policy)).run(range(2))
    assert list(again.plane.published) == [0, 1]
    again.end()
    assert verify(folder.path).clean, verify(folder.path)


# Drops


def filtered(number: int) -> pa.RecordBatch:
    """A group that a filter gave up."""
    rows = [row | {DROP_REASON: "dull"} for row in group(number).to_pylist()]
    return pa.RecordBatch.from_pylist(rows, schema=schema({**COLUMNS, DROP_REASON: pa.string()}))


def test_a_step_that_needs_more_drops_than_its_edge_holds_is_made(policy, tmp_path):
    """An edge holds two steps' groups that were not acknowledged."""
    folder = run_folder(tmp_path)
    life = TrainerLife(folder, declared(policy))
    sent = 0
    kept = (5, 15)
    while sent < GROUPS:
        assert sent - len(life.acks) < 2 * 2, "the edge has no credit, and the trainer waits"
        life.push((group if sent in kept else filtered)(sent))
        sent += 1
        life.run()
    assert list(life.plane.published) == [0, 1]
    (line,) = folder.read_metrics()
    assert line["dropped"] == {"dull": 14} and life.runtime.status()["dropped"] == 14
    life.end()
    assert verify(folder.path).clean, verify(folder.path)


def test_drops_that_were_recorded_before_a_crash_are_told_with_the_step_that_comes(
    policy, tmp_path
):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy))
    first.push(*map(filtered, range(5)))
    first.run().end()
    assert first.acks == [0, 1, 2, 3]
    assert verify(folder.path).clean, verify(folder.path)
    again = TrainerLife(folder, declared(policy))
    assert again.runtime.status()["dropped"] == 4
    again.push(*map(filtered, range(5)), group(5), group(6))
    again.run().end()
    (line,) = folder.read_metrics()
    assert line["dropped"] == {"dull": 5}
    assert verify(folder.path).clean, verify(folder.path)


def test_drops_of_the_step_under_way_are_taken_back_with_it(policy, tmp_path):
    folder = run_folder(tmp_path)
    first = TrainerLife(folder, declared(policy)).run(range(2))
    first.push(*map(filtered, range(2, 6)))
    first.run().end()
    with Ledger.open(folder.ledger) as ledger:
        assert ledger.drops_at("trainer", 2) == dict.fromkeys(range(2, 6), "dull")
        ledger.roll_back_to(0, "trainer")
        assert ledger.counts("trainer").dropped == {}
    again = TrainerLife(folder, declared(policy)).run(range(8))
    assert again.runtime.status()["step"] == 4
    again.end()


# Checkpoints that the disk refuses


def failing(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Let the disk be full when the checkpoints of these steps are written."""
    write = checkpoint.StagedState.write

    def full(self: checkpoint.StagedState, folder: Path, tokenizer: Any, facts: Any) -> None:
        if facts["step"] in steps:
            with checkpoint.shards.explained(folder / "model.safetensors"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, folder, tokenizer, facts)

    monkeypatch.setattr(checkpoint.StagedState, "write", full)


def test_training_goes_on_where_a_checkpoint_cannot_be_written_and_the_next_is_tried(
    policy, tmp_path, monkeypatch
):
    folder = run_folder(tmp_path)
    failing(monkeypatch, {4})
    life = TrainerLife(folder, declared(policy, checkpoint_every=2), steps=6).run(range(12))
    assert life.runtime.status()["done"] == 1
    assert folder.checkpoints.steps() == [2, 6]
    ((_, facts),) = [line for line in life.log.lines if "checkpoint not written" in line[0]]
    assert (facts["step"], facts["newest"]) == (
        4,
        2,
    ) and "No space left on device; make room" in facts["error"]
    life.end()
    assert verify(folder.path).clean, verify(folder.path)


def test_a_run_whose_last_checkpoint_cannot_be_written_ends_with_an_error_and_the_one_before_it(
    policy, tmp_path, monkeypatch
):
    folder = run_folder(tmp_path)
    failing(monkeypatch, {4})
    life = TrainerLife(folder, declared(policy, checkpoint_every=2), steps=4)
    with pytest.raises(
        RunFolderError,
        match=r"writing '.*step-000004.*' failed: No space left on device; make room",
    ):
        life.run(range(8))
    life.end()
    assert folder.checkpoints.latest() == 2 and list(life.plane.published)[-1] == 4
    monkeypatch.undo()
    again = TrainerLife(folder, declared(policy, checkpoint_every=2), steps=4).run()
    assert folder.checkpoints.latest() == 4 and same(again.state(), life.state())
    again.end()


# Several ranks


def held(learner: Learner, rank: int, ranks: int) -> list[str]:
    """A digest of this rank's shards of weights and moments."""
    tensors = learner.parameters | state_tensors(learner.optimizer, learner.parameters)
    return [
        hashlib.sha256(local(tensor).detach().numpy().tobytes()).hexdigest()
        for tensor in tensors.values()
    ]


@in_a_fork
def life_of_two(folder: RunFolder, trainer: Trainer, numbers: range, digests: Path) -> None:
    """A life on two ranks; what each of them holds at its end."""
    life = TrainerLife(folder, trainer, ranks=2, writer=None, own_folder="trainer").run(numbers)
    digests.write_text(json.dumps(life.runtime._learner.everywhere(held)))
    life.end()


@SLOW
@pytest.mark.parametrize("every", [2, None])
def test_several_ranks_catch_up_to_the_very_bits_that_each_had(policy, tmp_path, every):
    folder, trainer = run_folder(tmp_path), declared(policy, checkpoint_every=every)
    life_of_two(folder, trainer, range(6), tmp_path / "had")
    assert folder.checkpoints_of("trainer").steps() == ([2] if every else [])
    life_of_two(folder, trainer, range(0), tmp_path / "again")
    had, again = (json.loads((tmp_path / name).read_text()) for name in ("had", "again"))
    assert had == again and had[0] != had[1]
