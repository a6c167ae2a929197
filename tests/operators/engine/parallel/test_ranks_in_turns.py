"""An engine of two ranks gives its memory back on both, and draws afterwards what it would have
drawn.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import drive
from rigs.operators import make_context
from slices_rig import Rig, assert_slices
from test_two_ranks import assert_alike, groups, take

from dataflow.errors import WorkerDied
from dataflow.limits import Limits
from operators.engine.decode import put_aside
from operators.engine.parallel.lockstep import make_parallel
from operators.models.read_weights import ReadWeights

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def frozen() -> Iterator[Callable[..., Any]]:
    """Ranks that nobody sends weights to."""
    made: list[Any] = []

    def make(declaration: Any, aside: Path, device: str = "cpu") -> Any:
        limits = Limits(start_s=90.0, exchange_s=30.0)
        context = make_context(node="generator", device=device, aside=aside, limits=limits)
        made.append(make_parallel(declaration, context, 2))
        return made[-1]

    yield make
    for built in made:
        built.engine.close()


class Sleeping:
    """The engine with its weights, as a generator's runtime has them."""

    def __init__(self, rig: Rig, aside: Path) -> None:
        self.rig = rig
        self.weights = ReadWeights(rig.reader, {}, aside, rig.ranks)

    def sleep(self) -> None:
        self.weights.sleep(put_aside(self.rig.native))

    def wake(self) -> None:
        self.weights.wake()

    def take(self) -> None:
        """Have weights again, as they were or newer."""
        version = None
        while version is None:
            version = self.weights.take()
        self.rig.engine.adopted(version)

    def hear(self, version: int) -> None:
        """Until this version is offered to one that is asleep."""
        while self.weights.version != version:
            self.rig.writer.poll()
            self.weights.hear()


def asleep_bytes(pid: int) -> list[int]:
    """Sizes of the files without a name in which a process has put memory aside."""
    found = [
        each for each in Path(f"/proc/{pid}/fd").iterdir() if ".aside-" in str(each.readlink())
    ]
    return [each.stat().st_size for each in found]


@pytest.mark.parametrize(
    "executor", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)]
)
def test_rollouts_go_on_after_all_ranks_slept_with_the_tokens_they_would_have_drawn(
    executor: str, declare: Any, make_model: Any, alone: Any, fed: Any, tmp_path: Path
) -> None:
    declaration = declare("llama", on_update="recompute")
    newer = {
        version: dict(make_model("llama", seed=version).named_parameters()) for version in (1, 2)
    }

    def run(engine: Any, update: Callable[[int, int], object]) -> Any:
        def at_step(step: int) -> None:
            if step in (3, 6, 7, 10):
                update(step, 1 if step < 10 else 2)

        return drive(engine, groups(), at_step)

    one = alone(declaration)
    expected = run(one, lambda step, version: take(one, version, newer[version]))
    ranks = fed(declaration, executor=executor, aside=tmp_path)
    both = Sleeping(ranks, tmp_path)
    pid = ranks.ranks.team._processes[1].pid

    def turn(step: int, version: int) -> None:
        """A new version comes while all are awake at step 3, and while they are asleep at step
        10.
        """
        if step == 3:
            ranks.publish(1, newer[1])
            ranks.offered()
            both.take()
        both.sleep()
        assert ranks.native.cache.layers == [] and ranks.native.rows.n == 0
        assert executor == "gloo" or max(asleep_bytes(pid)) < 100, "what comes again is not kept"
        if step == 10:
            ranks.publish(2, newer[2])
            both.hear(2)
        both.wake()
        both.take()

    assert_alike(run(ranks.engine, turn), expected)
    assert_slices(ranks.engine, newer[2], 2)


@pytest.mark.slow
def test_frozen_ranks_put_their_slices_into_a_file_each_and_take_them_back(
    declare: Any, frozen: Any, tmp_path: Path
) -> None:
    built = frozen(declare("llama"), aside=tmp_path)
    engine, pid = built.engine, built.ranks.team._processes[1].pid
    expected = drive(engine, groups())
    weights = ReadWeights(None, {}, tmp_path, built.ranks)
    weights.sleep(put_aside(built.native))
    own = sum(shard.local.nbytes for shard in engine.shards.values())
    assert [own <= size < 1.1 * own for size in asleep_bytes(pid)] == [True], "half of the model"
    weights.wake()
    version = weights.take()
    assert version == 0
    engine.adopted(version)
    found = drive(engine, groups())
    assert_alike(found, expected)
    assert all(
        found[each]["logprobs"].tolist() == row["logprobs"].tolist()
        for each, row in expected.items()
    )


@pytest.mark.gpu
def test_two_gpus_are_empty_while_their_ranks_sleep(
    declare: Any, frozen: Any, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def used() -> int:
        found = (torch.cuda.mem_get_info(gpu) for gpu in range(2))
        return sum(total - free for free, total in found)

    built = frozen(declare("llama"), aside=tmp_path, device="cuda:0")
    expected, weights = drive(built.engine, groups()), ReadWeights(None, {}, tmp_path, built.ranks)
    before = used()
    weights.sleep(put_aside(built.native))
    assert used() < before, "caches, and what was captured, are gone on both"
    weights.wake()
    version = weights.take()
    assert version == 0
    built.engine.adopted(version)
    assert_alike(drive(built.engine, groups()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["sleep", "wake"])
def test_a_rank_that_dies_in_a_turn_is_named(
    when: str, declare: Any, frozen: Any, tmp_path: Path
) -> None:
    built = frozen(declare("llama"), aside=tmp_path)
    weights, pid = ReadWeights(None, {}, tmp_path, built.ranks), built.ranks.team._processes[1].pid
    if when == "wake":
        weights.sleep(put_aside(built.native))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied,
        match=rf"rank 1 of 'generator' \(pid {pid}\) ended by signal 9"
        rf" .* in (a {when}|its sleep done)",
    ):
        weights.wake() if when == "wake" else weights.sleep(put_aside(built.native))


def test_what_one_rank_does_not_find_again_no_rank_takes(
    declare: Any, make_model: Any, fed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's file has lost its name when rank 0 is inside, and the other rank opens it."""
    ranks = fed(declare("llama"), aside=tmp_path)
    both = Sleeping(ranks, tmp_path)
    newer = {
        version: dict(make_model("llama", seed=version).named_parameters()) for version in (1, 2)
    }
    ranks.publish(1, newer[1])
    ranks.offered()
    both.take()
    both.sleep()
    both.wake()
    lead = ranks.opens.end[0]
    entered = lead.enter_again

    def unlinked() -> Any:
        held = entered()
        Path(ranks.opens.folder, held.segment).unlink()
        return held

    monkeypatch.setattr(lead, "enter_again", unlinked)
    assert both.weights.take() is None and not both.weights.ready and not both.weights.can_be_had
    ranks.publish(2, newer[2])
    ranks.offered()
    both.take()
    assert_slices(ranks.engine, newer[2], 2)
