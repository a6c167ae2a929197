"""A trainer that offloads: the same weights, with nothing on the device while it waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_rig import Rig, group, rig, tiny_trainer

from operators.training.learner import build
from operators.training.learner.memory import OffloadedLearner

GROUPS = [group(number, advantages=[1.0, -0.5, 0.25]) for number in range(6)]


@pytest.fixture(autouse=True)
def main_memory_as_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(
        build, "OffloadedLearner", lambda learner, folder: OffloadedLearner(learner, tmp_path)
    )


def trained(folder: Path, pending: int | None = None, **knobs: Any) -> tuple[Rig, list[int]]:
    """Three steps, the groups of each only once the trainer waits; the bytes of weights that it
    waits with.
    """
    folder.mkdir()
    made = rig(folder, tiny_trainer(checkpoint_every=2, **knobs), max_staleness=10)
    made.plane.pending = pending  # type: ignore[attr-defined]
    waited = []
    for number in range(0, 6, 2):
        made.push(GROUPS[number])
        made.push(GROUPS[number + 1])
        made.run()
        parameters = made.runtime._learner.parameters.values()
        waited.append(sum(weight.untyped_storage().nbytes() for weight in parameters))
    return made, waited


def test_an_offloading_trainer_publishes_the_same_versions_and_waits_with_nothing_on_the_device(
    tmp_path: Path,
) -> None:
    plain, held = trained(tmp_path / "plain")
    other, waited = trained(tmp_path / "other", offload=True)
    assert min(held) > 0 and waited == [0, 0, 0]
    assert list(other.plane.published) == [0, 1, 2, 3]
    for version, tensors in plain.plane.published.items():
        assert all(
            torch.equal(other.plane.published[version][name], tensor)
            for name, tensor in tensors.items()
        )


def test_weights_stay_while_a_version_waits_to_be_published(tmp_path: Path) -> None:
    _, waited = trained(tmp_path / "run", pending=1, offload=True)
    assert min(waited) > 0


def test_an_offloading_trainer_writes_its_last_checkpoint(tmp_path: Path) -> None:
    made, _ = trained(tmp_path / "run", offload=True)
    made.runtime.tell({"drain": True})
    made.run()
    assert [event for event in made.events if event[0] == "checkpoint"] == [
        ("checkpoint", 2),
        ("checkpoint", 3),
    ]
