"""Checkpoints that a trainer leaves by itself: what a death costs at most, and that they take
nobody else's place.
"""

import errno
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives_rig import TrainerLife, declared, policy_folder, run_folder, same
from ranks_rig import in_a_fork
from test_trainer_catch_up import VALUED, held, with_values
from trainer_rig import Clock, group

from dataflow.folder.checkpoints import MARKER, TEMPORARY
from dataflow.folder.ledger import Ledger
from dataflow.folder.retention import surplus
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from operators.losses import value_loss
from operators.trainer import Trainer
from operators.training.checkpoints import checkpoint, saving
from operators.training.checkpoints.saving import DEAR, Debt
from operators.training.learner import build
from operators.training.learner.memory import OffloadedLearner

WITHIN_S = 30.0


"""On a clock that goes on by a second with each reading: of several steps."""


DISK_S = 60.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def writing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine's disk is."""
    torch.set_num_threads(1)
    monkeypatch.setattr(saving, "DEAR", 0.0)


def live(folder: RunFolder, trainer: Trainer, numbers: range, **facts: Any) -> TrainerLife:
    """A life whose checkpoints are each written before its next slice of work."""
    make = facts.pop("make", group)
    life = TrainerLife(folder, trainer, clock=Clock(), **facts)
    life.push(*map(make, numbers))
    for _ in life.work():
        written(life)
    return life


def written(life: TrainerLife) -> None:
    deadline = time.monotonic() + DISK_S
    while not life.runtime._saver._background.is_idle and time.monotonic() < deadline:
        time.sleep(0.001)


def die(life: TrainerLife) -> None:
    """As a killed process: nobody closes anything; what was open is gone."""
    life.ledger.close()


def temporary(folder: RunFolder) -> list[int]:
    """The steps whose checkpoints say that they are."""
    steps = folder.checkpoints.steps()
    return [
        step
        for step in steps
        if TEMPORARY in json.loads((folder.checkpoints.folder(step) / MARKER).read_text())
    ]


def test_a_checkpoint_is_due_after_longer_than_the_bound_and_twenty_times_its_own_time() -> None:
    assert not Debt(60.0, seconds=60.0).is_due and Debt(60.0, seconds=61.0).is_due
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "DEAR", DEAR)
        assert Debt(60.0, seconds=61.0, cost_s=3.0).is_due
        assert (
            not Debt(60.0, seconds=1199.0, cost_s=60.0).is_due
            and Debt(60.0, seconds=1201.0, cost_s=60.0).is_due
        )
    assert not Debt(float("inf"), seconds=1e12).is_due


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "policy": ({}, {}),
    "critic": (
        {"model": {"head": "value"}, "loss": value_loss},
        {"columns": VALUED, "make": with_values},
    ),
}


@pytest.mark.parametrize("kind", ["policy", pytest.param("critic", marks=pytest.mark.slow)])
def test_a_killed_trainer_makes_only_the_steps_after_its_own_checkpoint_again_and_to_the_bit(
    policy, tmp_path, kind
):
    knobs, facts = CASES[kind]
    folder, trainer = run_folder(tmp_path, 48), declared(policy, recover_within_s=WITHIN_S, **knobs)
    first = live(folder, trainer, range(40), **facts)
    had = first.state()
    die(first)
    assert first.runtime.status()["step"] == 20
    (kept,) = folder.checkpoints.steps()
    assert 12 < kept < 20
    again = TrainerLife(
        folder,
        trainer,
        columns=facts.get("columns", first.context.graph.columns["prompts"]),
        clock=Clock(),
    )
    assert again.runtime.status()["catching_up"] == 20 - kept
    again.run()
    assert same(again.state(), had)
    again.push(*map(facts.get("make", group), range(40, 48)))
    again.run().end()
    undisturbed = live(
        run_folder(tmp_path, 48),
        declared(policy, recover_within_s=float("inf"), **knobs),
        range(48),
        **facts,
    )
    undisturbed.end()
    assert undisturbed.folder.checkpoints.steps() == []
    assert same(again.state(), undisturbed.state())
    losses = [
        [line["loss"] for line in life.folder.read_metrics()] for life in (again, undisturbed)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 24
    assert verify(folder.path).clean, verify(folder.path)


def test_only_the_newest_stays_over_all_lives_and_one_that_was_asked_for_is_never_removed(
    policy, tmp_path
):
    folder, seen = run_folder(tmp_path, 48), set()
    trainer = declared(policy, recover_within_s=9.0, checkpoint_every=7)
    for numbers in (range(24), range(24, 48)):
        life = TrainerLife(folder, trainer, clock=Clock())
        life.push(*map(group, numbers))
        for status in life.work():
            written(life)
            own = temporary(folder)
            seen.update(own)
            assert len(own) <= 1
            assert set(folder.checkpoints.steps()) - set(own) == {
                step for step in (7, 14, 21) if step <= status["step"]
            }
        die(life)
    assert len(seen) >= 4 and not seen & {7, 14, 21}
    with Ledger.open(folder.ledger) as ledger:
        rows = ledger._db.execute("SELECT step FROM steps WHERE checkpoint IS NOT NULL").fetchall()
    assert rows == [(7,), (14,), (21,)], "the ledger names none that goes away"


@pytest.mark.parametrize(
    ("keep_steps", "left"), [(None, [8, 10]), (6, [4, 6, 8, 10]), (2, [8, 10])]
)
def test_of_those_that_stay_the_newest_do_and_the_one_that_a_replay_of_the_last_steps_begins_with(
    keep_steps, left, policy, tmp_path
):
    folder = run_folder(tmp_path, 48)
    trainer = declared(
        policy, recover_within_s=float("inf"), checkpoint_every=2, save_total_limit=2
    )
    life = TrainerLife(folder, trainer, clock=Clock(), keep_steps=keep_steps)
    life.push(*map(group, range(20)))
    for status in life.work():
        written(life)
        life.runtime._saver.note()
        assert len(folder.checkpoints.staying()) <= 2 + 2 * (keep_steps == 6), status
    assert folder.checkpoints.steps() == left
    with Ledger.open(folder.ledger) as ledger:
        rows = ledger._db.execute("SELECT step FROM steps WHERE checkpoint IS NOT NULL").fetchall()
    assert rows == [(step,) for step in left], "the ledger names none that is gone"
    kept = [step for step, _ in folder.rollouts_of().files("step")]
    assert kept == list(range(1 if keep_steps is None else {6: 5, 2: 9}[keep_steps], 11))
    had = life.state()
    die(life)
    again = TrainerLife(folder, trainer, clock=Clock()).run()
    assert same(again.state(), had) and verify(folder.path).clean


def test_the_oldest_multiples_go_and_nothing_that_was_asked_for():
    known = {"every": 5, "last": 32, "keep_steps": None}
    assert surplus(staying=[5, 10, 12, 15, 20, 32], most=2, **known) == [5, 10]
    assert surplus(staying=[5, 10, 12], most=2, **known) == []
    assert surplus(staying=[5, 10, 15, 20, 25, 30], most=1, **known | {"keep_steps": 15}) == [
        5,
        10,
        25,
    ]
    assert surplus(staying=[5, 10, 12, 20, 30], most=1, **known | {"keep_steps": 19}) == [5, 10]


def test_the_seconds_of_writing_one_are_told_where_those_of_the_others_are(policy, tmp_path):
    folder = run_folder(tmp_path)
    life = live(folder, declared(policy, recover_within_s=1.0, checkpoint_every=4), range(10))
    life.end()
    assert [line["step"] for line in folder.read_metrics() if "seconds_checkpoint" in line] == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    "ends", ["with its steps", "drained", "at the end of its rows", "drained after a resume"]
)
def test_the_last_checkpoint_stays_even_where_it_was_left_to_recover_from(policy, tmp_path, ends):
    folder, trainer = run_folder(tmp_path), declared(policy, recover_within_s=1.0)
    life = live(folder, trainer, range(6), steps=3 if ends == "with its steps" else None)
    if ends == "drained after a resume":
        die(life)
        life = TrainerLife(folder, trainer)
    if ends != "with its steps":
        life.runtime.tell({"end" if ends == "at the end of its rows" else "drain": True})
        life.run()
    assert life.runtime.status()["done"] == 1
    life.end()
    assert folder.checkpoints.steps() == [3] and temporary(folder) == []
    with Ledger.open(folder.ledger) as ledger:
        rows = ledger._db.execute("SELECT step FROM steps WHERE checkpoint IS NOT NULL").fetchall()
    assert rows == [(3,)]


def test_what_is_made_again_counts_too(policy, tmp_path):
    """So that a trainer that dies again and again comes forward."""
    folder = run_folder(tmp_path, 40)
    die(live(folder, declared(policy, recover_within_s=float("inf")), range(40)))
    again = TrainerLife(folder, declared(policy, recover_within_s=WITHIN_S), clock=Clock())
    for status in again.work():
        written(again)
        if status.get("catching_up") == 4:
            break
    die(again)
    (kept,) = folder.checkpoints.steps()
    assert 8 < kept <= 16


def test_training_never_waits_for_one_that_is_being_written(policy, tmp_path, monkeypatch):
    go_on, begun = threading.Event(), []
    write = checkpoint.StagedState.write

    def slow(self: checkpoint.StagedState, folder: Path, tokenizer: Any, facts: Any) -> None:
        begun.append(facts["step"])
        assert go_on.wait(DISK_S)
        write(self, folder, tokenizer, facts)

    monkeypatch.setattr(checkpoint.StagedState, "write", slow)
    folder = run_folder(tmp_path)
    life = TrainerLife(folder, declared(policy, recover_within_s=1.0), clock=Clock()).run(range(12))
    assert life.runtime.status()["step"] == 6 and begun == [1]
    go_on.set()
    written(life)
    life.run(range(12, 14))
    life.end()
    assert begun == [1, 7] and folder.checkpoints.steps() == [7]


# Disks


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Steps for whose checkpoints there is no room."""
    steps: set[int] = set()
    write = checkpoint.StagedState.write

    def refuse(self: checkpoint.StagedState, folder: Path, tokenizer: Any, facts: Any) -> None:
        if facts["step"] in steps:
            with checkpoint.shards.explained(folder / "model.safetensors"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, folder, tokenizer, facts)

    monkeypatch.setattr(checkpoint.StagedState, "write", refuse)
    yield steps


def test_a_full_disk_is_a_warning_the_one_before_stays_and_the_next_is_tried(
    policy, tmp_path, full
):
    folder = run_folder(tmp_path)
    full |= {2, 3}
    life = live(folder, declared(policy, recover_within_s=1.0), range(6))
    life.runtime._saver.note()
    said = [
        facts
        for event, facts in life.log.lines
        if event == "checkpoint not written; training goes on"
    ]
    assert [(facts["step"], facts["newest"]) for facts in said] == [(2, 1), (3, 1)]
    assert all("No space left on device; make room" in facts["error"] for facts in said)
    assert life.runtime.status()["step"] == 3 and folder.checkpoints.steps() == [1]
    life.push(group(6), group(7))
    for _ in life.work():
        written(life)
    life.end()
    assert folder.checkpoints.steps() == [4] and verify(folder.path).clean


def test_one_that_would_leave_too_little_room_for_rollouts_and_ledger_is_not_begun(
    policy, tmp_path, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    needed = 0

    def nearly_full(place: Path) -> Any:
        return usage(1 << 50, 0, saving.SPARE_BYTES + needed - 1)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    folder = run_folder(tmp_path)
    life = TrainerLife(
        folder, declared(policy, recover_within_s=1.0, checkpoint_every=3), clock=Clock()
    )
    needed = checkpoint.nbytes(life.runtime._learner)
    for number in range(0, 8, 2):
        life.run(range(number, number + 2))
        written(life)
    life.end()
    said = [
        facts
        for event, facts in life.log.lines
        if event == "checkpoint not written; training goes on"
    ]
    assert [facts["step"] for facts in said] == [1, 2, 4]
    assert "make room there, or set recover_within_s=inf" in said[0]["error"]
    assert folder.checkpoints.steps() == [3], "one that was asked for is tried all the same"


def test_the_room_that_is_asked_for_is_about_what_a_checkpoint_takes(policy, tmp_path):
    life = live(run_folder(tmp_path), declared(policy, recover_within_s=1.0), range(2))
    written(life)
    place = life.folder.checkpoints.folder(1)
    taken = sum(path.stat().st_size for path in place.rglob("*.safetensors"))
    life.end()
    assert 0.8 * taken < checkpoint.nbytes(life.runtime._learner) <= taken


def test_an_old_one_that_cannot_be_removed_is_a_warning_and_goes_later(
    policy, tmp_path, monkeypatch
):
    folder, remove = run_folder(tmp_path), shutil.rmtree

    def refuse(place: Path, *given: Any, **named: Any) -> None:
        if str(place).endswith(".removed"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(place, *given, **named)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    life = live(folder, declared(policy, recover_within_s=1.0), range(4))
    assert "temporary checkpoint not removed" in life.log
    assert life.runtime.status()["step"] == 2 and folder.checkpoints.steps() == [2]
    monkeypatch.undo()
    monkeypatch.setattr(saving, "DEAR", 0.0)
    life.push(group(4), group(5))
    for _ in life.work():
        written(life)
    life.end()
    assert [path.name for path in folder.checkpoints.path.iterdir()] == ["step-000003"]


# Parked state, and ranks


@pytest.mark.parametrize("recover_within_s", [1.0, float("inf")])
def test_an_offloading_trainer_that_catches_up_leaves_whole_checkpoints(
    policy, tmp_path, monkeypatch, recover_within_s
):
    monkeypatch.setattr(
        build, "OffloadedLearner", lambda learner, aside: OffloadedLearner(learner, tmp_path)
    )
    folder = run_folder(tmp_path)
    die(live(folder, declared(policy, recover_within_s=float("inf")), range(8)))
    shutil.rmtree(folder.checkpoints.path)
    trainer = declared(policy, offload=True, recover_within_s=recover_within_s)
    again = live(folder, trainer, range(0), steps=4)
    assert again.runtime.status()["done"] == 1
    again.end()
    third = TrainerLife(folder, declared(policy), steps=4)
    assert folder.checkpoints.latest() == 4 and third.runtime.status()["step"] == 4
    plain = live(run_folder(tmp_path), declared(policy), range(8))
    assert same(third.state(), plain.state())
    third.end()
    plain.end()


def test_an_offloading_trainer_that_caught_up_tries_its_last_checkpoint_again(
    policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        build, "OffloadedLearner", lambda learner, aside: OffloadedLearner(learner, tmp_path)
    )
    folder, left = run_folder(tmp_path), [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    die(live(folder, declared(policy, recover_within_s=float("inf")), range(4)))
    write = checkpoint.StagedState.write

    def refuse_once(self: checkpoint.StagedState, folder: Path, tokenizer: Any, facts: Any) -> None:
        with checkpoint.shards.explained(folder / "model.safetensors"):
            while left:
                raise left.pop()
        write(self, folder, tokenizer, facts)

    monkeypatch.setattr(checkpoint.StagedState, "write", refuse_once)
    again = live(folder, declared(policy, offload=True), range(0), steps=2)
    assert "checkpoint not written" in again.log and again.runtime.status()["done"] == 1
    again.end()
    third = TrainerLife(folder, declared(policy), steps=2)
    assert same(third.state(), live(run_folder(tmp_path), declared(policy), range(4)).state())
    third.end()


@in_a_fork
def life_of_two(folder: RunFolder, trainer: Trainer, numbers: range, digests: Path) -> None:
    """A life on two ranks; what each of them holds at its end, and how many steps it was behind at
    its start.
    """
    saving.DEAR = 0.0
    life = TrainerLife(folder, trainer, ranks=2, writer=None, own_folder="trainer", clock=Clock())
    behind = life.runtime.status().get("catching_up", 0)
    life.push(*map(group, numbers))
    for _ in life.work():
        written(life)
    digests.write_text(json.dumps([behind, life.runtime._learner.everywhere(held)]))
    life.end()


@pytest.mark.slow
def test_several_ranks_leave_one_and_come_back_from_it_to_the_very_bits_that_each_had(
    policy, tmp_path
):
    folder, trainer = run_folder(tmp_path, 40), declared(policy, recover_within_s=WITHIN_S)
    life_of_two(folder, trainer, range(24), tmp_path / "had")
    (kept,) = folder.checkpoints_of("trainer").steps()
    life_of_two(folder, trainer, range(0), tmp_path / "again")
    had, again = (json.loads((tmp_path / name).read_text()) for name in ("had", "again"))
    assert (had[0], again[0]) == (0, 12 - kept) and had[1] == again[1] and had[1][0] != had[1][1]
